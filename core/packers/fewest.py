"""
Packers `auto` and `certified`: searches for the fewest packs.

`auto` returns the packs of constant volume, or fewer packs if a search with a limit of steps or
another quick algorithm finds them.

`certified` searches until the number of packs equals the lower bound, or until it has taken a
number of steps that grows with the gap. The quick algorithms and a search come first. If a gap is
left, `certified` solves the linear relaxation over patterns, and fixes the bins of the most used
patterns. A short search packs the remaining samples, and the program is solved again for these
samples. If a gap to the bound is still left, packs in the order of the data and in a random order
are tried too. Therefore `certified` never needs more packs than the quick algorithms,
`concatenative`, or `first_fit_shuffle` with the same seed.

All limits count steps, never seconds, so the result does not depend on the speed of the machine.
"""

from collections.abc import Callable, Iterator

import numpy as np

from packplan.core.errors import counted
from packplan.core.length_counts import LengthCounts, PackingTrace
from packplan.core.lengths import IntArray
from packplan.core.packers.decreasing import best_quick_packing, constant_volume
from packplan.core.packers.in_order import concatenative, first_fit_shuffle
from packplan.core.packs import Packs
from packplan.core.patterns import Effort, Filling, Pattern, num_packs, pattern_key, to_trace
from packplan.core.patterns.certificate import certify, effort_of_gap, find_quick_bound, to_lowest_terms
from packplan.core.patterns.relaxation import MAX_CAPACITY, MAX_SIZES, FloatArray, estimate_master_steps, solve_master
from packplan.core.patterns.search import CLOSE, default_effort, find_filling_quickly, find_repeated_filling

MAX_DIVES = 40
"""
Maximum number of linear programs after the relaxation. Each program has fewer samples than the
previous one.
"""

_MIN_SHARE_OF_A_DIVE = 0.5
"""Minimum share of the remaining bins that is fixed after each linear program."""

_TINY = 1e-6
"""Tolerance of the solver around zero."""


def auto(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """
    Return the packing with the fewest packs among constant volume, a search with limited steps, and
    the other quick algorithms.

    The search is skipped if constant volume needs at most 0.1 % more packs than the lower bound. It
    is also skipped if the capacity is above `MAX_CAPACITY`, or the number of distinct lengths above
    `MAX_SIZES`. The other quick algorithms are skipped if the number of packs equals the bound.
    """
    terms, width = to_lowest_terms(tally, capacity=capacity)
    best = constant_volume(tally, capacity=capacity)
    bound = find_quick_bound(terms, capacity=width, known=best.num_bins)
    if best.num_bins > bound + bound // CLOSE and width <= MAX_CAPACITY and len(terms.sizes) <= MAX_SIZES:
        found = find_repeated_filling(terms, capacity=width, bound=bound, effort=default_effort(terms))
        best = min(best, to_trace(found), key=lambda trace: trace.num_bins)
    if best.num_bins > bound:
        best = min(best, best_quick_packing(tally, capacity=capacity), key=lambda trace: trace.num_bins)
    return best


def certified(lengths: IntArray, *, capacity: int, seed: int, report: Callable[[str], None]) -> Packs:
    """
    Search for the fewest packs, until their number equals the lower bound or a limit of steps is
    reached.

    Args:
        lengths: Number of tokens of each sample, each from 1 to *capacity*.
        capacity: Maximum number of tokens in a pack.
        seed: Seed of the random order, which is tried last.
        report: Called with a progress message.
    """
    tally = LengthCounts.from_lengths(lengths)
    best, bound = _pack_to_bound(tally, capacity=capacity, report=report)
    packs = best.packs(lengths, tally)
    if len(packs) > bound:
        in_order = concatenative(lengths, capacity=capacity)
        shuffled = first_fit_shuffle(lengths, capacity=capacity, seed=seed)
        packs = min(packs, in_order, shuffled, key=len)
    return packs


def _pack_to_bound(tally: LengthCounts, *, capacity: int, report: Callable[[str], None]) -> tuple[PackingTrace, int]:
    """
    Return the best packing that the quick algorithms and the searches over patterns find, and the
    lower bound on the number of packs.
    """
    known = best_quick_packing(tally, capacity=capacity)
    tally, capacity = to_lowest_terms(tally, capacity=capacity)
    report(f"{counted(known.num_bins, 'pack')}, looking for the bound")
    certificate = certify(tally, capacity=capacity, known=known.num_bins, effort=Effort(), report=report)
    bound, best = certificate.bound, certificate.filling
    if best is None:
        return known, bound
    effort = effort_of_gap(min(num_packs(best), known.num_bins), bound)
    searches = _yield_fillings(tally, capacity=capacity, patterns=certificate.patterns, effort=effort)
    while num_packs(best) > bound and (found := next(searches, None)) is not None:
        best = min(best, found, key=num_packs)
        report(f"{counted(min(num_packs(best), known.num_bins), 'pack')}, the bound is {bound:,}: looking for fewer")
    fewest = min(known, to_trace(best), key=lambda trace: trace.num_bins)
    if fewest.num_bins > bound:
        report(f"{counted(fewest.num_bins, 'pack')}, the bound is {bound:,}: finding fewer takes longer than it saves")
    return fewest, bound


def _yield_fillings(
    tally: LengthCounts, *, capacity: int, patterns: list[Pattern], effort: Effort
) -> Iterator[Filling]:
    """
    Yield packings, in each of which linear programs have fixed more bins than in the previous one.

    Args:
        tally: Lengths from 1 to *capacity*, counts >= 1.
        capacity: Maximum number of tokens in a bin.
        patterns: Patterns of the relaxation, which include all patterns of a packing.
        effort: Limit of steps for the linear programs. No error is raised at the limit.
    """
    left = list(tally.counts)
    fixed: Filling = []
    pool = {pattern_key(pattern): pattern for pattern in patterns}
    for _ in range(MAX_DIVES):
        usable = [p for p in pool.values() if all(per_bin <= left[index] for index, per_bin in p.items())]
        steps = estimate_master_steps(usable)
        master = solve_master(usable, counts=np.array(left)) if steps <= effort.left else None
        if master is None:
            return
        effort.spend(steps)
        fixed += _fix_bins(usable, master.uses, left, at_least=_MIN_SHARE_OF_A_DIVE * master.num_packs)
        if not any(left):
            yield fixed
            return
        filling = find_filling_quickly(LengthCounts(tally.sizes, left), capacity=capacity)
        yield fixed + filling
        pool.update({pattern_key(pattern): pattern for pattern, _ in filling})


def _fix_bins(patterns: list[Pattern], uses: FloatArray, left: list[int], *, at_least: float) -> Filling:
    """
    Fix the bins of the most used patterns: all whole uses, and in total at least *at_least* bins,
    if the samples suffice. Return these bins, and subtract their samples from *left*.
    """
    fixed: Filling = []
    for place in np.argsort(-uses, kind="stable").tolist():
        pattern, used = patterns[place], float(uses[place])
        if used < 1 - _TINY and fixed and (num_packs(fixed) >= at_least or used < _TINY):
            break
        # In the program, a sample may replace a longer one, so not every bin can be filled.
        num = min(max(int(used + _TINY), 1), *(left[index] // per_bin for index, per_bin in pattern.items()))
        fixed.append((pattern, num))
        for index, per_bin in pattern.items():
            left[index] -= num * per_bin
    return [(pattern, num) for pattern, num in fixed if num]
