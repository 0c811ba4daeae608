"""
Ordered: packs of few samples more than their own neighbours, so that the order of the data stays.

The place of a sample is its index. Its position is where it comes if packs are read one after the
other. No position is further from the place than the allowed displacement:

- Each pack opens with the first sample that is not packed yet. So packs come in canonical order.
- A sample is taken early only if its place is at most the displacement beyond the next position.
- A sample is taken out of turn only while the first that is not packed can still wait. The others
  can wait as long, for they have later places and keep their order.
- Ascending order inside a pack never raises the largest displacement.

A pack takes samples in turn until the room is that of two long samples. It then takes those of the
window that fill the room best, looking one sample ahead. So the window keeps its mixture of
lengths, and the last samples of a pack are chosen from many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packers.concatenative import concatenative
from packplan.core.packers.constant_volume import constant_volume
from packplan.core.packs import Packs
from packplan.core.runs import Runs

_WINDOW = 1024
"""Largest displacement that is used, unless all are allowed. A larger one gives no better packs."""

_TRIES = 32
"""Samples of the window that are tried for a pack's last but one place."""

_LONG = 10
"""One in so many samples of the window is longer than a long one."""


def ordered(lengths: IntArray, *, capacity: int, max_displacement: int) -> Packs:
    """
    Return packs in which no sample moves far.

    Args:
        lengths: Tokens, each from 1 to *capacity*; at least one.
        capacity: Tokens a pack may hold.
        max_displacement: Samples that a position may be from its place, >= 0. The packs are those
            of `concatenative` at 0, and those of `constant_volume` from the number of samples on.
    """
    if not max_displacement:
        return concatenative(lengths, capacity=capacity)
    if max_displacement >= lengths.size:
        runs = Runs.from_lengths(lengths)
        return constant_volume(runs, capacity=capacity).packs(lengths, runs)
    return _within(lengths, capacity=capacity, window=min(max_displacement, _WINDOW))


def _within(lengths: IntArray, *, capacity: int, window: int) -> Packs:
    """Return packs in which no sample moves further than *window*, below the number of samples."""
    num = lengths.size
    tokens = np.ascontiguousarray(lengths).data
    # The last is a sample that is never packed.
    labels = np.full(num + 1, -1, dtype=np.int32)
    label = labels.data
    # Keys of the samples that may come next, shortest first; of equal ones the last first.
    pool = sorted(tokens[index] * num - index for index in range(window + 1))
    first = room = 0
    pack = -1
    for position in range(num):
        oldest = tokens[first] * num - first
        if position - first < window:
            at = _fitting(pool, oldest, room=room, num=num)
        else:
            at = bisect_left(pool, oldest) if tokens[first] <= room else -1
        if at < 0:
            pack, room, at = pack + 1, capacity, bisect_left(pool, oldest)
        index = -pool.pop(at) % num
        room -= tokens[index]
        label[index] = pack
        while label[first] >= 0:
            first += 1
        following = position + window + 1
        if following < num:
            insort(pool, tokens[following] * num - following)
    return Packs.from_labels(labels[:num])


def _fitting(pool: list[int], oldest: int, *, room: int, num: int) -> int:
    """Return where the sample to take next is in *pool*, -1 if none fits."""
    # The tokens of a key are -(-key // num).
    if oldest <= room * num and pool[-1 - len(pool) // _LONG] <= room // 2 * num:
        return bisect_left(pool, oldest)
    best = longest = bisect_right(pool, room * num) - 1
    least = room + -pool[longest] // num
    for at in range(longest, max(-1, longest - _TRIES), -1):
        if not least:
            break
        left = room + -pool[at] // num
        beside = bisect_right(pool, left * num) - 1
        beside -= beside == at
        if beside >= 0 and left + -pool[beside] // num < least:
            best, least = at, left + -pool[beside] // num
    return best
