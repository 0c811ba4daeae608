"""Auto: the packs of constant volume, and fewer where a bounded search finds them."""

from packplan.core.length_counts import LengthCounts, PackingTrace
from packplan.core.packers.decreasing import constant_volume, fewest_quickly
from packplan.core.patterns import trace_of
from packplan.core.patterns.certificate import quick_bound, reduced
from packplan.core.patterns.effort import Effort
from packplan.core.patterns.relaxation import MAX_CAPACITY, MAX_SIZES
from packplan.core.patterns.search import find_filling

_CLOSE = 1000
"""Packs per pack above the bound that is worth no search (0.1 %)."""


def auto(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """
    Return the packs of constant volume if they are close to the bound and no quick algorithm needs
    fewer, else the fewest that are found.
    """
    terms, width = reduced(tally, capacity=capacity)
    bound = quick_bound(terms, capacity=width)
    best = constant_volume(tally, capacity=capacity)
    if best.num_bins > bound + bound // _CLOSE and width <= MAX_CAPACITY and len(terms.sizes) <= MAX_SIZES:
        found = find_filling(terms, capacity=width, bound=bound, effort=Effort())
        best = min(best, trace_of(found), key=lambda trace: trace.num_bins)
    if best.num_bins > bound:
        best = min(best, fewest_quickly(tally, capacity=capacity), key=lambda trace: trace.num_bins)
    return best
