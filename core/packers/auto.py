"""
Auto: the packs of constant volume, and fewer where a bounded search finds them.

The search fills bins exactly where packs hold many samples, or where constant volume is nearly good
enough. Else it fills them in the proportions of a linear program. Its effort is a fixed number of
steps and a number for each sample.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

from packplan.core.length_counts import LengthCounts, PackingTrace
from packplan.core.packers.best_fit_decreasing import best_fit_decreasing
from packplan.core.packers.constant_volume import constant_volume
from packplan.core.packers.first_fit_decreasing import first_fit_decreasing
from packplan.core.packers.modified_first_fit_decreasing import modified_first_fit_decreasing
from packplan.core.patterns import Filling, trace_of
from packplan.core.patterns.certificate import quick_bound, reduced
from packplan.core.patterns.effort import Effort, SpentError
from packplan.core.patterns.fill import fill_exactly, refill
from packplan.core.patterns.guided import NUM_GROUPS, fill_guided
from packplan.core.patterns.relaxation import MAX_CAPACITY, MAX_SIZES

_CLOSE, _DONE = 1000, 2000
"""Packs per pack above the bound that is worth no search (0.1 %), and per pack that ends it."""

_EFFORT, _EFFORT_OF_A_SAMPLE = 2_800_000, 4
"""Steps of the search: the larger of a fixed number, of less than a second, and some a sample."""

_MANY, _NEAR = 6, 200
"""
Samples of a pack from which on exact filling comes first, and packs per pack above the bound up to
which it does. It then reaches the bound, mostly.
"""


def auto(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """
    Return the packs of constant volume if they are close to the bound and no quick algorithm needs
    fewer, else the fewest that are found.
    """
    best = constant_volume(tally, capacity=capacity)
    terms, width = reduced(tally, capacity=capacity)
    bound = quick_bound(terms, capacity=width)
    if best.num_bins > bound + bound // _CLOSE and width <= MAX_CAPACITY and len(terms.sizes) <= MAX_SIZES:
        best = _fewer(best, terms, capacity=width, bound=bound)
    if best.num_bins > bound:
        for algorithm in (best_fit_decreasing, first_fit_decreasing, modified_first_fit_decreasing):
            best = min(best, algorithm(tally, capacity=capacity), key=lambda trace: trace.num_bins)
    return best


def _fewer(best: PackingTrace, tally: LengthCounts, *, capacity: int, bound: int) -> PackingTrace:
    """Return fewer packs than those of *best*, if a search within its effort finds some."""
    num_samples = sum(tally.counts)
    effort = Effort(max(_EFFORT, _EFFORT_OF_A_SAMPLE * num_samples))
    searches = [_exact(tally, capacity, bound, effort), _guided(tally, capacity, effort)]
    if num_samples < _MANY * best.num_bins and best.num_bins > bound + bound // _NEAR:
        searches.reverse()
    with suppress(SpentError):
        for filling in chain(*searches):
            best = min(best, trace_of(filling), key=lambda trace: trace.num_bins)
            if best.num_bins <= bound + bound // _DONE:
                break
    return best


def _exact(tally: LengthCounts, capacity: int, bound: int, effort: Effort) -> Iterator[Filling]:
    drawn = fill_exactly(tally, capacity=capacity, effort=effort, seed=0)
    yield drawn
    yield refill(drawn, tally, capacity=capacity, enough=bound, effort=effort)


def _guided(tally: LengthCounts, capacity: int, effort: Effort) -> Iterator[Filling]:
    """
    Yield guided fillings of ever more groups, twice as many each, while less than half of the
    effort is spent.
    """
    enough, num_groups = effort.left / 2, NUM_GROUPS
    while effort.left > enough:
        yield fill_guided(tally, capacity=capacity, num_groups=num_groups, effort=effort)
        if num_groups >= len(tally.sizes):
            break
        num_groups *= 2
