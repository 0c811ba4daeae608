"""
Microbatches of workers that wait for each other as little as possible, by the best of several cuts.
"""

from __future__ import annotations

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packers import with_bin_count
from packplan.core.packs import Packs
from packplan.core.shard.assignment import assign_packs, balanced, with_filler
from packplan.core.shard.rounds import in_rounds, spread
from packplan.core.work import Meeting


def cut_evenly(
    packs: Packs,
    costs: IntArray,
    works: IntArray,
    *,
    shards: int,
    rounds: int,
    capacity: int,
    meeting: Meeting | None,
) -> IntArray:
    """
    Return the microbatch of each item, worker by worker.

    Args:
        packs: Microbatches of the first items, taken if items do not fit otherwise.
        costs: Positions of each item, at least as many items as microbatches.
        works: Work of each item, in whole units.
        shards: Workers.
        rounds: Microbatches of each worker.
        capacity: Positions of a microbatch.
        meeting: Point where workers wait for each other; None assigns packs in turn.
    """
    if meeting is None:
        return assign_packs(_whole(packs, costs, shards * rounds), works, shards, balance=False)
    even = None
    by_round = spread(costs, works, shards=shards, rounds=rounds, capacity=capacity)
    if by_round is not None:
        even = in_rounds(by_round, costs, works, shards=shards, capacity=capacity)
        # No cut has a busiest worker below the mean.
        mean = -(-int(works.sum()) // shards)
        if meeting == "microbatch" or _busiest(even, works, shards) <= _nearly(mean):
            return even
    by_worker = balanced(costs, works, shards=shards, per_shard=rounds, capacity=capacity)
    if by_worker is None:
        by_worker = assign_packs(_whole(packs, costs, shards * rounds), works, shards, balance=True)
    if even is None:
        even = in_rounds(by_worker, costs, works, shards=shards, capacity=capacity)
    level_enough = _busiest(even, works, shards) <= _nearly(_busiest(by_worker, works, shards))
    return even if meeting == "microbatch" or level_enough else by_worker


def _whole(packs: Packs, costs: IntArray, num: int) -> Packs:
    """Return the packs with filler, split to *num* microbatches."""
    return with_bin_count(with_filler(packs, costs.size), costs, minimum=num, multiple=1)


def _busiest(labels: IntArray, works: IntArray, shards: int) -> int:
    """Return the work of the busiest worker."""
    rounds = (int(labels.max()) + 1) // shards
    sums = np.zeros(shards, dtype=np.int64)
    np.add.at(sums, labels // rounds, works)
    return int(sums.max())


def _nearly(work: int) -> int:
    """Return the work that counts as equal: even microbatches may add a thousandth."""
    return work + work // 1000
