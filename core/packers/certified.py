"""
Certified: the fewest packs that are found, together with a lower bound.

The packs of `auto` come first, then whole bins from the linear relaxation over patterns, until
packs and bound meet. All limits count iterations, so the result does not depend on the machine's
speed. If a gap remains, packs in the order of the data and in a random one are tried: the plan is
never worse than that of another algorithm.
"""

from collections.abc import Callable

from packplan.core.errors import counted
from packplan.core.lengths import IntArray
from packplan.core.packers.auto import auto
from packplan.core.packers.concatenative import concatenative
from packplan.core.packers.first_fit_shuffle import first_fit_shuffle
from packplan.core.packs import Packs
from packplan.core.patterns import num_packs, trace_of
from packplan.core.patterns.certificate import certify, reduced
from packplan.core.patterns.effort import ReportedEffort
from packplan.core.patterns.rounding import dives
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
    packs = best.packs(lengths, runs)
    if len(packs) > bound:
        in_order = concatenative(lengths, capacity=capacity)
        shuffled = first_fit_shuffle(lengths, capacity=capacity, seed=seed)
        packs = min(packs, in_order, shuffled, key=len)
    return packs


def _fewest(runs: Runs, *, capacity: int, report: Callable[[str], None]) -> tuple[PackingTrace, int]:
    """Return the best packing over runs, and the lower bound."""
    known = auto(runs, capacity=capacity)
    runs, capacity = reduced(runs, capacity=capacity)
    bounding = f"{counted(known.num_bins, 'pack')}, looking for the bound"
    report(bounding)
    effort = ReportedEffort(lambda steps: report(f"{bounding}: {counted(steps, 'step')}"))
    certificate = certify(runs, capacity=capacity, known=known.num_bins, effort=effort)
    bound, best = certificate.bound, certificate.filling
    if best is None or known.num_bins == bound:
        return known, bound
    searches = dives(runs, capacity=capacity, patterns=certificate.patterns)
    while num_packs(best) > bound and (found := next(searches, None)) is not None:
        best = min(best, found, key=num_packs)
        report(f"{counted(min(num_packs(best), known.num_bins), 'pack')}, the bound is {bound:,}: looking for fewer")
    return min(known, trace_of(best), key=lambda trace: trace.num_bins), bound
