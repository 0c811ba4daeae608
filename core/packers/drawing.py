"""
Redraw: other packs of the same samples, of equal quality, drawn from a seed.

All samples are concatenated in a random order, which is cut after every *capacity* tokens. The
whole samples between two cuts form a group, which is packed as one item. A sample across a cut is a
separate item, called loose, and can fill up the pack of a group. The samples of the first 2.5 % of
the tokens are loose too. Nearly all samples therefore share a pack with random other samples.

A draw may need at most 0.5 % more packs than the algorithm without a draw. If a draw needs more
packs, more groups at the front of the order are split into loose samples, and all items are packed
again. If the draw still needs too many packs with all samples loose, the algorithm's packs are
used. Samples of equal length then swap places in these packs.

`balanced` needs no groups, because its search starts from a random order. `first_fit_shuffle` needs
no groups either, because all its samples are loose. For `certified`, the items are packed by best
fit. If best fit needs too many packs even with all samples loose, samples of equal length swap
places in the packs of `certified`.
"""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.length_counts import LengthCounts
from packplan.core.lengths import IntArray, as_whole_number
from packplan.core.packers import ALGORITHMS, check_algorithm_works, load_packer, pack
from packplan.core.packs import Packs

REDRAW_VERSION = "1"
"""Version of the packs that `redraw` makes, part of a plan's fingerprint."""

_PACKS_PER_EXTRA = 200
"""A draw may have one extra pack for each of this many packs that the algorithm makes."""

_FIRST_LOOSE = 40
"""
Divisor of the number of all tokens. The quotient is the initial number of tokens in loose samples,
without the samples across a cut.
"""


@attrs.frozen
class _Packing:
    """
    Result of packing items: the number of packs, and a function that computes the pack of each
    item.
    """

    num: int
    """Number of packs."""

    labels: Callable[[], NDArray[np.int32]]
    """Function that returns the pack of each item."""


def redraw(
    lengths: IntArray,
    *,
    capacity: int,
    algorithm: str,
    seed: int,
    epoch: int,
    works: NDArray[np.number] | Sequence[float] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Packs:
    """
    Draw packs at random, at most 0.5 % more than the algorithm makes without a draw.

    The packs depend only on the arguments. Two given samples share a pack in few epochs, as far as
    their lengths allow.

    Args:
        lengths: Number of tokens of each sample, each from 1 to *capacity*.
        capacity: Maximum number of tokens in a pack, >= 1.
        algorithm: Name of an algorithm that does not keep the order of the data.
        seed: Seed of the draws of all epochs, from 0 to 2**64 - 1.
        epoch: Number of the epoch, >= 0.
        works: Work of each sample, as in `pack`.
        report: Called with a progress message, by `certified` and `balanced`.

    Raises:
        ArgumentError: The number of works is wrong, or a work is negative or not finite.
        ArgumentError: *works* is passed for an algorithm whose packs do not depend on work.
    """
    epoch, num, chosen = as_whole_number("epoch", epoch, least=0), lengths.size, ALGORITHMS[algorithm]
    weights = check_algorithm_works(algorithm, works, num)
    if not num:
        return Packs.from_lists([])
    keys = np.random.PCG64((seed, epoch)).random_raw(-(-num // 4)).view(np.uint16)[:num]
    order = np.argsort(keys, kind="stable")
    shuffled = lengths.take(order)
    ends = np.cumsum(shuffled)
    total = int(ends[-1])
    capacity = min(capacity, total)
    if "works" in chosen.takes:
        weights = None if weights is None else weights[order]
        packs = load_packer(algorithm)(shuffled, capacity=capacity, works=weights, report=report, keys=keys)
        return _packs_from_labels(packs.to_labels(num).astype(np.int32), order)
    own: _Packing | None = None
    stage = "best_fit_decreasing" if algorithm == "certified" else algorithm
    fewest = -(-total // capacity)
    loose = total if "seed" in ALGORITHMS[stage].takes else total // _FIRST_LOOSE
    while True:
        starts = _item_starts(shuffled, ends, capacity=capacity, loose_tokens=loose)
        items = np.diff(ends[np.append(starts[1:], num) - 1], prepend=0)
        found = _pack_items(items, capacity=capacity, algorithm=stage, seed=seed, report=report)
        if found.num <= fewest + fewest // _PACKS_PER_EXTRA:
            break
        own = own or _pack_items(lengths, capacity=capacity, algorithm=algorithm, seed=seed, report=report)
        if found.num <= own.num + own.num // _PACKS_PER_EXTRA:
            break
        if loose == total:
            return _exchange_equals(own.labels(), lengths, order)
        loose = max(1, 2 * loose, loose * (found.num - own.num) * _PACKS_PER_EXTRA // own.num)
        loose = loose if 2 * loose < total else total
    return _packs_from_labels(np.repeat(found.labels(), np.diff(starts, append=num)), order)


def _item_starts(shuffled: IntArray, ends: IntArray, *, capacity: int, loose_tokens: int) -> IntArray:
    """
    Return the position in *shuffled* of each item's first sample. *ends* has the cumulative tokens
    up to the end of each sample. Samples within the first *loose_tokens* tokens are separate items.
    """
    group = (ends - 1) // capacity
    alone = (ends - shuffled) // capacity != group
    alone[: np.searchsorted(ends, loose_tokens, side="right")] = True
    opens = alone.copy()
    opens[0] = True
    opens[1:] |= alone[:-1] | (group[1:] != group[:-1])
    return np.flatnonzero(opens)


def _pack_items(
    lengths: IntArray, *, capacity: int, algorithm: str, seed: int, report: Callable[[str], None]
) -> _Packing:
    """Pack items of these *lengths* by the algorithm, without a draw."""
    if ALGORITHMS[algorithm].counts_lengths:
        tally = LengthCounts.from_lengths(lengths)
        trace = load_packer(algorithm)(tally, capacity=capacity)
        return _Packing(trace.num_bins, lambda: trace.labels(lengths, tally))
    packs = pack(lengths, capacity=capacity, algorithm=algorithm, seed=seed, report=report)
    return _Packing(len(packs), lambda: packs.to_labels(lengths.size).astype(np.int32))


def _exchange_equals(labels: NDArray[np.int32], lengths: IntArray, order: IntArray) -> Packs:
    """Return packs in which samples of equal length have swapped places, by a shuffled *order*."""
    places = np.argsort(lengths, kind="stable")
    drawn = order[np.argsort(lengths[order], kind="stable")]
    return _packs_from_labels(labels[places], drawn)


def _packs_from_labels(labels: NDArray[np.int32], order: IntArray) -> Packs:
    """Return packs of samples. *labels* contains the pack of each sample in *order*."""
    by_sample = np.empty_like(labels)
    by_sample[order] = labels
    return Packs.from_labels(by_sample)
