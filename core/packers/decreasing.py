"""
Packers that place the longest samples first, and all samples of one length together.

Constant volume makes exactly the same packs as `binpacking.to_constant_volume` 2.x (with
`weight_pos`). This function needs no quadratic search, because a sample that fits into any bin fits
into the emptiest one. The literature calls constant volume "worst-fit decreasing". Worst fit, best
fit and first fit are described in Johnson, "Near-optimal bin packing algorithms" (1973).

Modified first fit is described in Johnson and Garey, "A 71/60 theorem for bin packing" (1985).
Samples are large (over half of the capacity), medium (over a third), small (over a sixth) or tiny.
Each large sample opens a bin, and the next phases add other samples to these bins. First fit packs
the remaining samples. Bins with equal room are used in the order in which they were opened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from heapq import heappop, heappush

import attrs

from packplan.core.length_counts import LengthCounts, PackingTrace, fit_decreasing


def best_quick_packing(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """Return the packing with the fewest bins among the algorithms of this module."""
    quick = (constant_volume, best_fit_decreasing, first_fit_decreasing, modified_first_fit_decreasing)
    return min((algorithm(tally, capacity=capacity) for algorithm in quick), key=lambda trace: trace.num_bins)


def constant_volume(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """
    Put each sample into the emptiest bin, or into a new bin if it fits nowhere.

    Among equally empty bins, the first is chosen.

    Neighbouring bins with equal room are handled as one range. A new bin stays the emptiest until
    no other sample of the same length fits into it, so it is filled in one step.
    """
    trace = PackingTrace()
    num_bins = 0
    ranges: list[tuple[int, int, int]] = []  # (-room, first, number)
    for index, (size, count) in enumerate(zip(tally.sizes, tally.counts, strict=True)):
        left = count
        while left and ranges and -ranges[0][0] >= size:
            room, first, number = heappop(ranges)
            taken = min(number, left)
            trace.write((index, first, taken, 1))
            left -= taken
            heappush(ranges, (room + size, first, taken))
            if taken < number:
                heappush(ranges, (room, first + taken, number - taken))
        per_bin = capacity // size
        full, rest = divmod(left, per_bin)
        if full:
            trace.write((index, num_bins, full, per_bin))
            heappush(ranges, (per_bin * size - capacity, num_bins, full))
        if rest:
            trace.write((index, num_bins + full, 1, rest))
            heappush(ranges, (rest * size - capacity, num_bins + full, 1))
        num_bins += full + (rest > 0)
    return trace


def best_fit_decreasing(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """
    Put each sample into the fullest bin with room for it. Among equally full bins, the first is
    chosen.
    """
    return fit_decreasing(tally, capacity=capacity, fullest=True)


def first_fit_decreasing(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """Put each sample into the first bin with room for it."""
    return fit_decreasing(tally, capacity=capacity, fullest=False)


@attrs.define
class _BinRange:
    """Range of neighbouring bins with equal room."""

    first: int
    num: int
    room: int
    has_medium: bool = False

    def split(self, num: int, used: int, *, has_medium: bool) -> _BinRange:
        """Split off the first *num* bins, and return them with *used* more tokens in each bin."""
        head = _BinRange(self.first, num, self.room - used, has_medium)
        self.first += num
        self.num -= num
        return head


def modified_first_fit_decreasing(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """Give each large sample a bin, fill these bins, and pack the rest by first-fit decreasing."""
    trace = PackingTrace()
    left = list(tally.counts)
    medium, small, tiny = (sum(size * parts > capacity for size in tally.sizes) for parts in (2, 3, 6))
    ranges = _open_bins(tally.sizes, medium, capacity, trace, left)
    ranges = _add_medium(ranges, tally.sizes, range(medium, small), trace, left)
    ranges = _add_two_small(ranges, tally.sizes, range(small, tiny), trace, left)
    _add_any(ranges, tally.sizes, trace, left)
    return fit_decreasing(LengthCounts(tally.sizes, left), capacity=capacity, fullest=False, trace=trace)


def _open_bins(sizes: list[int], large: int, capacity: int, trace: PackingTrace, left: list[int]) -> list[_BinRange]:
    """Phase 1: open a bin for each sample of the first *large* lengths, longest first."""
    ranges = []
    first = 0
    for index in range(large):
        trace.write((index, first, left[index], 1))
        ranges.append(_BinRange(first, left[index], capacity - sizes[index]))
        first += left[index]
        left[index] = 0
    return ranges


def _add_medium(
    ranges: list[_BinRange], sizes: list[int], medium: range, trace: PackingTrace, left: list[int]
) -> list[_BinRange]:
    """Phase 2: add to each bin, first bin first, the largest medium sample that fits."""
    after = []
    fitting: list[int] = []  # sizes that fit and have samples left, largest last
    waiting = list(medium)
    for bins in ranges:
        while waiting and sizes[waiting[-1]] <= bins.room:
            fitting.append(waiting.pop())
        while bins.num and fitting:
            index = fitting[-1]
            num = min(bins.num, left[index])
            trace.write((index, bins.first, num, 1))
            after.append(bins.split(num, sizes[index], has_medium=True))
            left[index] -= num
            if not left[index]:
                fitting.pop()
        if bins.num:
            after.append(bins)
    return after


def _add_two_small(
    ranges: list[_BinRange], sizes: list[int], small: range, trace: PackingTrace, left: list[int]
) -> list[_BinRange]:
    """
    Phase 3: add two small samples to each bin without a medium sample, last bin first. The first is
    the smallest sample, the second the largest that still fits.
    """
    after = []
    largest, smallest = small.start, small.stop - 1
    for bins in reversed(ranges):
        while bins.num and not bins.has_medium:
            while smallest >= largest and not left[smallest]:
                smallest -= 1
            # The room beside the smallest sample only shrinks from bin to bin, so a sample that
            # does not fit now never will.
            while largest <= smallest and (not left[largest] or sizes[largest] + sizes[smallest] > bins.room):
                largest += 1
            if largest > smallest or (largest == smallest and left[smallest] < 2):
                break
            pair = Counter((smallest, largest))
            num = min(bins.num, *(left[index] // per_bin for index, per_bin in pair.items()))
            for index, per_bin in pair.items():
                trace.write((index, bins.first, num, per_bin))
                left[index] -= num * per_bin
            after.append(bins.split(num, sizes[smallest] + sizes[largest], has_medium=False))
        if bins.num:
            after.append(bins)
    return sorted(after, key=lambda bins: bins.first)


def _add_any(ranges: list[_BinRange], sizes: list[int], trace: PackingTrace, left: list[int]) -> None:
    """Phase 4: repeatedly add to each bin, first bin first, the largest sample that fits."""
    negated = [-size for size in sizes]
    # A size without remaining samples links to the next size; links lead to a size that has some.
    following = [index if count else index + 1 for index, count in enumerate(left)] + [len(left)]

    def next_left(index: int) -> int:
        while following[index] != index:
            following[index] = following[following[index]]
            index = following[index]
        return index

    for bins in ranges:
        while bins.num:
            content: dict[int, int] = {}
            room = bins.room
            index = next_left(bisect_left(negated, -room))
            while index < len(sizes):
                content[index] = min(room // sizes[index], left[index])
                room -= content[index] * sizes[index]
                index = next_left(max(index + 1, bisect_left(negated, -room)))
            if not content:
                break
            num = min(bins.num, *(left[index] // per_bin for index, per_bin in content.items()))
            for index, per_bin in content.items():
                trace.write((index, bins.first, num, per_bin))
                left[index] -= num * per_bin
                if not left[index]:
                    following[index] = index + 1
            bins.split(num, 0, has_medium=False)
