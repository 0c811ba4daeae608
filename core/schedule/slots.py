"""
Slots of an epoch: the places of packs that several ranks share.

A microbatch of W ranks has W slots. A pack of degree d takes d of them, at a multiple of d: those
of the ranks that share it. Degrees are powers of two that divide W.

Packs of one degree take about as long, and a rank that has a short one would wait for them. So
within each window of the order, packs stand by descending degree, which also aligns them. Groups of
microbatches then return to the place that one of their packs was drawn for.

A pack that needs more slots than its window has left waits for the next, and smaller packs behind
it fill the place. Since the slots of all packs are a multiple of W, every microbatch is full. The
slots do not depend on the number of microbatches in a step.
"""

from collections import deque

import numpy as np

from packplan.core.lengths import IntArray


def lay_out_slots(degrees: IntArray, world_size: int, *, window: int = 64, group: int = 8) -> IntArray:
    """
    Return the pack of each slot, as its place in the given order; shape (num_slots,).

    Args:
        degrees: Slots of each pack, powers of two that divide *world_size*, in the order of the
            epoch. Their sum is a multiple of *world_size*.
        world_size: Slots of a microbatch, one a rank.
        window: Microbatches among which packs may move; a multiple of *group*.
        group: Microbatches that stay together.

    >>> lay_out_slots(np.array([1, 4, 1, 2, 1, 1, 1, 1]), 4, window=1, group=1).tolist()
    [3, 3, 0, 2, 1, 1, 1, 1, 4, 5, 6, 7]
    """
    if degrees.max(initial=1) == 1:
        return np.arange(degrees.size)
    shared, room = np.flatnonzero(degrees > 1), window * world_size
    windows = np.empty(degrees.size, dtype=np.int64)
    windows[shared] = _place_shared(degrees[shared], shared - np.arange(shared.size), degrees.size, room)
    taken = np.bincount(windows[shared], weights=degrees[shared], minlength=-(-int(degrees.sum()) // room))
    ones = np.flatnonzero(degrees == 1)
    windows[ones] = np.repeat(np.arange(taken.size), room - taken.astype(np.int64))[: ones.size]
    packs = np.lexsort((-degrees, windows))
    slots = np.repeat(packs, degrees[packs]).reshape(-1, world_size)
    starts = np.arange(0, len(slots), group)
    drawn = slots[np.minimum(starts + group // 2, len(slots) - 1), 0]
    if len(slots) % group:
        drawn[-1] = degrees.size  # a smaller group stays last
    starts = starts[np.lexsort((drawn, starts // window))]
    rows = (starts[:, None] + np.arange(group)).ravel()
    order: IntArray = slots[rows[rows < len(slots)]].ravel()
    return order


def _place_shared(degrees: IntArray, ones_before: IntArray, num_packs: int, room: int) -> IntArray:
    """
    Return the window of each shared pack; of the shape of *degrees*.

    Args:
        degrees: Slots of each shared pack, at least 2, in order.
        ones_before: Packs of one slot that come before each in the order.
        num_packs: All packs.
        room: Slots of a window.
    """
    waiting: dict[int, deque[int]] = {degree: deque() for degree in np.unique(degrees).tolist()}
    numbers = np.empty(degrees.size, dtype=np.int64)
    number, free, seen = 0, room, 0

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
        while run >= free:  # the window is full
            run, number, free = run - free, number + 1, room
            if any(waiting.values()):
                place_waiting()
            else:
                number, run = number + run // room, run % room
        free -= run
        if degree:
            waiting[degree].append(place)
            place_waiting()
    return numbers
