"""
Number of samples of each length, and packing by best fit or first fit over these counts.

The cost of an algorithm grows with the number of distinct lengths, not of samples.

Index 0 is the longest length. Samples of one length are packed in their input order. An algorithm
writes a `PackingTrace`, whose entries name lengths by their indices. Only the conversion of a trace
to packs processes single samples, in passes over cache-sized blocks.

Best fit and first fit place the longest samples first. A bin that gets a sample keeps getting
samples of the same length until they no longer fit. In first fit, this bin remains the first that
fits. In best fit, it becomes the fullest bin. Neighbouring bins with equal room are therefore
filled in one step. The packs are exactly those of the usual algorithms, which place one item at a
time (Johnson, "Near-optimal bin packing algorithms", 1973).
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from itertools import chain

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.packs import BLOCK, Packs, join_ranges


@attrs.frozen
class LengthCounts:
    """Number of samples of each distinct length, the longest first."""

    sizes: list[int]
    """Distinct lengths in tokens, longest first."""

    counts: list[int]
    """Number of samples of each length. `from_lengths` returns no count of 0."""

    @classmethod
    def from_lengths(cls, lengths: IntArray) -> LengthCounts:
        """Count *lengths*, each >= 1."""
        if lengths.size and lengths.max() <= _table_limit(lengths):
            table = np.bincount(lengths)
            sizes = np.flatnonzero(table)
            counts = table[sizes]
        else:
            sizes, counts = np.unique(lengths, return_counts=True)
        return cls(sizes[::-1].tolist(), counts[::-1].tolist())


def _table_limit(lengths: IntArray) -> int:
    """
    Return the largest length for which a table with one entry per length counts *lengths*. This
    limit is 65,536 plus a quarter of the number of *lengths*.
    """
    return 65_536 + lengths.size // 4


class PackingTrace:
    """
    Compact list of the bins into which an algorithm puts the samples of each length.

    An entry is (index, first, num, per_bin). Each of the bins `first … first + num - 1` gets
    `per_bin` samples of the length at *index*. Entries of one length use up its samples in the
    order in which the entries were written.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int, int]] = []
        self.write = self._entries.append
        """Append an entry (index, first, num, per_bin)."""

    @property
    def num_bins(self) -> int:
        """Number of bins with at least one sample."""
        return max((first + num for _, first, num, _ in self._entries), default=0)

    def packs(self, lengths: IntArray, tally: LengthCounts) -> Packs:
        """
        Return the packs that the trace describes, ordered by their first sample.

        Args:
            lengths: Number of tokens of each sample; at least one.
            tally: Counts of these lengths. Every sample has to be in an entry.
        """
        return Packs.from_labels(self.labels(lengths, tally))

    def labels(self, lengths: IntArray, tally: LengthCounts) -> NDArray[np.int32]:
        """
        Return the bin of each sample; shape (num_samples,).

        Args:
            lengths: Number of tokens of each sample; at least one.
            tally: Counts of these lengths. Every sample has to be in an entry.
        """
        return _reorder_bins(lengths, tally, self._bins_longest_first())

    def _bins_longest_first(self) -> NDArray[np.int32]:
        """Return the bin of each sample, the longest sample first; shape (num_samples,)."""
        entries = np.fromiter(chain.from_iterable(self._entries), np.int64, 4 * len(self._entries))
        index, first, num, per_bin = entries.reshape(-1, 4).T
        order = np.argsort(index, kind="stable")
        first, num, per_bin = first[order], num[order], per_bin[order]
        bins = join_ranges(num, starts=first, dtype=np.int32)
        return bins if per_bin.max() == 1 else np.repeat(bins, np.repeat(per_bin, num))


def _reorder_bins(lengths: IntArray, tally: LengthCounts, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """
    Reorder *bins* from the order of descending sample length to the order of *lengths*.

    The function does a radix sort of short keys, block by block. A block fits into the cache, and
    equal keys of a block read neighbouring elements of *bins*.
    """
    sizes, counts = np.array(tally.sizes), np.array(tally.counts)
    num = sizes.size
    key_type = np.min_scalar_type(num - 1)
    table = None
    if sizes[0] <= _table_limit(lengths):
        table = np.empty(sizes[0] + 1, dtype=key_type)
        table[sizes] = np.arange(num)
    taken = np.cumsum(counts) - counts
    labels = np.empty(lengths.size, dtype=np.int32)
    block = max(BLOCK, 4 * num)
    for start in range(0, lengths.size, block):
        inside = lengths[start : start + block]
        keys = table[inside] if table is not None else np.searchsorted(-sizes, -inside).astype(key_type)
        here = np.bincount(keys, minlength=num)
        labels[start + np.argsort(keys, kind="stable")] = bins[join_ranges(here, starts=taken)]
        taken += here
    return labels


def fit_decreasing(
    tally: LengthCounts, *, capacity: int, fullest: bool, trace: PackingTrace | None = None
) -> PackingTrace:
    """
    Pack all samples by best fit or first fit, longest first.

    Args:
        tally: Lengths from 1 to *capacity*; counts may be 0.
        capacity: Maximum number of tokens in a bin.
        fullest: If true, choose the fullest bin in which a sample fits (best fit), else the first
            bin (first fit).
        trace: Trace to which entries are appended; its bins get no more samples. None starts an
            empty trace.
    """
    trace = PackingTrace() if trace is None else trace
    write, num_bins, negated = trace.write, trace.num_bins, [-size for size in tally.sizes]
    fits: list[tuple[int, int, int, int]] = []  # (preference, first, number, room): the current length fits
    waits: dict[int, list[tuple[int, int, int, int]]] = {}  # index of the first length that fits -> the same
    for index, (size, count) in enumerate(zip(tally.sizes, tally.counts, strict=True)):
        for bins in waits.pop(index, ()):
            heappush(fits, bins)
        left = count
        while left:
            if fits:
                _, first, number, room = heappop(fits)
            else:
                first, number, room = num_bins, -(-left // (capacity // size)), capacity
                num_bins += number
            per_bin = room // size
            full = min(number, left // per_bin)
            if full:
                write((index, first, full, per_bin))
                left -= full * per_bin
                less = room - per_bin * size
                later = bisect_left(negated, -less, index)
                if later < len(negated):
                    waits.setdefault(later, []).append((less if fullest else 0, first, full, less))
            if full < number and left:
                write((index, first + full, 1, left))
                less = room - left * size
                heappush(fits, (less if fullest else 0, first + full, 1, less))
                full, left = full + 1, 0
            if full < number:
                heappush(fits, (room if fullest else 0, first + full, number - full, room))
    return trace
