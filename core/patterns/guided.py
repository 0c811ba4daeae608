"""
Guided filling: packing bins in the proportions that a small linear program computes.

If packs contain two to six samples, filling bins one by one uses up the lengths that would make the
last bins full. The linear program over patterns (Gilmore and Gomory, "A linear programming approach
to the cutting-stock problem", 1961) computes how often each pattern is needed. Neighbouring lengths
form a group that counts as its longest length, so that the program stays small. At least half of
the program's bins are then filled with real samples. The last sample of a bin may be longer than
planned. The program is solved again for the remaining samples, in finer groups, until no sample is
left. If the limit of steps is reached before that, first fit packs the rest.

The program is solved by the revised simplex method with an explicit inverse. Arrays of floats are
only added, subtracted, multiplied and divided element by element, and summed by `fsum`, which
rounds only once. IEEE 754 defines each result exactly, so the packs are the same on every machine.
The knapsack problem, which finds new patterns, has integer prices.
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
"""
Minimum share of a program's bins that are filled: for the first program, and for all later
programs.
"""

_CLOSE = 0.005
"""
Relative gap at which a program counts as solved: its number of bins is at most this share above its
bound.
"""

_LEAST_GAIN = 0.003
"""
A pattern enters a program only if each use of the pattern saves more than this number of bins.
"""

_SCALE, _SMOOTHING, _TINY = 1 << 40, 0.8, 1e-9

_STEPS_OF_A_PROGRAM, _STEPS_OF_A_BIN, _STEPS_OF_A_COLUMN, _STEPS_OF_A_PIVOT = 20_000, 50, 10, 150
"""
Smallest number of steps that each of four operations counts as. The operations are setting up a
program, filling bins of one kind, pricing a column of a program, and entering a column.
"""


def fill_guided(tally: LengthCounts, *, capacity: int, num_groups: int, effort: Effort) -> Filling:
    """
    Pack all samples by guided filling.

    Args:
        tally: Lengths from 1 to *capacity*; counts may be 0.
        capacity: Maximum number of tokens in a bin.
        num_groups: Maximum number of length groups in a program.
        effort: Finite limit of steps for the programs and for filling their bins. First fit packs
            the samples that are left at the limit.
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
        capacity: Maximum number of tokens in a bin.
        bins: For each kind of bin, the tokens of its slots and the number of bins. All slots
            together can hold all samples, one sample in a slot.
    """
    filler = _BinFiller(tally, capacity)
    for slots, num in bins:
        filler.fill(slots, num, Effort())
    return filler.filling


class _BinFiller:
    """
    Bins filled with real samples, slot by slot as a program plans them, and the samples that are
    left.
    """

    def __init__(self, tally: LengthCounts, capacity: int) -> None:
        self.alive = [index for index, count in enumerate(tally.counts) if count]
        self.left = list(tally.counts)
        self.filling: Filling = []
        self._sizes, self._negated, self._capacity = tally.sizes, [-size for size in tally.sizes], capacity

    def fill(self, slots: list[int], num: int, effort: Effort) -> None:
        """
        Fill up to *num* bins. Each slot gets the longest remaining sample of at most the slot's
        tokens. The last slot gets the longest sample that fits into the bin.
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
        """
        Return the index of the longest size up to *most* that has samples left beside those in
        *pattern*.
        """
        place = bisect_left(self.alive, bisect_left(self._negated, -most))
        while place < len(self.alive) and pattern.get(self.alive[place], 0) == self.left[self.alive[place]]:
            place += 1
        return self.alive[place] if place < len(self.alive) else None


def _group_sizes(sizes: list[int], counts: list[int], num_groups: int) -> tuple[list[int], IntArray]:
    """
    Return the longest length and the number of samples of each group of neighbouring sizes. There
    are at most *num_groups* groups, chosen so that counting each sample as the longest of its group
    adds few tokens to any group.
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
    Return patterns of groups, each with a fractional number of bins. The bins have a place for
    every sample. At most half of the remaining steps are spent on reducing the number of bins.
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
    """
    Linear program over patterns: the fewest fractional bins that have a place for all samples.
    """

    def __init__(self, sizes: IntArray, counts: IntArray, capacity: int) -> None:
        self._sizes, self._counts, self._capacity = sizes, counts, capacity
        per_bin = capacity // sizes
        self.columns: list[Pattern] = [{group: num} for group, num in enumerate(per_bin.tolist())]
        """Patterns of the basis; an empty pattern stands for places that shorter samples use."""
        self.uses = counts / per_bin
        self._costs = np.ones(sizes.size)
        self._prices = 1 / per_bin
        self._inverse = np.diag(self._prices)  # transposed: a row for each group

    def generate_columns(self, effort: Effort) -> None:
        """
        Add patterns to the basis until its number of bins is within `_CLOSE` of the bound.

        Raises:
            SpentError: The limit of steps is reached before that.
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
        """Let shorter samples use the places of longer samples in patterns if this saves bins."""
        prices = [*self._prices.tolist(), 0.0]
        for group in range(self._sizes.size):
            if prices[group] < prices[group + 1] - _TINY:
                self._enter_column({group: -1, group + 1: 1}, 0, effort)

    def _enter_column(self, column: Pattern, cost: int, effort: Effort) -> bool:
        """Enter a column into the basis if it saves bins; return whether it was entered."""
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
