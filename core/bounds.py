"""Lower bounds on the number of packs, which show how far a plan can be from the best one."""

from collections.abc import Callable
from math import inf

import attrs

from packplan.core.length_counts import LengthCounts, fit_decreasing
from packplan.core.lengths import Lengths, as_lengths_up_to, as_whole_number
from packplan.core.patterns import Effort, num_packs
from packplan.core.patterns.certificate import BoundKind, certify, find_quick_bound, to_lowest_terms
from packplan.core.patterns.search import CLOSE

_FIXED_EFFORT, _EFFORT_OF_A_SAMPLE = 380_000, 0.3
"""
Steps of the usual search for a lower bound: a fixed number, which takes about 0.1 s, and a number
for each sample. The steps of a sample take about as long as planning the sample.
"""


def effort_for_bound(num_samples: int) -> float:
    """
    Return the limit of steps with which a search for a lower bound takes about as long as planning.
    """
    return _FIXED_EFFORT + _EFFORT_OF_A_SAMPLE * num_samples


@attrs.frozen
class Bound:
    """Lower bound on the number of packs, and the method that found it."""

    packs: int
    kind: BoundKind

    best: int
    """Number of packs of the best known packing. The algorithm `auto` needs about as many packs."""


def lower_bound(lengths: Lengths, *, capacity: int, known: int | None = None, effort: float = inf) -> int:
    """
    Return a lower bound on the number of packs; see `find_bound`.

    >>> lower_bound([60, 60, 50], capacity=100)
    3
    """
    return find_bound(lengths, capacity=capacity, known=known, effort=effort).packs


def find_bound(
    lengths: Lengths,
    *,
    capacity: int,
    known: int | None = None,
    effort: float = inf,
    report: Callable[[str], None] = lambda _: None,
) -> Bound:
    """
    Return the best lower bound on the number of packs that a search of *effort* steps finds.

    The quick bounds are computed first: Martello and Toth's L2 and dual-feasible functions. If no
    quick packing has as few packs as a quick bound, a search looks for a better packing. Linear
    programs over packing patterns then raise the bound. The programs take seconds for thousands of
    distinct lengths, and minutes for ten thousand.

    Only the quick bounds are computed if there are more than 20,000 distinct lengths. The same
    holds if the capacity, divided by the greatest common divisor of the lengths, is above 131,072.

    Args:
        lengths: Number of tokens of each sample, each from 1 to *capacity*.
        capacity: Maximum number of tokens in a pack, >= 1.
        known: Number of packs of a known packing. The search ends when the bound equals *known*.
            With a finite *effort*, the search also ends when a quick bound is within one pack in
            1,000 of *known*.
        effort: Maximum number of steps after the quick bounds (`core.patterns`); 0 computes only
            the quick bounds. A step of a linear program took 0.03 to 0.1 microseconds. The linear
            programs also stop after 250 million steps per 0.1 % of the packs that they may save.
        report: Called with a progress message.

    Raises:
        ArgumentError: A length is not a whole number from 1 to *capacity*.

    >>> find_bound([60, 60, 50, 40], capacity=100)
    Bound(packs=3, kind='reached', best=3)
    """
    capacity = as_whole_number("capacity", capacity)
    if known is not None:
        as_whole_number("known", known, least=0)
    tally = LengthCounts.from_lengths(as_lengths_up_to(lengths, capacity=capacity))
    if not tally.sizes:
        return Bound(0, "reached", 0)
    tally, capacity = to_lowest_terms(tally, capacity=capacity)
    quick = find_quick_bound(tally, capacity=capacity, known=known)
    enough = quick if effort == inf else quick + quick // CLOSE
    if not effort or (known and known <= enough):
        return Bound(quick, "reached" if quick == known else "quick", known or sum(tally.counts))
    best_fit = fit_decreasing(tally, capacity=capacity, fullest=True).num_bins
    best = min(best_fit, known or best_fit)
    found = certify(tally, capacity=capacity, known=best, effort=Effort(effort), report=report)
    return Bound(found.bound, found.kind, best if found.filling is None else min(best, num_packs(found.filling)))
