"""Splits the fullest packs until there is a given number of packs."""

from heapq import heapify, heappop, heappush

import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import IntArray
from packplan.core.packs import Packs, concatenate, sort_by_first_index


def split_to_bin_count(packs: Packs, lengths: IntArray, *, minimum: int, multiple: int) -> Packs:
    """
    Split packs until their number is at least *minimum* and a multiple of *multiple*.

    The fullest pack of several samples is split next, into halves of about equal load. Its samples
    go to the emptier half, longest first.

    Args:
        packs: Packs, ordered by first sample.
        lengths: Tokens of each sample.
        minimum: Least number of packs, >= 1. With 1, no samples give no packs.
        multiple: Divisor of the number of packs, >= 1.

    Raises:
        ArgumentError: More packs are wanted than there are samples.
    """
    wanted = -(-max(len(packs), minimum if minimum > 1 else 0) // multiple) * multiple
    if wanted == len(packs):
        return packs
    if wanted > packs.num_samples:
        fact = (
            f"{counted(packs.num_samples, 'sample')} cannot fill {counted(wanted, 'pack')} (min_bin_count {minimum:,}, "
            f"bin_count_multiple {multiple:,}), since no pack may be empty"
        )
        raise ArgumentError("too_few_samples", fact, {"num_samples": packs.num_samples, "num_packs": wanted})
    sizes, loads = packs.sizes().tolist(), packs.loads(lengths).tolist()
    heap = [(-loads[place], place) for place, size in enumerate(sizes) if size > 1]
    heapify(heap)
    split: dict[int, list[int]] = {}  # pack -> its samples now, for packs that were split
    for new in range(len(packs), wanted):
        _, place = heappop(heap)
        members = split.pop(place) if place in split else packs[place]
        for position, half in zip((place, new), _split_in_halves(members, lengths), strict=True):
            split[position] = half
            if len(half) > 1:
                heappush(heap, (-sum(int(lengths[i]) for i in half), position))
    kept = packs.take(np.array([place for place in range(len(packs)) if place not in split], dtype=np.int64))
    return sort_by_first_index(concatenate([kept, Packs.from_lists(split.values())]))


def _split_in_halves(members: list[int], lengths: IntArray) -> tuple[list[int], list[int]]:
    """Split a pack into two of about equal load, neither empty, indices ascending."""
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in sorted(members, key=lambda i: (-int(lengths[i]), i)):
        emptier = int(loads[1] < loads[0])
        halves[emptier].append(index)
        loads[emptier] += int(lengths[index])
    return sorted(halves[0]), sorted(halves[1])
