"""Orders that depend only on a seed."""

from collections.abc import Sequence

import numpy as np

from packplan.core.lengths import IntArray


def seeded_permutation(num: int, *, seed: int | Sequence[int]) -> IntArray:
    """
    Return a permutation of the numbers below *num* that depends only on *seed*.

    It is the same under every version of numpy.

    Args:
        num: Number of values, >= 0.
        seed: A number from 0, or several.
    """
    # numpy promises that the raw stream of a bit generator never changes. It promises nothing for
    # `permutation`.
    return np.argsort(np.random.PCG64(seed).random_raw(num), kind="stable")
