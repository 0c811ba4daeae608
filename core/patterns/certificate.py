"""How few packs there can be, and how few were found: heuristics and bounds, from cheap to dear, until they meet."""

from __future__ import annotations

from math import gcd

import attrs

from core.patterns import Filling, Pattern, num_packs
from core.patterns.fill import fill_exactly, refill
from core.patterns.quick_bounds import quick_bound
from core.patterns.relaxation import MAX_CAPACITY, MAX_RUNS, relax
from core.runs import Runs


@attrs.frozen
class Certificate:
    """What is known of a packing problem."""

    bound: int
    """No packing has fewer packs."""

    filling: Filling | None
    """The best packing over patterns; None where it was not looked for."""

    patterns: list[Pattern]
    """What the linear relaxation used; empty where the others met before."""


def certify(runs: Runs, *, capacity: int, known: int) -> Certificate:
    """
    Bound the number of packs from below, and from above where that helps.

    Args:
        runs: Lengths from 1 to *capacity*, counts >= 1, at least one; in lowest terms (`reduced`).

        capacity: Tokens a pack may hold.

        known: Packs of a packing that is known.
    """
    bound = quick_bound(runs, capacity=capacity)
    if known == bound or capacity > MAX_CAPACITY or len(runs.sizes) > MAX_RUNS:
        return Certificate(bound, None, [])
    drawn = refill(fill_exactly(runs, capacity=capacity, seed=0), runs, capacity=capacity, enough=bound)
    if num_packs(drawn) == bound:
        return Certificate(bound, drawn, [])
    fillings = [
        drawn,
        fill_exactly(runs, capacity=capacity),
        fill_exactly(runs, capacity=capacity, largest_first=False, seed=0),
    ]
    best = min(fillings, key=num_packs)
    enough = min(known, num_packs(best))
    relaxation = relax(runs, capacity=capacity, fillings=fillings, bound=bound, enough=enough)
    return Certificate(relaxation.bound, best, relaxation.patterns)


def reduced(runs: Runs, *, capacity: int) -> tuple[Runs, int]:
    """Divide by the greatest common divisor of the lengths: the same packings are possible."""
    unit = gcd(*runs.sizes) or 1
    return Runs([size // unit for size in runs.sizes], runs.counts), capacity // unit
