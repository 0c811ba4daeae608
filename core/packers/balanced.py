"""
Balanced: packs of equal work within the capacity, at most one in two hundred more than the fewest.

Groups of some thousand packs are levelled by themselves: each group gets every so-many-th sample by
length and work, so that groups are alike, and time and memory are linear in the samples. Inside a
group samples go, longest first, to the emptiest pack, whatever the capacity; exchanges then make
the packs fit, and level their work. Until they fit, a sample of so much work that a full pack would
have more than the mean takes the room of the tokens that must not stand beside it: what packs may
stay empty in all is kept for those. Where that does not make packs fit, packs of best fit are
levelled instead, of a smaller capacity if their number allows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from packplan.core.bounds import find_bound
from packplan.core.errors import counted
from packplan.core.lengths import IntArray
from packplan.core.packers.best_fit_decreasing import best_fit_decreasing
from packplan.core.packers.certified import certified
from packplan.core.packers.exchange import Exchange
from packplan.core.packs import Packs
from packplan.core.runs import Runs
from packplan.core.work import WorkModel, in_units

MORE = 200
"""One pack in so many may be one more than are needed: room to level work in."""

_GROUP_SAMPLES, _GROUP_PACKS = 1 << 15, 1 << 10
"""Samples and packs of a group, at least."""

_LIGHT = 4
"""One sample in so many has less work a token than what is taken to stand beside heavy samples."""

_KEPT_EMPTY = (80, 40, 0)
"""
Percent of the room of all packs that may be kept empty beside samples of much work: the first with
which packs fit.
"""

_SHARES = (996, 998, 1000)
"""Thousandths of the capacity that best fit may use, where it is what is levelled."""


def balanced(
    lengths: IntArray, *, capacity: int, works: NDArray[np.float64] | None, report: Callable[[str], None]
) -> Packs:
    """
    Return packs of equal work.

    Args:
        lengths: Tokens, each from 1 to *capacity*.
        capacity: Tokens a pack may hold.
        works: Work of each sample, in any unit, >= 0; of the shape of *lengths*. None takes tokens
            and squares of lengths in the proportion of an ordinary model.
        report: Hears how far it is.
    """
    units = in_units(WorkModel.estimated({}).trained().sample_flops(lengths) if works is None else works)
    fewest = _fewest(lengths, capacity=capacity, report=report)
    limit = min(lengths.size, fewest.num + fewest.num // MORE)
    labels = _spread(lengths, units, num=limit, capacity=capacity, report=report)
    if labels is None:
        report("the packs of best fit are levelled")
        labels = _levelled(lengths, units, fewest.within(limit), capacity=capacity, report=report)
    return Packs.from_labels(np.unique(labels, return_inverse=True)[1].astype(np.int32))


class _Fewest:
    """As few packs as are known to be needed."""

    def __init__(self, lengths: IntArray, capacity: int, packs: Packs, num: int) -> None:
        self._lengths, self._capacity, self._packs = lengths, capacity, packs
        self.num = num
        """A number that the certified packing does not go below."""

    def within(self, limit: int) -> IntArray:
        """Return the pack of each sample in at most *limit* packs, with room where there is any."""
        packs = self._packs
        for share in _SHARES:
            capacity = max(int(self._lengths.max()), self._capacity * share // 1000)
            smaller = _best_fit(self._lengths, capacity)
            if len(smaller) <= limit:
                packs = smaller
                break
        labels = np.empty(self._lengths.size, dtype=np.int64)
        labels[packs.indices] = np.repeat(np.arange(len(packs)), packs.sizes())
        return labels


def _best_fit(lengths: IntArray, capacity: int) -> Packs:
    runs = Runs.from_lengths(lengths)
    return best_fit_decreasing(runs, capacity=capacity).packs(lengths, runs)


def _fewest(lengths: IntArray, *, capacity: int, report: Callable[[str], None]) -> _Fewest:
    """
    Return a number of packs that is near the fewest: the quick bound, if best fit is within what
    may be spent above it, else that of the certified packing.
    """
    packs = _best_fit(lengths, capacity)
    num = find_bound(lengths, capacity=capacity, known=len(packs), effort=0).packs
    if len(packs) > num + num // MORE:
        packs = certified(lengths, capacity=capacity, seed=0, report=report)
        num = len(packs)
    return _Fewest(lengths, capacity, packs, num)


def _spread(
    lengths: IntArray, units: IntArray, *, num: int, capacity: int, report: Callable[[str], None]
) -> IntArray | None:
    """Return the pack of each sample in *num* packs of equal work; None if they do not all fit."""
    labels = np.empty(lengths.size, dtype=np.int64)
    num_groups = _num_groups(lengths.size, num)
    order = np.lexsort((-units, -lengths))
    start = 0
    for number, members in enumerate(_alike(order, num_groups)):
        report(f"{counted(num, 'pack')}, levelling group {number + 1:,} of {num_groups:,}")
        size = num // num_groups + (number < num % num_groups)
        group = _fitted(lengths[members], units[members], num=size, capacity=capacity)
        if group is None:
            return None
        group.level()
        labels[members] = start + group.labels
        start += size
    return labels


def _levelled(
    lengths: IntArray, units: IntArray, labels: IntArray, *, capacity: int, report: Callable[[str], None]
) -> IntArray:
    """Level packs that fit, groups of them by themselves; return the pack of each sample."""
    num = int(labels.max()) + 1
    sums = np.zeros(num, dtype=np.int64)
    np.add.at(sums, labels, units)
    num_groups = _num_groups(lengths.size, num)
    group_of, place = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    parts = list(_alike(np.argsort(-sums, kind="stable"), num_groups))
    for number, packs in enumerate(parts):
        group_of[packs], place[packs] = number, np.arange(packs.size)
    result = np.empty(lengths.size, dtype=np.int64)
    by_group = np.argsort(group_of[labels], kind="stable")
    ends = np.cumsum(np.bincount(group_of[labels], minlength=num_groups))
    start = 0
    for number, members in enumerate(np.split(by_group, ends[:-1])):
        report(f"{counted(num, 'pack')}, levelling group {number + 1:,} of {num_groups:,}")
        group = Exchange(lengths[members], units[members], place[labels[members]], parts[number].size, capacity)
        group.level()
        result[members] = start + group.labels
        start += parts[number].size
    return result


def _num_groups(num_samples: int, num_packs: int) -> int:
    return max(1, min(num_samples // _GROUP_SAMPLES, num_packs // _GROUP_PACKS))


def _alike(order: IntArray, num_groups: int) -> Iterator[IntArray]:
    """
    Yield groups of what is in an order, each of every so-many-th, turning at the ends, so that
    their sums are alike.
    """
    places = np.arange(order.size)
    row, column = places // num_groups, places % num_groups
    groups = np.where(row % 2, num_groups - 1 - column, column)
    by_group = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=num_groups))
    return (order[part] for part in np.split(by_group, ends[:-1]))


def _fitted(lengths: IntArray, units: IntArray, *, num: int, capacity: int) -> Exchange | None:
    """
    Return packs of which none is too full, the samples of much work in emptier ones as far as that
    can be; None if they do not all fit.
    """
    for share in _KEPT_EMPTY:
        rooms = _rooms(lengths, units, num=num, capacity=capacity, share=share)
        roomy = Exchange(rooms, units, _longest_first(rooms, num=num), num, capacity)
        roomy.fit(nearly=True)
        group = Exchange(lengths, units, roomy.labels, num, capacity)
        if group.fit():
            return group
    return None


def _rooms(lengths: IntArray, units: IntArray, *, num: int, capacity: int, share: int) -> IntArray:
    """
    Return the tokens that each sample takes of its pack while packs are made to fit: its own, and
    what has to stay empty beside it lest the pack have more than the mean work.

    What stays empty beside samples of much work is room that other packs lack. Where there is not
    enough of it, all such samples give up as much, so that the heaviest packs are lowered first.
    """
    light = float(np.sort(units / lengths)[lengths.size // _LIGHT])
    if not light:
        return lengths
    beside = capacity - lengths
    mean = int(units.sum()) / num
    # Sums are of whole tokens, so that they are the same on every machine.
    wanted = np.clip(np.ceil(beside - (mean - units) / light), 0, capacity).astype(np.int64)
    most = (num * capacity - int(lengths.sum())) * share // 100
    given_up = bisect_left(range(capacity + 1), -most, key=lambda less: -int(_left_empty(wanted, beside, less).sum()))
    return lengths + _left_empty(wanted, beside, given_up)


def _left_empty(wanted: IntArray, beside: IntArray, given_up: int) -> IntArray:
    """Return the tokens that stay empty beside each sample."""
    left: IntArray = np.clip(wanted - given_up, 0, beside)
    return left


def _longest_first(rooms: IntArray, *, num: int) -> IntArray:
    """Return the pack of each sample, of *num*, before any exchange; samples take *rooms* of it."""
    order = np.argsort(-rooms, kind="stable")
    labels = np.empty(rooms.size, dtype=np.int64)
    labels[order] = _emptiest_first(rooms[order], num)
    return labels


def _emptiest_first(lengths: IntArray, num: int) -> IntArray:
    """Return the pack of each sample, in the order given: the emptiest so far, of *num*."""
    heap = list(range(num))  # load and pack in one number
    keys = [heapreplace(heap, heap[0] + length) for length in (lengths * num).tolist()]
    labels: IntArray = np.array(keys, dtype=np.int64) % num
    return labels
