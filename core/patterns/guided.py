"""
Guided filling: bins in the proportions that a linear program over few length groups gives.

Where a pack holds two to six samples, filling bins one by one uses up the lengths that would have
made the last bins full. The linear program over patterns (Gilmore and Gomory, "A linear programming
approach to the cutting-stock problem", 1961) says how often each pattern is needed. Neighbouring
lengths form groups, each as long as its longest, so that the program stays small. Most bins of the
program are then filled with real samples. The last sample of a bin may be longer than planned. The
program is solved again for the remaining samples, in finer groups, until none is left.

The program is solved by the revised simplex method with an explicit inverse. Floats are only added,
multiplied and divided element by element, and never summed by a library. IEEE 754 fixes each
result, so the packs are the same on every machine. Prices of a pattern are whole numbers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import fsum

import numpy as np

from packplan.core.length_counts import LengthCounts
from packplan.core.lengths import IntArray
from packplan.core.patterns import Effort, Filling, Pattern, SpentError
from packplan.core.patterns.relaxation import solve_knapsack

_FIRST_SHARE, _SHARE = 0.8, 0.5
"""Least share of a program's bins that are filled: of the first program, and of the others."""

_CLOSE = 0.005
"""A program is solved if its bins are within this share of its bound."""

_LEAST_GAIN = 0.003
"""Bins that one use of a pattern has to save to enter a program."""

_SCALE, _SMOOTHING, _TINY = 1 << 40, 0.8, 1e-9

_STEPS_OF_A_PROGRAM, _STEPS_OF_A_BIN, _STEPS_OF_A_COLUMN, _STEPS_OF_A_PIVOT = 20_000, 50, 10, 150
"""
Steps to group sizes, to fill bins of one kind, to compare a column of a program with its prices,
and to enter one.
"""


def fill_guided(tally: LengthCounts, *, capacity: int, num_groups: int, effort: Effort) -> Filling:
    """
    Pack all samples by guided filling.

    Args:
        tally: Lengths from 1 to *capacity*; counts may be 0.
        capacity: Tokens a bin may hold.
        num_groups: Groups of lengths in a program, at most.
        effort: Limit of the programs, not infinite. First fit packs the samples that are then left.
    """
    bins = _BinFiller(tally, capacity)
    share = _FIRST_SHARE
    with suppress(SpentError):
        while bins.alive:
            sizes, counts = [tally.sizes[index] for index in bins.alive], [bins.left[index] for index in bins.alive]
            longest, members = _group_sizes(sizes, counts, num_groups)
            uses = _solve_program(longest, members, capacity, effort)
            wanted = share * fsum(use for _, use in uses)
            for pattern, use in sorted(uses, key=lambda one: -one[1]):
                num = int((use * share if share == _FIRST_SHARE else use) + _TINY)
                if not num and wanted <= 0:
                    break
                wanted -= max(1, num)
                slots = [longest[group] for group in sorted(pattern) for _ in range(pattern[group])]
                bins.fill(slots, max(1, num), effort)
            share = _SHARE
    bins.fill([capacity] * (capacity // tally.sizes[-1]), sum(bins.left), Effort())
    return bins.filling


def fill_slots(tally: LengthCounts, *, capacity: int, bins: Iterable[tuple[list[int], int]]) -> Filling:
    """
    Pack all samples into bins of slots.

    Args:
        tally: Lengths from 1 to *capacity*, counts >= 1.
        capacity: Tokens a bin may hold.
        bins: Slots of a bin, each a number of tokens, and its number of bins. Together they have a
            slot for each sample that is at least as long.
    """
    filler = _BinFiller(tally, capacity)
    for slots, num in bins:
        filler.fill(slots, num, Effort())
    return filler.filling


class _BinFiller:
    """Bins filled with real samples by the slots of a program, and the samples left."""

    def __init__(self, tally: LengthCounts, capacity: int) -> None:
        self.alive = [index for index, count in enumerate(tally.counts) if count]
        self.left = list(tally.counts)
        self.filling: Filling = []
        self._sizes, self._negated, self._capacity = tally.sizes, [-size for size in tally.sizes], capacity

    def fill(self, slots: list[int], num: int, effort: Effort) -> None:
        """
        Fill up to *num* bins. Each slot, a number of tokens, takes the longest sample of at most as
        many. The last slot takes the longest sample that fits.
        """
        while num and self.alive:
            effort.spend(_STEPS_OF_A_BIN)
            room, pattern = self._capacity, Pattern()
            for place, slot in enumerate(slots, start=1):
                most = room if place == len(slots) else min(slot, room)
                index = self._find_longest_index(most, pattern)
                if index is not None:
                    pattern[index] = pattern.get(index, 0) + 1
                    room -= self._sizes[index]
                elif most == room:
                    break
            alike = min(num, *(self.left[index] // per_bin for index, per_bin in pattern.items()))
            self.filling.append((pattern, alike))
            for index, per_bin in pattern.items():
                self.left[index] -= alike * per_bin
                if not self.left[index]:
                    del self.alive[bisect_left(self.alive, index)]
            num -= alike

    def _find_longest_index(self, most: int, pattern: Pattern) -> int | None:
        """Return the index of the longest size up to *most* with a sample left out of *pattern*."""
        place = bisect_left(self.alive, bisect_left(self._negated, -most))
        while place < len(self.alive) and pattern.get(self.alive[place], 0) == self.left[self.alive[place]]:
            place += 1
        return self.alive[place] if place < len(self.alive) else None


def _group_sizes(sizes: list[int], counts: list[int], num_groups: int) -> tuple[list[int], IntArray]:
    """
    Return the longest length and the number of samples of each group of neighbouring sizes. Groups
    are as fine as *num_groups* allows: each loses few tokens if all count as its longest.
    """
    samples: list[int] = [0, *accumulate(counts)]
    tokens: list[int] = [0, *accumulate(size * count for size, count in zip(sizes, counts, strict=True))]

    def lost_tokens(first: int, last: int) -> int:
        return sizes[first] * (samples[last + 1] - samples[first]) - (tokens[last + 1] - tokens[first])

    def group_starts(most: int) -> list[int] | None:
        found: list[int] = []
        first = 0
        while first < len(sizes):
            if len(found) == num_groups:
                return None
            found.append(first)
            first = bisect_right(range(len(sizes)), most, first, key=partial(lost_tokens, first))
        return found

    low, high = 0, sizes[0] * samples[-1]
    while low < high - high // 64:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if group_starts(middle) is None else (low, middle)
    first = group_starts(high) or []
    return [sizes[index] for index in first], np.add.reduceat(np.array(counts), first)


def _solve_program(longest: list[int], counts: IntArray, capacity: int, effort: Effort) -> list[tuple[Pattern, float]]:
    """
    Return patterns of groups, each with a number of bins. They have a place for every sample, in
    about the fewest bins that half of the effort finds.
    """
    effort.spend(_STEPS_OF_A_PROGRAM)
    program = _Program(np.array(longest), counts, capacity)
    with suppress(SpentError), effort.lend(int(effort.left) // 2) as own:
        program.generate_columns(own)
    return [
        (column, use)
        for column, use in zip(program.columns, program.uses.tolist(), strict=True)
        if column and use > _TINY
    ]


class _Program:
    """Linear program over patterns: fewest fractional bins with a place for all samples."""

    def __init__(self, sizes: IntArray, counts: IntArray, capacity: int) -> None:
        self._sizes, self._counts, self._capacity = sizes, counts, capacity
        per_bin = capacity // sizes
        self.columns: list[Pattern] = [{group: num} for group, num in enumerate(per_bin.tolist())]
        """Patterns of the basis; an empty one stands for places that pass to the next group."""
        self.uses = counts / per_bin
        self._costs = np.ones(sizes.size)
        self._prices = 1 / per_bin
        self._inverse = np.diag(self._prices)  # transposed: a row for each group

    def generate_columns(self, effort: Effort) -> None:
        """
        Add patterns to the basis until its number of bins is within `_CLOSE` of the bound.

        Raises:
            SpentError: The effort ends before.
        """
        centre, bound, smoothing = self._sizes / self._capacity, 0.0, _SMOOTHING
        passes = sum(per_bin.bit_length() + 2 for per_bin in (self._capacity // self._sizes).tolist())
        while True:
            self._replace_by_shorter(effort)
            effort.spend(passes * (6 + self._capacity // 600))
            smoothed = smoothing * centre + (1 - smoothing) * np.clip(self._prices, 0, 1)
            knapsack = solve_knapsack(self._sizes, np.floor(smoothed * _SCALE).astype(np.int64), self._capacity)
            priced = zip(knapsack.prices.tolist(), self._counts.tolist(), strict=True)
            total = sum(price * count for price, count in priced)
            if total / knapsack.best_price > bound:
                bound, centre = total / knapsack.best_price, knapsack.prices / knapsack.best_price
            if fsum((self.uses * self._costs).tolist()) <= bound * (1 + _CLOSE):
                return
            dearest = np.argsort(-knapsack.worth_with_each_size(), kind="stable").tolist()
            entered = [self._enter_column(pattern, 1, effort) for pattern in knapsack.patterns_with(dearest)]
            smoothing = _SMOOTHING if any(entered) else 0.0

    def _replace_by_shorter(self, effort: Effort) -> None:
        """Let shorter samples take the places of longer ones in patterns where that saves bins."""
        prices = [*self._prices.tolist(), 0.0]
        for group in range(self._sizes.size):
            if prices[group] < prices[group + 1] - _TINY:
                self._enter_column({group: -1, group + 1: 1}, 0, effort)

    def _enter_column(self, column: Pattern, cost: int, effort: Effort) -> bool:
        """Put a column into the basis if it saves bins; return whether it does."""
        entries = [(group, num) for group, num in column.items() if group < self._sizes.size]
        effort.spend(_STEPS_OF_A_COLUMN + sum(column.values()))
        gain = -float(cost)
        for group, num in entries:
            gain += num * float(self._prices[group])
        if gain <= _LEAST_GAIN * cost + _TINY:
            return False
        effort.spend(_STEPS_OF_A_PIVOT + self._sizes.size**2 // 100)
        change = np.zeros(self._sizes.size)
        for group, num in entries:
            change += num * self._inverse[group]
        (less,) = (change > _TINY).nonzero()
        if not less.size:  # only by an error of rounding
            return False
        leaving = int(less[(self.uses[less] / change[less]).argmin()])
        use = float(self.uses[leaving] / change[leaving])
        pivot = self._inverse[:, leaving] / change[leaving]
        change[leaving] = 0
        self._inverse -= np.multiply.outer(pivot, change)
        self._inverse[:, leaving] = pivot
        self.uses = np.maximum(self.uses - use * change, 0)
        self.uses[leaving] = use
        self._prices = self._prices - gain * pivot
        self._costs[leaving] = cost
        self.columns[leaving] = column if cost else {}
        return True
