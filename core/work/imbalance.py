"""
Imbalance of packs that run together by chance, and its lower bound for packs of whole samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def expected_imbalance(works: NDArray[Any], *, world_size: int) -> float:
    """
    Return the mean work of the heaviest of *world_size* random packs, over the mean work of a pack.

    Args:
        works: Work of each pack, >= 0; at least one.
        world_size: Number of packs drawn, >= 1; all of them if there are fewer.

    >>> expected_imbalance(np.array([1, 2, 3]), world_size=2)
    1.3333333333333333
    """
    rising = np.sort(np.asarray(works, dtype=np.float64))
    if not rising[-1]:
        return 1.0
    drawn = min(world_size, rising.size)
    below = np.arange(drawn, rising.size, dtype=np.float64)
    # Probability that a pack is the heaviest of a draw, over that of the next heavier pack.
    ratios = (below - drawn + 1) / below
    chances = drawn / rising.size * np.concatenate([np.cumprod(ratios[::-1])[::-1], [1.0]])
    return float((chances * rising[drawn - 1 :]).sum() / rising.mean())


def floor_of(works: NDArray[Any], *, num_packs: int) -> NDArray[np.float64]:
    """
    Return the most even works that packs of whole samples could have; float64, shape (num_packs,).

    A pack has at least the work of each of its samples, so samples above the mean work of a pack
    make packs uneven. The capacity of packs is left aside.

    Args:
        works: Work of each sample, >= 0; at least one.
        num_packs: Number of packs, from 1 to the number of samples.

    >>> floor_of(np.array([8, 1, 2, 3]), num_packs=3).tolist()
    [8.0, 3.0, 3.0]
    """
    array = np.asarray(works, dtype=np.float64)
    total = float(array.sum())
    heavy = np.sort(array[array > total / num_packs])[::-1]
    left = total - np.concatenate([[0.0], np.cumsum(heavy)])[: heavy.size]
    # Once a sample is below the mean of the rest, so are all after it.
    alone = int((np.cumprod(heavy * (num_packs - np.arange(heavy.size)) > left)).sum())
    alone = min(alone, num_packs - 1)
    level = (total - float(heavy[:alone].sum())) / (num_packs - alone)
    return np.concatenate([heavy[:alone], np.full(num_packs - alone, level)])
