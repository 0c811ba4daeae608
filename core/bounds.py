"""Lower bounds on the number of packs: how far from the best a plan can be."""

from __future__ import annotations

import numpy as np

from core.lengths import Lengths, as_lengths, positive


def lower_bound(lengths: Lengths, *, capacity: int) -> int:
    """
    Return a number of packs that no packing can go below.

    The bound L2 of Martello and Toth ("Lower bounds and reduction procedures for the bin packing problem",
    1990): for every threshold K up to half the capacity, samples above `capacity - K` need a pack each, samples
    above half need one each and leave room, and what of the samples from K up exceeds that room needs more.

    Args:
        lengths: Tokens of each sample, each from 1 to *capacity*.

        capacity: Tokens a pack may hold, >= 1.

    >>> lower_bound([60, 60, 50], capacity=100)
    3
    """
    capacity = positive("capacity", capacity)
    array = np.sort(as_lengths(lengths))
    if not array.size:
        return 0
    tokens = np.concatenate([[0], np.cumsum(array)])
    halves = int(np.searchsorted(array, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], np.unique(array[:halves])])
    # [0, small) are below K, [small, halves) up to half, [halves, large) leave room for K, [large, n) do not.
    small = np.searchsorted(array, thresholds, side="left")
    large = np.maximum(np.searchsorted(array, capacity - thresholds, side="right"), halves)
    room = (large - halves) * capacity - (tokens[large] - tokens[halves])
    excess = np.maximum(tokens[halves] - tokens[small] - room, 0)
    return int(np.max((array.size - halves) + -(-excess // capacity)))
