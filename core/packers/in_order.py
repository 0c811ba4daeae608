"""
Packers that place samples one by one, in the order of the data or in a random order.

The literature calls the packing in the order of the data "next fit".
"""

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packs import BLOCK, Packs
from packplan.core.shuffling import seeded_permutation


def concatenative(lengths: IntArray, *, capacity: int) -> Packs:
    """
    Return packs of consecutive samples. A sample that does not fit starts a new pack.

    Args:
        lengths: Number of tokens of each sample, each from 1 to *capacity*; at least one sample.
        capacity: Maximum number of tokens in a pack.
    """
    offsets = [0]
    start, block = 0, BLOCK
    while True:
        inside = lengths[start : start + block]
        ends = np.cumsum(inside)
        # following[i]: the first sample that does not fit into a pack that starts at sample i.
        following = np.searchsorted(ends - capacity, ends - inside, side="right").tolist()
        at = 0
        while following[at] < inside.size:
            at = following[at]
            offsets.append(start + at)
        if start + inside.size == lengths.size:
            offsets.append(lengths.size)
            return Packs(np.array(offsets, dtype=np.int64), np.arange(lengths.size))
        # The last pack may continue after the block, so the next block starts with it. The block
        # grows if a single pack fills it.
        block = block if at else 2 * block
        start += at


def first_fit_shuffle(lengths: IntArray, *, capacity: int, seed: int) -> Packs:
    """
    Put each sample, in a shuffled order, into the first bin with room for it.

    Args:
        lengths: Number of tokens of each sample, each from 1 to *capacity*.
        capacity: Maximum number of tokens in a bin.
        seed: Seed of the order, >= 0.
    """
    order = seeded_permutation(lengths.size, seed=seed)
    labels = np.empty(lengths.size, dtype=np.int32)
    labels[order] = _first_fit(lengths[order].tolist(), capacity)
    return Packs.from_labels(labels)


def _first_fit(lengths: list[int], capacity: int) -> list[int]:
    """
    Return the bin of each length. Each node of a tree over the bins stores the largest room of the
    bins below it.
    """
    leaves = 1
    room = [0, capacity]
    bins = []
    for length in lengths:
        if room[1] < length:
            # The sample fits in no bin: double the bins, with the existing bins as the left half.
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
