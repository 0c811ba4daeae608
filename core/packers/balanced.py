"""
Packer `balanced`: packs of equal work, at most one in two hundred more than `auto`.

Groups of some thousand packs are levelled separately, so time and memory are linear in the samples.
Samples in order of length and work are assigned to the groups in turn, so groups are alike.

1. Start: inside a group, each sample goes to the pack with the fewest tokens so far, longest sample
   first. A pack may exceed the capacity.
2. Fit: samples are exchanged between packs until none exceeds the capacity.
3. Level: samples are exchanged until packs have nearly equal work (`core.packers.exchange`).

In step 1, a sample of much work reserves tokens that stay empty in its pack, since a full pack with
it would exceed the mean work. Only tokens that the packs leave unused anyway are reserved. If step
2 fails, or if best fit needs more packs than the limit, packs of `auto` are levelled instead. These
have a smaller capacity if their number then stays within the limit.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from packplan.core.bounds import find_bound
from packplan.core.errors import counted
from packplan.core.length_counts import LengthCounts, PackingTrace
from packplan.core.lengths import IntArray
from packplan.core.packers.decreasing import best_fit_decreasing
from packplan.core.packers.exchange import ExchangeSearch
from packplan.core.packers.fewest import auto
from packplan.core.packs import Packs
from packplan.core.work.assignment import to_units
from packplan.core.work.model import WorkModel

_PACKS_PER_EXTRA = 200
"""Number of packs for which one pack more than the fewest is made, to have room to level work."""

_GROUP_SAMPLES, _GROUP_PACKS = 1 << 15, 1 << 10
"""Least number of samples and of packs in a group."""

_LIGHT = 4
"""Work per token beside heavy samples is assumed so low that one in 4 samples has less."""

_KEPT_EMPTY = (80, 40, 0)
"""
Percentages of the unused tokens of all packs that samples of much work may reserve. The first one
with which all packs fit is taken.
"""

_SHARE = 996
"""Thousandths of the capacity that packs of `auto` may fill, if they stay within the limit."""


def balanced(
    lengths: IntArray,
    *,
    capacity: int,
    works: NDArray[np.float64] | None,
    report: Callable[[str], None],
    keys: NDArray[np.uint16] | None = None,
) -> Packs:
    """
    Pack samples into packs of about equal work.

    Args:
        lengths: Tokens, each from 1 to *capacity*.
        capacity: Tokens a pack may hold.
        works: Work of each sample, >= 0 in any unit; of the shape of *lengths*. None computes works
            from tokens and squares of lengths, in the proportion of an ordinary model.
        report: Called with a progress message.
        keys: Random numbers that change the start of the search, and so the packs, but not their
            number, nor how even their work is; shape (num_samples,). None starts with the longest
            samples.
    """
    units = to_units(WorkModel.estimated({}).trained().sample_flops(lengths) if works is None else works)
    packs, fewest = _pack_with(lengths, capacity), find_bound(lengths, capacity=capacity, effort=0).packs
    is_tight = len(packs) > fewest + fewest // _PACKS_PER_EXTRA
    if is_tight:
        packs = _pack_with(lengths, capacity, auto)
        fewest = len(packs)
    limit = min(lengths.size, fewest + fewest // _PACKS_PER_EXTRA)
    labels = None
    if not is_tight:
        labels = _pack_evenly(lengths, units, keys, num=limit, capacity=capacity, report=report)
    if labels is None:
        roomy = _pack_with(lengths, max(int(lengths.max()), capacity * _SHARE // 1000), auto)
        packs = roomy if len(roomy) <= limit else packs
        labels = _level_packs(lengths, units, packs.to_labels(lengths.size), capacity=capacity, report=report)
    return Packs.from_labels(np.unique(labels, return_inverse=True)[1].astype(np.int32))


def _pack_with(lengths: IntArray, capacity: int, algorithm: Callable[..., PackingTrace] = best_fit_decreasing) -> Packs:
    tally = LengthCounts.from_lengths(lengths)
    return algorithm(tally, capacity=capacity).packs(lengths, tally)


def _pack_evenly(
    lengths: IntArray,
    units: IntArray,
    keys: NDArray[np.uint16] | None,
    *,
    num: int,
    capacity: int,
    report: Callable[[str], None],
) -> IntArray | None:
    """Return the pack of each sample in *num* packs of equal work; None if they do not all fit."""
    labels = np.empty(lengths.size, dtype=np.int64)
    num_groups = _num_groups(lengths.size, num)
    order = np.lexsort((-units, -lengths))
    if keys is not None:  # neighbours in this order change groups
        order = order[np.lexsort((keys, np.arange(order.size) // num_groups))]
    start = 0
    for number, members in enumerate(_assign_to_groups(order, num_groups)):
        report(f"{counted(num, 'pack')}, levelling group {number + 1:,} of {num_groups:,}")
        size = num // num_groups + (number < num % num_groups)
        drawn = None if keys is None else keys[members]
        group = _fit_group(lengths[members], units[members], drawn, num=size, capacity=capacity)
        if group is None:
            return None
        group.level()
        labels[members] = start + group.labels
        start += size
    return labels


def _level_packs(
    lengths: IntArray, units: IntArray, labels: IntArray, *, capacity: int, report: Callable[[str], None]
) -> IntArray:
    """
    Level the work of packs that fit the capacity, group by group; return the pack of each sample.
    """
    num = int(labels.max()) + 1
    sums = np.zeros(num, dtype=np.int64)
    np.add.at(sums, labels, units)
    num_groups = _num_groups(lengths.size, num)
    group_of, place = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    parts = list(_assign_to_groups(np.argsort(-sums, kind="stable"), num_groups))
    for number, packs in enumerate(parts):
        group_of[packs], place[packs] = number, np.arange(packs.size)
    result = np.empty(lengths.size, dtype=np.int64)
    by_group = np.argsort(group_of[labels], kind="stable")
    ends = np.cumsum(np.bincount(group_of[labels], minlength=num_groups))
    start = 0
    for number, members in enumerate(np.split(by_group, ends[:-1])):
        report(f"{counted(num, 'pack')}, levelling group {number + 1:,} of {num_groups:,}")
        group = ExchangeSearch(lengths[members], units[members], place[labels[members]], parts[number].size, capacity)
        group.level()
        result[members] = start + group.labels
        start += parts[number].size
    return result


def _num_groups(num_samples: int, num_packs: int) -> int:
    return max(1, min(num_samples // _GROUP_SAMPLES, num_packs // _GROUP_PACKS))


def _assign_to_groups(order: IntArray, num_groups: int) -> Iterator[IntArray]:
    """
    Yield groups of the items of *order*, assigned back and forth so that their sums are alike.
    """
    places = np.arange(order.size)
    row, column = places // num_groups, places % num_groups
    groups = np.where(row % 2, num_groups - 1 - column, column)
    by_group = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=num_groups))
    return (order[part] for part in np.split(by_group, ends[:-1]))


def _fit_group(
    lengths: IntArray, units: IntArray, keys: NDArray[np.uint16] | None, *, num: int, capacity: int
) -> ExchangeSearch | None:
    """
    Find packs within the capacity, if possible with tokens reserved for samples of much work.
    Return None if no packs are found that fit.
    """
    for percent in _KEPT_EMPTY:
        reserved = _add_reserve(lengths, units, num=num, capacity=capacity, percent=percent)
        roomy = ExchangeSearch(reserved, units, _starting_labels(reserved, keys, num=num), num, capacity)
        roomy.exchange_until_fitting(nearly=True)
        group = ExchangeSearch(lengths, units, roomy.labels, num, capacity)
        if group.exchange_until_fitting():
            return group
    return None


def _add_reserve(lengths: IntArray, units: IntArray, *, num: int, capacity: int, percent: int) -> IntArray:
    """
    Return each sample's tokens plus the tokens that it reserves, so that the work of its pack
    stays at the mean.

    At most *percent* of the unused tokens of all packs are reserved. If samples want more,
    each reserves the same number less, so that the heaviest samples keep a reserve.
    """
    light = float(np.sort(units / lengths)[lengths.size // _LIGHT])
    if not light:
        return lengths
    beside = capacity - lengths
    mean = int(units.sum()) / num
    # Sums of whole tokens are the same on every machine.
    wanted = np.clip(np.ceil(beside - (mean - units) / light), 0, capacity).astype(np.int64)
    most = (num * capacity - int(lengths.sum())) * percent // 100
    given_up = bisect_left(range(capacity + 1), -most, key=lambda less: -int(_cut_reserve(wanted, beside, less).sum()))
    return lengths + _cut_reserve(wanted, beside, given_up)


def _cut_reserve(wanted: IntArray, beside: IntArray, given_up: int) -> IntArray:
    """Return each sample's reserved tokens: *given_up* fewer than wanted, at most *beside*."""
    left: IntArray = np.clip(wanted - given_up, 0, beside)
    return left


def _starting_labels(tokens: IntArray, keys: NDArray[np.uint16] | None, *, num: int) -> IntArray:
    """
    Return the pack of each sample before any exchange, from 0 to *num* - 1. Random *keys* change
    the order: each sample counts as up to twice as long.
    """
    order = np.argsort(-tokens if keys is None else tokens * -(1 + keys / 2**16), kind="stable")
    labels = np.empty(tokens.size, dtype=np.int64)
    labels[order] = _fill_emptiest(tokens[order], num)
    return labels


def _fill_emptiest(lengths: IntArray, num: int) -> IntArray:
    """Put each sample, in the given order, into the emptiest of *num* packs; return its pack."""
    heap = list(range(num))  # load and pack in one number
    keys = [heapreplace(heap, heap[0] + length) for length in (lengths * num).tolist()]
    labels: IntArray = np.array(keys, dtype=np.int64) % num
    return labels
