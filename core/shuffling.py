"""Random orders that depend only on a seed."""

from collections.abc import Sequence

import numpy as np

from packplan.core.lengths import IntArray


def seeded_permutation(num: int, *, seed: int | Sequence[int]) -> IntArray:
    """
    Return a permutation of the numbers below *num* that depends only on *seed*.

    The permutation is the same with every version of numpy.

    Args:
        num: Number of values, >= 0.
        seed: A number from 0, or several such numbers.
    """
    # numpy guarantees that the raw stream of a bit generator never changes, but gives no guarantee
    # for `permutation`.
    return np.argsort(np.random.PCG64(seed).random_raw(num), kind="stable")
