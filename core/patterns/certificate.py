"""Upper and lower bounds on the number of packs, cheapest first, until they meet."""

from __future__ import annotations

from math import gcd
from typing import Literal

import attrs

from packplan.core.patterns import Filling, Pattern, num_packs
from packplan.core.patterns.effort import Effort, SpentError
from packplan.core.patterns.fill import fill_exactly, refill
from packplan.core.patterns.quick_bounds import quick_bound
from packplan.core.patterns.relaxation import MAX_CAPACITY, MAX_RUNS, relax
from packplan.core.runs import Runs

BoundKind = Literal["quick", "relaxation", "reached"]
"""
Kind of a lower bound. `quick`: the better of L2 and dual-feasible functions. `relaxation`: the
linear relaxation over patterns. `reached`: a packing has this number of packs, so both are optimal.
`order`: a bound on packs in which no sample moves far, where that one is higher.
"""


@attrs.frozen
class Certificate:
    """Bounds of a packing problem, and the packing that was found."""

    bound: int
    """Number of packs that no packing can go below."""

    filling: Filling | None
    """Best packing over patterns; None without a search."""

    patterns: list[Pattern]
    """Patterns of the linear relaxation; empty if the bounds met without it."""

    kind: BoundKind


def certify(runs: Runs, *, capacity: int, known: int, effort: Effort) -> Certificate:
    """
    Bound the number of packs from below, and from above where that helps.

    Args:
        runs: Lengths from 1 to *capacity*, counts >= 1, at least one; in lowest terms (`reduced`).
        capacity: Tokens a pack may hold.
        known: Number of packs of a known packing.
        effort: Limit of the search beyond the quick bounds.
    """
    bound = quick_bound(runs, capacity=capacity)
    if known == bound:
        return Certificate(bound, None, [], "reached")
    if capacity > MAX_CAPACITY or len(runs.sizes) > MAX_RUNS:
        return Certificate(bound, None, [], "quick")
    try:
        return _search(runs, capacity=capacity, known=known, effort=effort, bound=bound)
    except SpentError:
        return Certificate(bound, None, [], "quick")


def _search(runs: Runs, *, capacity: int, known: int, effort: Effort, bound: int) -> Certificate:
    """
    Search for bounds beyond the quick *bound*; SpentError if the effort ends before the relaxation.
    """
    drawn = fill_exactly(runs, capacity=capacity, effort=effort, seed=0)
    drawn = refill(drawn, runs, capacity=capacity, enough=bound, effort=effort)
    if num_packs(drawn) == bound:
        return Certificate(bound, drawn, [], "reached")
    fillings = [
        drawn,
        fill_exactly(runs, capacity=capacity, effort=effort),
        fill_exactly(runs, capacity=capacity, effort=effort, largest_first=False, seed=0),
    ]
    best = min(fillings, key=num_packs)
    enough = min(known, num_packs(best))
    relaxation = relax(runs, capacity=capacity, fillings=fillings, bound=bound, enough=enough, effort=effort)
    kind: BoundKind = "relaxation" if relaxation.is_complete or relaxation.bound > bound else "quick"
    return Certificate(relaxation.bound, best, relaxation.patterns, "reached" if relaxation.bound == enough else kind)


def reduced(runs: Runs, *, capacity: int) -> tuple[Runs, int]:
    """
    Divide lengths and capacity by the greatest common divisor of the lengths. The packings are the
    same.
    """
    unit = gcd(*runs.sizes) or 1
    return Runs([size // unit for size in runs.sizes], runs.counts), capacity // unit
