"""Lower bounds on the number of packs, which limit the distance of a plan from the best one."""

from __future__ import annotations

from functools import cache
from math import inf

import attrs

from packplan.core.any_fit import fit_decreasing
from packplan.core.lengths import IntArray, Lengths, lengths_up_to, whole_number
from packplan.core.packers import pack
from packplan.core.patterns.certificate import BoundKind, certify, reduced
from packplan.core.patterns.effort import Effort
from packplan.core.patterns.quick_bounds import quick_bound
from packplan.core.runs import Runs

_FIXED_EFFORT, _EFFORT_OF_A_SAMPLE = 120_000, 0.3
"""
Steps of the usual search for a lower bound: a fixed part of about 0.05 s, and a part for each
sample of about its planning time.
"""

_BLOCKS = (2, 4, 8, 16, 32, 64)
"""
Numbers of blocks to try for a bound on ordered packs. More blocks see more of what lies apart in
the data, but have more gaps.
"""

_MOST_STEPS = 4_000_000
"""Steps of the largest search of all orders, of about a quarter of a microsecond each."""


def usual_effort(num_samples: int) -> float:
    """Return the steps of a search for a lower bound that takes about as long as planning."""
    return _FIXED_EFFORT + _EFFORT_OF_A_SAMPLE * num_samples


@attrs.frozen
class Bound:
    """A number of packs that no packing can go below."""

    packs: int
    kind: BoundKind


def lower_bound(lengths: Lengths, *, capacity: int, known: int | None = None, effort: float = inf) -> int:
    """
    Return a number of packs that no packing can go below; see `find_bound`.

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
    max_displacement: int | None = None,
) -> Bound:
    """
    Return the strongest lower bound on the number of packs that *effort* finds.

    Quick bounds come first: Martello and Toth's L2 and dual-feasible functions. If no quick packing
    reaches them, the linear relaxation over patterns follows. It takes seconds for thousands of
    distinct lengths, and minutes for ten thousand. It is left out beyond 20,000 distinct lengths,
    and beyond a capacity of 131,072 over the greatest common divisor of the lengths.

    Args:
        lengths: Tokens of each sample, each from 1 to *capacity*.
        capacity: Tokens a pack may hold, >= 1.
        known: Number of packs of a known packing. A bound that reaches it ends the search.
        effort: Steps that may be spent beyond the quick bounds (`core.patterns.effort`), of about a
            third of a microsecond each. 0 leaves the relaxation out.
        max_displacement: Bound only packings in which no sample is further from its place
            (`core.packers.ordered`). None bounds all.

    Raises:
        ArgumentError: A length is not a whole number from 1 to *capacity*.

    >>> find_bound([60, 60, 50, 40], capacity=100)
    Bound(packs=3, kind='reached')
    """
    capacity = whole_number("capacity", capacity)
    if known is not None:
        whole_number("known", known, least=0)
    if max_displacement is not None:
        whole_number("max_displacement", max_displacement, least=0)
    array = lengths_up_to(lengths, capacity=capacity)
    found = _find_bound(Runs.from_lengths(array), capacity=capacity, known=known, effort=effort)
    if max_displacement is None or found.packs == known:
        return found
    in_order = _bound_in_order(array, capacity=capacity, max_displacement=max_displacement, exact=effort > 0)
    return Bound(in_order, "order") if in_order > found.packs else found


def _find_bound(runs: Runs, *, capacity: int, known: int | None, effort: float) -> Bound:
    if not runs.sizes:
        return Bound(0, "reached")
    runs, capacity = reduced(runs, capacity=capacity)
    if not effort:
        packs = quick_bound(runs, capacity=capacity)
        return Bound(packs, "reached" if packs == known else "quick")
    best_fit = fit_decreasing(runs, capacity=capacity, fullest=True).num_bins
    found = certify(runs, capacity=capacity, known=min(best_fit, known or best_fit), effort=Effort(effort))
    return Bound(found.bound, found.kind)


def _bound_in_order(lengths: IntArray, *, capacity: int, max_displacement: int, exact: bool) -> int:
    """
    Return a number of packs that none goes below in which no sample moves further.

    It is the fewest packs there are if nothing may move, or if *exact* and the data and the
    displacement are small enough to search all orders.

    Args:
        lengths: Tokens of each sample, each from 1 to *capacity*; at least one.
        capacity: Tokens a pack may hold.
        max_displacement: Samples that one may be from its place, >= 0.
        exact: Search all orders where that takes about a second at most.
    """
    if not max_displacement:
        return len(pack(lengths, capacity=capacity, algorithm="concatenative"))
    # Each place that a sample may move quadruples the steps of a position.
    if exact and lengths.size <= _MOST_STEPS >> 2 * max_displacement:
        return _fewest(lengths, capacity=capacity, most=max_displacement)
    return _bound_of_blocks(lengths, capacity=capacity, gap=2 * max_displacement)


def _bound_of_blocks(lengths: IntArray, *, capacity: int, gap: int) -> int:
    """
    Return the bound of blocks of the data, between which gaps of twice the displacement are left
    out.

    At most one pack has samples on both sides of a gap. Of two such packs, the first would have a
    sample from behind the gap, and the second one from in front of it, read later. Together these
    two would have moved further than is allowed.
    """
    best = 0
    for num in _BLOCKS:
        size = (lengths.size - (num - 1) * gap) // num
        if size < 1:
            break
        starts = range(0, num * (size + gap), size + gap)
        runs = (Runs.from_lengths(lengths[start : start + size]) for start in starts)
        best = max(best, sum(quick_bound(one, capacity=capacity) for one in runs) - (num - 1))
    return best


def _fewest(lengths: IntArray, *, capacity: int, most: int) -> int:
    """
    Return the fewest packs in which no sample moves further than *most*.

    Samples are read in any order that is allowed. Orders that have read the same samples differ in
    the packs and the load of the last one alone, of which the least is kept.
    """
    unit, tokens = capacity + 1, lengths.tolist()
    # Bit k of a key: the sample `position - most + k` has been read. Value: packs * unit + load.
    states = {(1 << most) - 1: capacity}
    for position in range(len(tokens)):
        following: dict[int, int] = {}
        for read, state in states.items():
            load = state % unit
            for bit, key in _moves(read, most):
                index = position - most + bit
                if index < len(tokens):
                    added = load + tokens[index]
                    reached = state - load + (added if added <= capacity else unit + tokens[index])
                    following[key] = min(reached, following.get(key, reached))
        states = following
    return min(states.values()) // unit


@cache
def _moves(read: int, most: int) -> list[tuple[int, int]]:
    """
    Return the bits of the samples that may be read next, and the samples around the next position.

    The sample of bit 0 cannot wait any longer.
    """
    bits = [bit for bit in range(2 * most + 1) if not read >> bit & 1] if read & 1 else [0]
    return [(bit, (read | 1 << bit) >> 1) for bit in bits]
