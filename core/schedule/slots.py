"""
Slots of an epoch: the places of packs that several ranks share.

A microbatch of W ranks has W slots. A pack of degree d takes d of them, at a multiple of d: those
of the ranks that share it. Degrees are powers of two that divide W.

Packs keep their order as far as they fit: one that needs more slots than its microbatch has left
waits, and comes first in the next one. Smaller packs behind it fill the place. Since the slots of
all packs are a multiple of W, every microbatch is full. So the slots do not depend on the number of
microbatches in a step.
"""

from collections import deque

import numpy as np

from packplan.core.lengths import IntArray


def lay_out_slots(degrees: IntArray, world_size: int) -> IntArray:
    """
    Return the pack of each slot, as its place in the given order; shape (num_slots,).

    Args:
        degrees: Slots of each pack, powers of two that divide *world_size*, in the order of the
            epoch. Their sum is a multiple of *world_size*.
        world_size: Slots of a microbatch, one a rank.

    >>> lay_out_slots(np.array([1, 4, 1, 2, 1, 1, 1, 1]), 4).tolist()
    [3, 3, 0, 2, 1, 1, 1, 1, 4, 5, 6, 7]
    """
    if degrees.max(initial=1) == 1:
        return np.arange(degrees.size)
    shared = np.flatnonzero(degrees > 1)
    numbers = np.empty(degrees.size, dtype=np.int64)
    numbers[shared] = _place_shared(degrees[shared], shared - np.arange(shared.size), degrees.size, world_size)
    taken = np.bincount(numbers[shared], weights=degrees[shared], minlength=int(degrees.sum()) // world_size)
    numbers[degrees == 1] = np.repeat(np.arange(taken.size), world_size - taken.astype(np.int64))
    packs = np.lexsort((-degrees, numbers))
    return np.repeat(packs, degrees[packs])


def _place_shared(degrees: IntArray, ones_before: IntArray, num_packs: int, world_size: int) -> IntArray:
    """
    Return the microbatch of each shared pack; of the shape of *degrees*.

    Args:
        degrees: Slots of each shared pack, at least 2, in order.
        ones_before: Packs of one slot that come before each in the order.
        num_packs: All packs.
        world_size: Slots of a microbatch.
    """
    waiting: dict[int, deque[int]] = {degree: deque() for degree in np.unique(degrees).tolist()}
    numbers = np.empty(degrees.size, dtype=np.int64)
    number, free, seen = 0, world_size, 0

    def place_waiting() -> None:
        nonlocal free
        while fitting := [queue for degree, queue in waiting.items() if queue and degree <= free]:
            place = min(fitting, key=lambda queue: queue[0]).popleft()
            numbers[place] = number
            free -= sizes[place]

    sizes = degrees.tolist()
    arrivals = [*zip(sizes, ones_before.tolist(), strict=True), (0, num_packs - degrees.size)]
    for place, (degree, ones) in enumerate(arrivals):
        run, seen = ones - seen, ones
        while run >= free:  # the microbatch is full
            run, number, free = run - free, number + 1, world_size
            if any(waiting.values()):
                place_waiting()
            else:
                number, run = number + run // world_size, run % world_size
        free -= run
        if degree:
            waiting[degree].append(place)
            place_waiting()
    return numbers
