"""
How uneven packs are that meet by chance: what ranks wait in a step of random packs, and the least
that whole samples leave.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def expected_imbalance(works: NDArray[Any], *, world_size: int) -> float:
    """
    Return the work of the heaviest of so many packs drawn at random, over the mean pack's: the mean
    over all draws, exactly.

    Args:
        works: Work of each pack, >= 0; at least one.
        world_size: Packs that meet, >= 1; where there are fewer packs, all meet.

    >>> expected_imbalance(np.array([1, 2, 3]), world_size=2)
    1.3333333333333333
    """
    rising = np.sort(np.asarray(works, dtype=np.float64))
    if not rising[-1]:
        return 1.0
    drawn = min(world_size, rising.size)
    below = np.arange(drawn, rising.size, dtype=np.float64)
    # That the pack with so many below it is the heaviest of a draw, over the same of the one above.
    ratios = (below - drawn + 1) / below
    chances = drawn / rising.size * np.concatenate([np.cumprod(ratios[::-1])[::-1], [1.0]])
    return float((chances * rising[drawn - 1 :]).sum() / rising.mean())


def floor_of(works: NDArray[Any], *, num_packs: int) -> NDArray[np.float64]:
    """
    Return the works that packs would have if only samples too heavy for a pack of the mean work
    made them uneven; shape (num_packs,).

    No packs of whole samples are more even: a pack has at least the work of each of its samples.
    How many tokens a pack may hold is left aside.

    Args:
        works: Work of each sample, >= 0; at least one.
        num_packs: Packs, >= 1, at most the samples.

    >>> floor_of(np.array([8, 1, 2, 3]), num_packs=3).tolist()
    [8.0, 3.0, 3.0]
    """
    array = np.asarray(works, dtype=np.float64)
    total = float(array.sum())
    heavy = np.sort(array[array > total / num_packs])[::-1]
    left = total - np.concatenate([[0.0], np.cumsum(heavy)])[: heavy.size]
    # Once a sample is below the mean of what is left, so are all after it.
    alone = int((np.cumprod(heavy * (num_packs - np.arange(heavy.size)) > left)).sum())
    alone = min(alone, num_packs - 1)
    level = (total - float(heavy[:alone].sum())) / (num_packs - alone)
    return np.concatenate([heavy[:alone], np.full(num_packs - alone, level)])
