"""
Exact filling: bins whose samples sum to the capacity, found by subset sums over sizes.

A bin starts with one sample and is completed to its capacity, or as near to it as possible.
Reachable sums are the bits of one integer (Pisinger, "Dynamic programming on the word RAM", 2003).
A pattern is used for as many bins as its scarcest size allows, so the time grows with the distinct
lengths. The literature calls this a minimum-bin-slack heuristic (Gupta and Ho, 1999; Fleszar and
Hindi, 2002).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np

from packplan.core.length_counts import LengthCounts
from packplan.core.patterns import Filling, Pattern, num_packs
from packplan.core.patterns.effort import Effort

MAX_SIZES = 400
"""Sizes that one completion considers."""

MAX_REFILLS = 12
"""Attempts to save packs. Two in a row that close less than a tenth of the gap end them too."""

NUM_DRAWN = 60
"""Sizes that are drawn for a completion before all are tried in order."""

_STEPS_OF_A_BIN = 300
"""Steps of a bin beside its completions, for draws and counts."""

_BITS_OF_A_STEP = 1 << 15
"""Bits that one step shifts. Larger capacities take proportionally more steps."""


def fill_exactly(tally: LengthCounts, *, capacity: int, effort: Effort, seed: int) -> Filling:
    """
    Pack all samples, bin by bin, each from the longest sample left.

    Args:
        tally: Lengths from 1 to *capacity*; counts may be 0.
        capacity: Tokens a bin may hold.
        effort: Limit of the filling; SpentError beyond.
        seed: Seed of the sizes that complete bins, so that the samples left stay a fair selection.
    """
    sizes, left = tally.sizes, list(tally.counts)
    alive = [index for index, count in enumerate(left) if count]
    draws = _draws(left, seed)
    negated = [-size for size in sizes]
    filling: Filling = []
    while alive:
        start = alive[0]
        left[start] -= 1
        room = capacity - sizes[start]
        effort.spend(_STEPS_OF_A_BIN)
        total, pattern = _complete_filling(room, _draw_fitting(draws, sizes, left, room), sizes, left, effort)
        if total < room:
            fitting = bisect_left(alive, bisect_left(negated, -room))
            found = _complete_filling(room, alive[fitting:], sizes, left, effort)
            pattern = found[1] if found[0] > total else pattern
        left[start] += 1
        pattern[start] = pattern.get(start, 0) + 1
        num = min(left[index] // per_bin for index, per_bin in pattern.items())
        filling.append((pattern, num))
        for index, per_bin in pattern.items():
            left[index] -= num * per_bin
            if not left[index]:
                del alive[bisect_left(alive, index)]
    return filling


def refill(filling: Filling, tally: LengthCounts, *, capacity: int, enough: int, effort: Effort) -> Filling:
    """
    Pack the samples of partly filled bins again, with those of some full bins, while that saves
    packs.

    Args:
        filling: Packing of all samples.
        tally: Lengths from 1 to *capacity*.
        capacity: Tokens a bin may hold.
        enough: Number of packs that ends the search.
        effort: Limit of the search; SpentError beyond.
    """
    idle = 0
    for seed in range(1, MAX_REFILLS + 1):
        before = num_packs(filling)
        if before <= enough or idle == 2:
            break
        kept, left = _take_apart(filling, tally, capacity, seed)
        found = kept + fill_exactly(LengthCounts(tally.sizes, left), capacity=capacity, effort=effort, seed=seed)
        saved = before - num_packs(found)
        idle = 0 if saved * 10 >= before - enough else idle + 1
        if saved >= 0:
            filling = found
    return filling


def _take_apart(filling: Filling, tally: LengthCounts, capacity: int, seed: int) -> tuple[Filling, list[int]]:
    """
    Return the bins to keep, and the samples of the others. Those are all bins that are not full,
    and half as many full ones.
    """
    is_full = [sum(tally.sizes[index] * per_bin for index, per_bin in p.items()) == capacity for p, _ in filling]
    num_full = np.cumsum([num * full for (_, num), full in zip(filling, is_full, strict=True)])
    num_open = num_packs(filling) - int(num_full[-1])
    drawn = np.zeros(len(filling), dtype=np.int64)
    if num_full[-1]:
        draws = np.random.PCG64(seed).random_raw(num_open // 2 + 20) % num_full[-1].astype(np.uint64)
        drawn = np.bincount(np.searchsorted(num_full, draws.astype(np.int64), side="right"), minlength=len(filling))
    kept: Filling = []
    left = [0] * len(tally.sizes)
    for (pattern, num), full, opened in zip(filling, is_full, drawn.tolist(), strict=True):
        taken = min(num, opened) if full else num
        for index, per_bin in pattern.items():
            left[index] += taken * per_bin
        if taken < num:
            kept.append((pattern, num - taken))
    return kept, left


def _complete_filling(
    room: int, candidates: Iterable[int], sizes: list[int], left: list[int], effort: Effort
) -> tuple[int, Pattern]:
    """Return the largest sum up to *room* that the candidates reach, and a pattern for it."""
    within = (1 << (room + 1)) - 1
    reached = [1]  # bit n of the last: n tokens are reachable
    used: list[tuple[int, int]] = []
    steps = 1 + room // _BITS_OF_A_STEP
    for index in candidates:
        most = min(left[index], room // sizes[index])
        effort.spend(most.bit_length() * steps)
        copies = 1
        while most > 0:  # 1, 2, 4, … copies and the rest reach every number of them
            copies = min(copies, most)
            now = (reached[-1] | reached[-1] << sizes[index] * copies) & within
            if now != reached[-1]:
                reached.append(now)
                used.append((index, copies))
            most -= copies
            copies *= 2
        if reached[-1] >> room & 1 or len(used) > MAX_SIZES:
            break
    rest = total = reached[-1].bit_length() - 1
    pattern: Pattern = {}
    for before, (index, copies) in zip(reached[-2::-1], reversed(used), strict=True):
        if not before >> rest & 1:
            pattern[index] = pattern.get(index, 0) + copies
            rest -= copies * sizes[index]
    return total, pattern


def _draws(left: list[int], seed: int) -> Iterator[int]:
    """
    Yield indices of sizes without end, each in proportion to its samples left. The raw stream is
    the same in every version of numpy.
    """
    stream = np.random.PCG64(seed)
    while True:
        ends = np.cumsum(left)
        if not ends[-1]:
            return
        drawn = stream.random_raw(4096) % ends[-1].astype(np.uint64)
        yield from np.searchsorted(ends, drawn.astype(np.int64), side="right").tolist()


def _draw_fitting(draws: Iterator[int], sizes: list[int], left: list[int], room: int) -> list[int]:
    """Return indices of some drawn sizes that fit, each once; fewer where few fit."""
    chosen: dict[int, None] = {}
    for _, index in zip(range(4 * NUM_DRAWN), draws, strict=False):
        if left[index] and sizes[index] <= room:
            chosen[index] = None
            if len(chosen) == NUM_DRAWN:
                break
    return list(chosen)
