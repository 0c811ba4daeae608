"""
Certified: the fewest packs that are found, together with a lower bound.

Best fit comes first, then exact filling, then whole bins from the linear relaxation over patterns,
until packs and bound meet. All limits count iterations, so the result does not depend on the
machine's speed. If a gap remains, all other algorithms are tried: the plan is never worse than
theirs.
"""

from collections.abc import Callable
from itertools import chain

from packplan.core.errors import counted
from packplan.core.lengths import IntArray
from packplan.core.packers.best_fit_decreasing import best_fit_decreasing
from packplan.core.packers.concatenative import concatenative
from packplan.core.packers.constant_volume import constant_volume
from packplan.core.packers.first_fit_decreasing import first_fit_decreasing
from packplan.core.packers.first_fit_shuffle import first_fit_shuffle
from packplan.core.packers.modified_first_fit_decreasing import modified_first_fit_decreasing
from packplan.core.packs import Packs
from packplan.core.patterns import num_packs, trace_of
from packplan.core.patterns.certificate import certify, reduced
from packplan.core.patterns.effort import ReportedEffort
from packplan.core.patterns.rounding import dives, restarts
from packplan.core.runs import PackingTrace, Runs


def certified(lengths: IntArray, *, capacity: int, seed: int, report: Callable[[str], None]) -> Packs:
    """
    Return the fewest packs found.

    Args:
        lengths: Tokens, each from 1 to *capacity*.
        capacity: Tokens a pack may hold.
        seed: Seed of `first_fit_shuffle`, which is tried last.
        report: Called with a progress message.
    """
    runs = Runs.from_lengths(lengths)
    best, bound = _fewest(runs, capacity=capacity, report=report)
    if best.num_bins > bound:
        report(f"{counted(best.num_bins, 'pack')}, the bound is {bound:,}: trying the other algorithms")
        for algorithm in (constant_volume, first_fit_decreasing, modified_first_fit_decreasing):
            best = min(best, algorithm(runs, capacity=capacity), key=lambda trace: trace.num_bins)
    packs = best.packs(lengths, runs)
    if len(packs) > bound:
        in_order = concatenative(lengths, capacity=capacity)
        shuffled = first_fit_shuffle(lengths, capacity=capacity, seed=seed)
        packs = min(packs, in_order, shuffled, key=len)
    return packs


def _fewest(runs: Runs, *, capacity: int, report: Callable[[str], None]) -> tuple[PackingTrace, int]:
    """Return the best packing over runs, and the lower bound."""
    best_fit = best_fit_decreasing(runs, capacity=capacity)
    runs, capacity = reduced(runs, capacity=capacity)
    bounding = f"{counted(best_fit.num_bins, 'pack')}, looking for the bound"
    report(bounding)
    effort = ReportedEffort(lambda steps: report(f"{bounding}: {counted(steps, 'step')}"))
    certificate = certify(runs, capacity=capacity, known=best_fit.num_bins, effort=effort)
    bound, best = certificate.bound, certificate.filling
    if best is None or best_fit.num_bins == bound:
        return best_fit, bound
    searches = chain(dives(runs, capacity=capacity, patterns=certificate.patterns), restarts(runs, capacity=capacity))
    while num_packs(best) > bound and (found := next(searches, None)) is not None:
        best = min(best, found, key=num_packs)
        report(f"{counted(min(num_packs(best), best_fit.num_bins), 'pack')}, the bound is {bound:,}: looking for fewer")
    return min(best_fit, trace_of(best), key=lambda trace: trace.num_bins), bound
