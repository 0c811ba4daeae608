"""
Search for a packing with few bins: guided filling, then exchanges that gather unused room in few
bins.

Unused room of a bin is useful only if a sample fits into it. Therefore a sample of a nearly full
bin is swapped for a slightly longer sample of another bin. The first bin becomes fuller, and the
second bin gets its unused room. Each exchange raises the sum of the squares of the bins' room, so
the exchanges end. All bins of one pattern are exchanged together, so the time grows with the number
of distinct lengths.

When no exchange is left, the bins that are not full are packed again, together with some full bins.
The literature calls this a large neighbourhood search (Shaw, 1998).
"""

from bisect import bisect_left, insort
from contextlib import suppress
from heapq import heappop, heappush

import attrs
import numpy as np

from packplan.core.length_counts import LengthCounts
from packplan.core.patterns import Effort, Filling, PatternKey, SpentError, num_packs, pattern_key
from packplan.core.patterns.guided import fill_guided, fill_slots

FEW_GROUPS, MORE_GROUPS = 32, 96
"""
Number of length groups in the first search, and in a second search if the first needs too many
packs.
"""

GROUPS, FINE_GROUPS = (32, 64), (64, 96)
"""
Numbers of length groups in the two searches of `auto`, the second of which uses the remaining
effort. `FINE_GROUPS` are for packs of few samples, `GROUPS` for packs of more samples. `GROUPS` are
used in reverse order if the packs do not repeat.
"""

_PACKS_OF_A_SEARCH, _LEAST_REPEATS, _FEW_SAMPLES = 4000, 3, 4
"""
Three limits. The first is the minimum number of packs in a search whose packs repeat. The second is
the minimum number of repeats, since two repeats lose more packs than the search saves. The third is
the maximum mean number of samples in a pack for which fine groups find fewer packs.
"""

CLOSE, _ENOUGH = 1000, 4000
"""
Divisors of the lower bound. `auto` starts no search if the gap is at most one pack in 1,000. A
search ends if the gap is at most one pack in 4,000.
"""

MAX_REFILLS = 12
"""
Maximum number of times that bins with room are packed again. The search ends earlier if, two times
in a row, packing again closes less than a tenth of the gap.
"""

_NEAR = 100
"""
Divisor of *enough*: the search with few groups continues if it has at most 1 + *enough* / 100 packs
more than *enough*.
"""

_STEPS_OF_A_PROGRAM, _STEPS_OF_A_PAIR = 250_000, 120
"""
Maximum number of steps of a guided filling: a fixed number, plus a number for each pair of groups
in its program.
"""

_STEPS_OF_AN_EXCHANGE, _CELLS_OF_A_STEP = 50, 256
"""
Number of steps that an exchange counts as, and number of compared partners that count as one more
step.
"""


def default_effort(tally: LengthCounts) -> Effort:
    """
    Return the default limit of steps, which take about half a second, or a second for a million
    samples.
    """
    return Effort(max(2_500_000, 4 * sum(tally.counts)))


def find_filling(tally: LengthCounts, *, capacity: int, enough: int, effort: Effort) -> Filling:
    """
    Search for a packing of few bins.

    Args:
        tally: Lengths from 1 to *capacity*, counts >= 1.
        capacity: Maximum number of tokens in a bin.
        enough: Number of packs at which the search ends.
        effort: Limit of steps for the search. No error is raised at the limit.
    """
    few, has_more = _Search(tally, capacity, FEW_GROUPS, effort), len(tally.sizes) > FEW_GROUPS
    best = few.fill(tally.counts)
    if not has_more or num_packs(best) <= enough + 1 + enough // _NEAR:
        best = few.improve(best, enough)
    if has_more and num_packs(best) > enough and effort.left:
        more = _Search(tally, capacity, MORE_GROUPS, effort)
        best = min(best, more.improve(more.fill(tally.counts), enough), key=num_packs)
    return best


def find_repeated_filling(tally: LengthCounts, *, capacity: int, bound: int, effort: Effort) -> Filling:
    """
    Search for a packing of few bins whose patterns repeat, so that the search stays small.

    Of every n samples of neighbouring lengths, only the longest is packed, and its pack is repeated
    n times. The number n grows with *bound*, and is 1 for few bins. A search therefore takes as
    long for ten million samples as for thousands, and needs less than one extra bin for each
    repetition.

    Args:
        tally: Lengths from 1 to *capacity*, counts >= 1.
        capacity: Maximum number of tokens in a bin.
        bound: Lower bound on the number of bins.
        effort: Limit of steps for the search. No error is raised at the limit.
    """
    repeats = bound // _PACKS_OF_A_SEARCH
    ratio = repeats if repeats >= _LEAST_REPEATS else 1
    longest = _take_longest(tally, ratio)
    close, enough = ((bound + bound // share) // ratio for share in (CLOSE, _ENOUGH))
    are_few = sum(tally.counts) <= _FEW_SAMPLES * bound
    fillings: list[Filling] = []
    for num_groups in FINE_GROUPS if are_few else GROUPS if ratio > 1 else reversed(GROUPS):
        search = _Search(longest, capacity, num_groups, effort)
        fillings.append(search.improve(search.fill(longest.counts), enough))
        if num_packs(fillings[-1]) <= close or len(longest.sizes) <= num_groups:
            break
    best = min(fillings, key=num_packs)
    if ratio == 1:
        return best
    slots = ([longest.sizes[index] for index in sorted(pattern) for _ in range(pattern[index])] for pattern, _ in best)
    return fill_slots(tally, capacity=capacity, bins=zip(slots, (ratio * num for _, num in best), strict=True))


def _take_longest(tally: LengthCounts, ratio: int) -> LengthCounts:
    """
    Divide the samples, longest first, into runs of *ratio*; count the longest sample of each run.
    """
    ends = -(-np.cumsum(tally.counts) // ratio)
    counts = np.diff(ends, prepend=0)
    return LengthCounts(np.array(tally.sizes)[counts > 0].tolist(), counts[counts > 0].tolist())


def find_filling_quickly(tally: LengthCounts, *, capacity: int) -> Filling:
    """Return a packing of few bins by guided filling and exchanges only; counts may be 0."""
    search = _Search(tally, capacity, FEW_GROUPS, Effort())
    return search.improve(search.fill(tally.counts), enough=sum(tally.counts))


@attrs.frozen
class _Search:
    """Search for a packing of few bins, limited by the remaining effort."""

    tally: LengthCounts
    capacity: int
    num_groups: int
    effort: Effort

    def fill(self, counts: list[int]) -> Filling:
        """Pack *counts* samples of each length by guided filling."""
        with self.effort.lend(_STEPS_OF_A_PROGRAM + _STEPS_OF_A_PAIR * self.num_groups**2) as own:
            tally = LengthCounts(self.tally.sizes, counts)
            return fill_guided(tally, capacity=self.capacity, num_groups=self.num_groups, effort=own)

    def improve(self, filling: Filling, enough: int) -> Filling:
        """
        Return a packing with at most as many bins as *filling*.

        First, unused room moves into few bins. Then each round repacks the bins with room, together
        with some full bins.

        The search ends at *enough* bins, after `MAX_REFILLS` rounds, after two rounds in a row that
        save little, or without effort left.
        """
        full, partial = gather_room(filling, self.tally, capacity=self.capacity, effort=self.effort)
        idle = 0
        for seed in range(1, MAX_REFILLS + 1):
            before = num_packs(full + partial)
            if before <= enough or idle == 2 or not self.effort.left:
                break
            kept, taken = _split_at_random(full, num_packs(partial) // 2, seed)
            left = [0] * len(self.tally.sizes)
            for pattern, num in taken + partial:
                for index, per_bin in pattern.items():
                    left[index] += num * per_bin
            again = self.fill(left)
            filled, rest = gather_room(again, self.tally, capacity=self.capacity, effort=self.effort)
            saved = before - num_packs(kept + filled + rest)
            idle = 0 if saved * 10 >= before - enough else idle + 1
            if saved >= 0:
                full, partial = kept + filled, rest
        return full + partial


def _split_at_random(filling: Filling, num: int, seed: int) -> tuple[Filling, Filling]:
    """Split a packing into bins that stay, and at most *num* + 20 bins drawn at random."""
    if not filling:
        return [], []
    ends = np.cumsum([num_bins for _, num_bins in filling])
    drawn = np.random.PCG64(seed).random_raw(num + 20) % ends[-1].astype(np.uint64)
    places = np.searchsorted(ends, drawn.astype(np.int64), side="right")
    nums = np.bincount(places, minlength=len(filling)).tolist()
    taken = [(pattern, min(most, wanted)) for (pattern, most), wanted in zip(filling, nums, strict=True) if wanted]
    stay = [(pattern, most - wanted) for (pattern, most), wanted in zip(filling, nums, strict=True) if most > wanted]
    return stay, taken


def gather_room(filling: Filling, tally: LengthCounts, *, capacity: int, effort: Effort) -> tuple[Filling, Filling]:
    """
    Exchange samples so that fewer bins have room; return the full bins, and the bins that have
    room.

    Args:
        filling: Packing of samples.
        tally: Lengths from 1 to *capacity*.
        capacity: Maximum number of tokens in a bin.
        effort: Limit of steps for the exchanges. No error is raised at the limit.
    """
    bins = _RoomyBins(tally, capacity)
    full: Filling = []
    for pattern, num in filling:
        if room := capacity - sum(tally.sizes[index] * per_bin for index, per_bin in pattern.items()):
            bins.add_bins(pattern_key(pattern), num, room)
        else:
            full.append((pattern, num))
    with suppress(SpentError):
        while bins.waiting:
            room, key = heappop(bins.waiting)
            if key in bins.nums:
                bins.fill_up(key, room, effort)
    for key in bins.full:
        full.append((dict(key), bins.nums.pop(key)))
    return full, [(dict(key), num) for key, num in bins.nums.items()]


class _RoomyBins:
    """Bins by pattern, with an index of the bins that have room."""

    def __init__(self, tally: LengthCounts, capacity: int) -> None:
        self.nums: dict[PatternKey, int] = {}
        """Pattern -> number of bins with this pattern."""
        self.waiting: list[tuple[int, PatternKey]] = []
        """
        Heap of the patterns of bins that are still to be filled up, each with its room, smallest
        room first.
        """
        self.full: list[PatternKey] = []
        """Patterns of bins without room."""
        self._sizes = [*tally.sizes, 0]  # the last entry stands for no sample
        self._index = {size: index for index, size in enumerate(self._sizes)}
        self._holders: list[list[tuple[int, PatternKey]]] = [[] for _ in self._sizes]  # by room, ascending
        self._most = np.zeros(capacity + 1, dtype=np.int64)  # length -> largest room beside it
        self._tokens = np.arange(1, capacity + 1)

    def add_bins(self, key: PatternKey, num: int, room: int, *, waits: bool = True) -> None:
        """Add bins of a pattern. If *waits* is true, a new pattern is filled up later."""
        if key in self.nums:
            self.nums[key] += num
        elif key:
            self.nums[key] = num
            if room:
                self._insert(key, room)
                if waits:
                    heappush(self.waiting, (room, key))
            else:
                self.full.append(key)

    def fill_up(self, key: PatternKey, room: int, effort: Effort) -> None:
        """
        Swap samples in the bins of a pattern for longer samples of other bins, as long as this
        helps.
        """
        num = self.nums.pop(key)
        self._remove(key, room)
        own = [*(index for index, _ in key), len(self._sizes) - 1]
        sizes, gained = np.array([self._sizes[index] for index in own]), self._tokens[:room]
        partners = sizes[:, None] + gained
        try:
            while num:
                effort.spend(_STEPS_OF_AN_EXCHANGE + partners.size // _CELLS_OF_A_STEP)
                # Half of the increase in the sum of the squares of all rooms.
                worth = gained * (self._most[partners] + (gained - room))
                best = int(worth.argmax())
                place, less = divmod(best, room)
                if worth[place, less] <= 0:
                    break
                short, long = own[place], self._index[int(partners[place, less])]
                more, other = self._holders[long][-1]
                moved = min(num, self.nums[other])
                num -= moved
                self.nums[other] -= moved
                if not self.nums[other]:
                    del self.nums[other]
                    self._remove(other, more)
                self.add_bins(self._replace_sample(key, short, long), moved, room - less - 1)
                self.add_bins(self._replace_sample(other, long, short), moved, more + less + 1)
        finally:
            if num:
                self.add_bins(key, num, room, waits=False)

    def _replace_sample(self, key: PatternKey, old: int, new: int) -> PatternKey:
        """Return a pattern with one sample's length replaced."""
        counts = dict(key)
        counts[old] = counts.get(old, 0) - 1
        counts[new] = counts.get(new, 0) + 1
        if not counts[old]:
            del counts[old]
        counts.pop(len(self._sizes) - 1, None)
        return pattern_key(counts)

    def _insert(self, key: PatternKey, room: int) -> None:
        """
        Add a pattern, whose bins have *room* unused tokens, to the index of patterns by length.
        """
        for index, _ in key:
            insort(self._holders[index], (room, key))
            self._most[self._sizes[index]] = self._holders[index][-1][0]

    def _remove(self, key: PatternKey, room: int) -> None:
        """
        Remove a pattern, whose bins have *room* unused tokens, from the index of patterns by
        length.
        """
        for index, _ in key:
            holders = self._holders[index]
            del holders[bisect_left(holders, (room, key))]
            self._most[self._sizes[index]] = holders[-1][0] if holders else 0
