"""
Modified first-fit decreasing, over runs of equal length.

Johnson and Garey, "A 71/60 theorem for bin packing" (1985). Samples are large (over a half of the
capacity), medium (over a third), small (over a sixth) or tiny. Large ones open a bin each, and the
next phases add other samples to them. First-fit decreasing packs the rest. Bins with equal room are
taken in the order they were opened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import attrs

from packplan.core.runs import PackingTrace, Runs, fit_decreasing


@attrs.define
class _BinRange:
    """Neighbouring bins with equal room."""

    first: int
    num: int
    room: int
    has_medium: bool = False

    def split(self, num: int, used: int, *, has_medium: bool) -> _BinRange:
        """Split off the first *num* bins, with *used* more tokens in each."""
        head = _BinRange(self.first, num, self.room - used, has_medium)
        self.first += num
        self.num -= num
        return head


def modified_first_fit_decreasing(runs: Runs, *, capacity: int) -> PackingTrace:
    """
    Give each large sample a bin, fill these bins up, and pack the rest by first-fit decreasing.
    """
    trace = PackingTrace()
    left = list(runs.counts)
    medium, small, tiny = (sum(size * parts > capacity for size in runs.sizes) for parts in (2, 3, 6))
    ranges = _open(runs, medium, capacity, trace, left)
    num_bins = ranges[-1].first + ranges[-1].num if ranges else 0
    ranges = _add_medium(ranges, runs, range(medium, small), trace, left)
    ranges = _add_two_small(ranges, runs, range(small, tiny), trace, left)
    _add_any(ranges, runs, trace, left)
    return fit_decreasing(Runs(runs.sizes, left), capacity=capacity, fullest=False, trace=trace, num_bins=num_bins)


def _open(runs: Runs, medium: int, capacity: int, trace: PackingTrace, left: list[int]) -> list[_BinRange]:
    """Phase 1: open a bin for each large sample, longest first."""
    ranges = []
    first = 0
    for run in range(medium):
        trace.write((run, first, left[run], 1))
        ranges.append(_BinRange(first, left[run], capacity - runs.sizes[run]))
        first += left[run]
        left[run] = 0
    return ranges


def _add_medium(
    ranges: list[_BinRange], runs: Runs, medium: range, trace: PackingTrace, left: list[int]
) -> list[_BinRange]:
    """Phase 2: forward, add to each bin the largest medium sample that fits."""
    after = []
    fitting: list[int] = []  # runs that fit and have samples left, largest last
    waiting = list(medium)
    for bins in ranges:
        while waiting and runs.sizes[waiting[-1]] <= bins.room:
            fitting.append(waiting.pop())
        while bins.num and fitting:
            run = fitting[-1]
            num = min(bins.num, left[run])
            trace.write((run, bins.first, num, 1))
            after.append(bins.split(num, runs.sizes[run], has_medium=True))
            left[run] -= num
            if not left[run]:
                fitting.pop()
        if bins.num:
            after.append(bins)
    return after


def _add_two_small(
    ranges: list[_BinRange], runs: Runs, small: range, trace: PackingTrace, left: list[int]
) -> list[_BinRange]:
    """
    Phase 3: backward, add to each bin without a medium sample the smallest small one and the
    largest that then fits.
    """
    after = []
    largest, smallest = small.start, small.stop - 1
    for bins in reversed(ranges):
        while bins.num and not bins.has_medium:
            while smallest >= largest and not left[smallest]:
                smallest -= 1
            # The room beside the smallest only shrinks from bin to bin: a sample that does not fit
            # now never will.
            while largest <= smallest and (not left[largest] or runs.sizes[largest] + runs.sizes[smallest] > bins.room):
                largest += 1
            if largest > smallest or (largest == smallest and left[smallest] < 2):
                break
            pair = Counter((smallest, largest))
            num = min(bins.num, *(left[run] // per_bin for run, per_bin in pair.items()))
            for run, per_bin in pair.items():
                trace.write((run, bins.first, num, per_bin))
                left[run] -= num * per_bin
            after.append(bins.split(num, runs.sizes[smallest] + runs.sizes[largest], has_medium=False))
        if bins.num:
            after.append(bins)
    return sorted(after, key=lambda bins: bins.first)


def _add_any(ranges: list[_BinRange], runs: Runs, trace: PackingTrace, left: list[int]) -> None:
    """Phase 4: forward, add to each bin the largest sample that fits, as long as any does."""
    sizes = [-size for size in runs.sizes]
    # Links from a run without samples left to the next run that has some.
    following = [run if count else run + 1 for run, count in enumerate(left)] + [len(left)]

    def next_left(run: int) -> int:
        while following[run] != run:
            following[run] = following[following[run]]
            run = following[run]
        return run

    for bins in ranges:
        while bins.num:
            content: dict[int, int] = {}
            room = bins.room
            run = next_left(bisect_left(sizes, -room))
            while run < len(sizes):
                content[run] = min(room // runs.sizes[run], left[run])
                room -= content[run] * runs.sizes[run]
                run = next_left(max(run + 1, bisect_left(sizes, -room)))
            if not content:
                break
            num = min(bins.num, *(left[run] // per_bin for run, per_bin in content.items()))
            for run, per_bin in content.items():
                trace.write((run, bins.first, num, per_bin))
                left[run] -= num * per_bin
                if not left[run]:
                    following[run] = run + 1
            bins.split(num, 0, has_medium=False)
