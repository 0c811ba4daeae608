"""First fit in an order shuffled by a seed."""

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packs import Packs
from packplan.core.shuffling import shuffled


def first_fit_shuffle(lengths: IntArray, *, capacity: int, seed: int) -> Packs:
    """
    Put samples, in a shuffled order, into the first bin that each fits.

    Args:
        lengths: Tokens, each from 1 to *capacity*.
        capacity: Tokens a bin may hold.
        seed: Seed of the order, >= 0.
    """
    order = shuffled(lengths.size, seed=seed)
    labels = np.empty(lengths.size, dtype=np.int32)
    labels[order] = _first_fit(lengths[order].tolist(), capacity)
    return Packs.from_labels(labels)


def _first_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the bin of each length. A tree over the bins holds the most room below each node."""
    leaves = 1
    room = [0, capacity]
    bins = []
    for length in lengths:
        if room[1] < length:
            # Every bin is open and none fits: double the bins, with the old ones as the left half.
            grown = [0] * 2 + [capacity] * (4 * leaves - 2)
            level = 1
            while level <= leaves:
                grown[2 * level : 3 * level] = room[level : 2 * level]
                level *= 2
            grown[1] = capacity
            leaves, room = 2 * leaves, grown
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        bins.append(node - leaves)
        most = room[node] - length
        room[node] = most
        while node > 1:
            beside = room[node ^ 1]
            most = max(most, beside)
            node >>= 1
            if room[node] == most:
                break
            room[node] = most
    return bins
