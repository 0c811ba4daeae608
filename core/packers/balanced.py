"""
Packer `balanced`: makes packs of about equal work, and at most 0.5 % more packs than `auto`.

Many packs are divided into groups of at least 1,024 packs and 32,768 samples, and each group is
levelled separately. Time and memory therefore grow about linearly with the number of samples.
Samples are sorted by length and work and assigned to the groups in turn, so that all groups have
similar samples.

1. Start: in each group, the samples, longest first, go to the pack with the fewest tokens so far. A
   pack may exceed the capacity.
2. Fit: samples are exchanged between packs until no pack exceeds the capacity.
3. Level: samples are exchanged until packs have nearly equal work (`core.packers.exchange`).

In step 1, a sample with much work reserves tokens that stay empty in its pack. Without this
reserve, the work of the pack would exceed the mean. Together, these samples reserve at most 80 % of
the tokens that the packs leave unused anyway.

The three steps make at most 0.5 % more packs than the lower bound. If best fit needs more packs,
the packs of `auto` are levelled by step 3 alone. If step 2 fails, the packs of best fit are
levelled by step 3 alone.

In both cases, `auto` also packs with 99.6 % of the capacity. The resulting packs are levelled
instead if there are at most 0.5 % more packs than a reference. The reference is the number of packs
of `auto` in the first case, and the lower bound in the second.
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
"""Number of packs for which one extra pack is allowed, so that there is room to level the work."""

_GROUP_SAMPLES, _GROUP_PACKS = 1 << 15, 1 << 10
"""Minimum number of samples, and of packs, in a group, if there are several groups."""

_LIGHT = 4
"""
Samples that share a pack with a heavy sample are assumed to be light: only one sample in this
number has less work per token.
"""

_KEPT_EMPTY = (80, 40, 0)
"""
Percentages of all packs' unused tokens that samples with much work may reserve, in the order in
which they are tried. The first percentage with which all packs fit is used.
"""

_SHARE = 996
"""
Reduced capacity for the packs of `auto`, in thousandths of the capacity. The reduced capacity is
used if it causes at most 0.5 % more packs.
"""


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
        lengths: Number of tokens of each sample, each from 1 to *capacity*.
        capacity: Maximum number of tokens in a pack.
        works: Work of each sample, >= 0 in any unit; same shape as *lengths*. None estimates the
            work from the length and the squared length, in the proportion of a typical model.
        report: Called with a progress message.
        keys: Random numbers that vary the order in which samples are first placed, and so the
            packs; shape (num_samples,). None places the longest samples first. The keys have no
            effect if packs of another algorithm are levelled.
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
    """
    Divide samples into *num* packs of about equal work; return the pack of each sample, or None if
    no packs within the capacity are found.
    """
    labels = np.empty(lengths.size, dtype=np.int64)
    num_groups = _num_groups(lengths.size, num)
    order = np.lexsort((-units, -lengths))
    if keys is not None:  # neighbouring samples swap groups
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
    """Level the work of given packs, group by group; return the pack of each sample."""
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
    Yield groups of the items of *order*, assigned back and forth so that each group gets items from
    all parts of the order.
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
    Find packs within the capacity, if possible with tokens reserved for samples with much work;
    return None if no such packs are found.
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
    Return each sample's tokens plus the tokens that it reserves, so that the work of its pack does
    not exceed the mean.

    At most *percent* % of the unused tokens of all packs are reserved. If this limit is exceeded,
    every sample's reserve is reduced by the same number of tokens. Only the samples with the
    largest reserves then keep one.
    """
    light = float(np.sort(units / lengths)[lengths.size // _LIGHT])
    if not light:
        return lengths
    beside = capacity - lengths
    mean = int(units.sum()) / num
    # Sums of integers are the same on every machine.
    wanted = np.clip(np.ceil(beside - (mean - units) / light), 0, capacity).astype(np.int64)
    most = (num * capacity - int(lengths.sum())) * percent // 100
    given_up = bisect_left(range(capacity + 1), -most, key=lambda less: -int(_cut_reserve(wanted, beside, less).sum()))
    return lengths + _cut_reserve(wanted, beside, given_up)


def _cut_reserve(wanted: IntArray, beside: IntArray, given_up: int) -> IntArray:
    """
    Return the reserved tokens of each sample: *wanted* minus *given_up*, limited to the range from
    0 to *beside*.
    """
    return np.clip(wanted - given_up, 0, beside)


def _starting_labels(tokens: IntArray, keys: NDArray[np.uint16] | None, *, num: int) -> IntArray:
    """
    Return the initial pack of each sample, from 0 to *num* - 1. Each sample, longest first, goes
    into the pack with the fewest tokens so far. Random *keys* change the order, since each sample
    then counts as up to twice as long.
    """
    order = np.argsort(-tokens if keys is None else tokens * -(1 + keys / 2**16), kind="stable")
    heap = list(range(num))  # load and pack in one number
    loads = [heapreplace(heap, heap[0] + length) for length in (tokens[order] * num).tolist()]
    labels = np.empty(tokens.size, dtype=np.int64)
    labels[order] = np.array(loads, dtype=np.int64) % num
    return labels
