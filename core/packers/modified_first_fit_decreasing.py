"""
Modified first-fit decreasing, over runs of equal length.

Johnson and Garey, "A 71/60 theorem for bin packing" (1985). Samples are large (over a half of the capacity), medium
(over a third), small (over a sixth) or tiny. Large ones open a bin each; the four phases after that look for what to
add to them; first-fit decreasing packs the rest. Bins with equal room are taken in the order they were opened.
"""

from __future__ import annotations

from bisect import bisect_left

import attrs

from core.any_fit import fit_decreasing
from core.runs import Ledger, Runs


@attrs.define
class _Stretch:
    """Neighbouring bins with equal room."""

    first: int
    num: int
    room: int
    has_medium: bool = False

    def split(self, num: int, used: int, *, has_medium: bool) -> _Stretch:
        """Cut off the first *num* bins, with *used* tokens more in each."""
        head = _Stretch(self.first, num, self.room - used, has_medium)
        self.first += num
        self.num -= num
        return head


def modified_first_fit_decreasing(runs: Runs, *, capacity: int) -> Ledger:
    """Give each large sample a bin, add to these what fits best, and pack the rest by first-fit decreasing."""
    ledger = Ledger()
    left = list(runs.counts)
    medium, small, tiny = (sum(size * parts > capacity for size in runs.sizes) for parts in (2, 3, 6))
    stretches = _open(runs, medium, capacity, ledger, left)
    num_bins = stretches[-1].first + stretches[-1].num if stretches else 0
    stretches = _add_medium(stretches, runs, range(medium, small), ledger, left)
    stretches = _add_two_small(stretches, runs, range(small, tiny), ledger, left)
    _add_any(stretches, runs, ledger, left)
    return fit_decreasing(Runs(runs.sizes, left), capacity=capacity, fullest=False, ledger=ledger, num_bins=num_bins)


def _open(runs: Runs, medium: int, capacity: int, ledger: Ledger, left: list[int]) -> list[_Stretch]:
    """Phase 1: a bin for each large sample, longest first."""
    stretches = []
    first = 0
    for run in range(medium):
        ledger.write((run, first, left[run], 1))
        stretches.append(_Stretch(first, left[run], capacity - runs.sizes[run]))
        first += left[run]
        left[run] = 0
    return stretches


def _add_medium(
    stretches: list[_Stretch], runs: Runs, medium: range, ledger: Ledger, left: list[int]
) -> list[_Stretch]:
    """Phase 2: forward, to each bin the largest medium sample that fits."""
    after = []
    fitting: list[int] = []  # runs that fit and have samples left, largest last
    waiting = list(medium)
    for stretch in stretches:
        while waiting and runs.sizes[waiting[-1]] <= stretch.room:
            fitting.append(waiting.pop())
        while stretch.num and fitting:
            run = fitting[-1]
            num = min(stretch.num, left[run])
            ledger.write((run, stretch.first, num, 1))
            after.append(stretch.split(num, runs.sizes[run], has_medium=True))
            left[run] -= num
            if not left[run]:
                fitting.pop()
        if stretch.num:
            after.append(stretch)
    return after


def _add_two_small(
    stretches: list[_Stretch], runs: Runs, small: range, ledger: Ledger, left: list[int]
) -> list[_Stretch]:
    """Phase 3: backward, to each bin without a medium sample the smallest small one and the largest that then fits."""
    after = []
    largest, smallest = small.start, small.stop - 1
    for stretch in reversed(stretches):
        while stretch.num and not stretch.has_medium:
            while smallest >= largest and not left[smallest]:
                smallest -= 1
            # The room beside the smallest only shrinks from bin to bin, so what does not fit now never will.
            while largest <= smallest and (
                not left[largest] or runs.sizes[largest] + runs.sizes[smallest] > stretch.room
            ):
                largest += 1
            if largest > smallest or (largest == smallest and left[smallest] < 2):
                break
            pair = (smallest, largest)
            num = min(stretch.num, left[smallest] // 2 if largest == smallest else min(left[smallest], left[largest]))
            for run in pair:
                left[run] -= num
            if largest == smallest:
                ledger.write((smallest, stretch.first, num, 2))
            else:
                ledger.write((smallest, stretch.first, num, 1))
                ledger.write((largest, stretch.first, num, 1))
            after.append(stretch.split(num, sum(runs.sizes[run] for run in pair), has_medium=False))
        if stretch.num:
            after.append(stretch)
    return sorted(after, key=lambda stretch: stretch.first)


def _add_any(stretches: list[_Stretch], runs: Runs, ledger: Ledger, left: list[int]) -> None:
    """Phase 4: forward, to each bin the largest sample that fits, as long as any does."""
    sizes = [-size for size in runs.sizes]
    # From a run without samples left, the way to the next that has some.
    following = [run if count else run + 1 for run, count in enumerate(left)] + [len(left)]

    def next_left(run: int) -> int:
        while following[run] != run:
            following[run] = following[following[run]]
            run = following[run]
        return run

    for stretch in stretches:
        while stretch.num:
            content: dict[int, int] = {}
            room = stretch.room
            run = next_left(bisect_left(sizes, -room))
            while run < len(sizes):
                content[run] = min(room // runs.sizes[run], left[run])
                room -= content[run] * runs.sizes[run]
                run = next_left(max(run + 1, bisect_left(sizes, -room)))
            if not content:
                break
            num = min(stretch.num, *(left[run] // per_bin for run, per_bin in content.items()))
            for run, per_bin in content.items():
                ledger.write((run, stretch.first, num, per_bin))
                left[run] -= num * per_bin
                if not left[run]:
                    following[run] = run + 1
            stretch.split(num, 0, has_medium=False)
