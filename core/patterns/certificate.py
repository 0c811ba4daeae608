"""
Upper and lower bounds on the number of packs. Bounds are computed, the cheapest first, until an
upper bound equals a lower bound.
"""

from collections.abc import Callable
from math import gcd
from typing import Literal

import attrs
import numpy as np

from packplan.core.length_counts import LengthCounts
from packplan.core.lengths import IntArray
from packplan.core.patterns import Effort, Filling, Pattern, num_packs
from packplan.core.patterns.relaxation import MAX_CAPACITY, MAX_SIZES, tighten_bound
from packplan.core.patterns.search import CLOSE, default_effort, find_filling

MAX_PARTS = 100
"""
Maximum number of parts into which a dual-feasible function divides the capacity to round lengths.
"""

MAX_UNITS = 256
"""
Minimum number of rounding units to try first, if there are as many. With at least twice as many
units, only evenly spaced units are tried first, and then the units next to the best one.
"""


_EFFORTS = 3
"""
Maximum effort of the search before the linear relaxation, as a multiple of the effort of `auto`.
"""

_STEPS_OF_A_GAP = 250_000_000
"""
Maximum number of steps of linear programs for each 0.1 % of the packs that the programs may save. A
gap below 0.1 % gets as many steps as a gap of 0.1 %. On one core, this many steps took 9 to 25 s.
"""


def find_quick_bound(tally: LengthCounts, *, capacity: int, known: int | None = None) -> int:
    """
    Return the best of the L2 bound and the bounds of dual-feasible functions.

    L2 (Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem",
    1990) uses a threshold K of at most half the capacity. Samples above `capacity - K` need a pack
    each. Other samples above half the capacity need a pack each too, but leave room in that pack.
    If the samples from K to half the capacity exceed this room, they need further packs. The
    functions u(k) of Fekete and Schepers ("New classes of fast lower bounds for bin packing
    problems", 2001) round lengths to k-ths of the capacity. No pack then contains more than k
    parts.

    Args:
        tally: Lengths from 1 to *capacity*.
        capacity: Maximum number of tokens in a pack.
        known: Number of packs of a known packing. If the bound is within 0.1 % of *known*,
            functions that round to multiples of a unit are skipped.

    >>> find_quick_bound(LengthCounts([8, 7, 5], [1, 1, 1]), capacity=11)  # by L2 alone
    3
    """
    if not tally.sizes:
        return 0
    sizes = np.array(tally.sizes[::-1], dtype=np.int64)
    counts = np.array(tally.counts[::-1], dtype=np.int64)
    # Products reach number of samples * capacity * parts. Python integers replace 64-bit integers
    # where these would overflow.
    if sum(tally.counts) * capacity * (MAX_PARTS + 1) >= 2**63:
        sizes, counts = sizes.astype(object), counts.astype(object)
    bound = max(_l2_bound(sizes, counts, capacity), _dual_feasible_bound(sizes, counts, capacity))
    is_close = known is not None and known <= bound + bound // CLOSE
    return bound if is_close else max(bound, _rounding_bound(sizes, counts, capacity))


def _l2_bound(sizes: IntArray, counts: IntArray, capacity: int) -> int:
    """Return Martello and Toth's bound L2; *sizes* have to ascend."""
    samples = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * sizes)])
    halves = int(np.searchsorted(sizes, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], sizes[:halves]])
    # Sizes before `small` are below K, sizes before `halves` are at most half the capacity, and
    # sizes before `large` leave room for K.
    small = np.searchsorted(sizes, thresholds, side="left")
    large = np.maximum(np.searchsorted(sizes, capacity - thresholds, side="right"), halves)
    room = (samples[large] - samples[halves]) * capacity - (tokens[large] - tokens[halves])
    excess = np.maximum(tokens[halves] - tokens[small] - room, 0)
    return int(np.max((samples[-1] - samples[halves]) + -(-excess // capacity)))


def _dual_feasible_bound(sizes: IntArray, counts: IntArray, capacity: int) -> int:
    """Return the highest bound of the functions u(1) … u(MAX_PARTS)."""
    best = 0
    for parts in range(1, MAX_PARTS + 1):
        scaled = sizes * (parts + 1)
        whole = scaled // capacity
        # A length on a boundary keeps its share of the capacity. Other lengths are rounded down to
        # whole parts.
        value = np.where(scaled == whole * capacity, sizes * parts, whole * capacity)
        best = max(best, -(-int((value * counts).sum()) // (capacity * parts)))
    return best


def _rounding_bound(sizes: IntArray, counts: IntArray, capacity: int) -> int:
    """
    Return the highest bound of dual-feasible functions that round to multiples of a unit (Carlier,
    Clautiaux and Moukrim, 2007). Units are the lengths up to half the capacity, and the room that
    longer samples leave. The bound is usually tight if lengths are slightly above multiples of one
    number, as they are for images that are cut into tiles.
    """
    is_large, is_half = sizes * 2 > capacity, sizes * 2 == capacity
    units = np.unique(np.concatenate([sizes[~is_large], (capacity - sizes)[is_large]]))
    units = units[units > 0]

    def bound_by(unit: int) -> int:
        parts = 2 * (capacity // unit)
        small, large = sizes // unit * 2, parts - (capacity - sizes) // unit * 2
        values = np.where(is_large, large, np.where(is_half, parts // 2, small))
        return -(-int((values * counts).sum()) // parts)

    step = max(1, units.size // MAX_UNITS)
    coarse = list(map(bound_by, units[::step].tolist())) or [0]
    place = coarse.index(max(coarse)) * step
    return max(map(bound_by, units[max(0, place - step + 1) : place + step].tolist()), default=0)


BoundKind = Literal["quick", "relaxation", "reached"]
"""
Kind of a lower bound. `quick`: the highest bound of L2 and the dual-feasible functions.
`relaxation`: the linear relaxation over patterns, if its bound is higher. `reached`: a packing has
exactly this number of packs, so both the bound and the packing are optimal.
"""


@attrs.frozen
class Certificate:
    """Lower bound on the number of packs, and the packing that the search found."""

    bound: int
    """Lower bound on the number of packs: no packing has fewer."""

    filling: Filling | None
    """Best packing that the search found; None without a search."""

    patterns: list[Pattern]
    """Patterns of the linear relaxation; empty if the relaxation was not tried."""

    kind: BoundKind


def effort_of_gap(packs: int, bound: int) -> Effort:
    """
    Return the maximum effort of linear programs, in proportion to the gap between *packs* and
    *bound*. A gap below 0.1 % counts as 0.1 %.
    """
    return Effort(_STEPS_OF_A_GAP * max(1, CLOSE * (packs - bound) / bound))


def certify(
    tally: LengthCounts, *, capacity: int, known: int, effort: Effort, report: Callable[[str], None] = lambda _: None
) -> Certificate:
    """
    Return a lower bound on the number of packs, and the packing of the search if there was one.

    Args:
        tally: Lengths from 1 to *capacity*, counts >= 1, at least one length. Lengths in lowest
            terms (`to_lowest_terms`) are fastest.
        capacity: Maximum number of tokens in a pack.
        known: Number of packs of a known packing.
        effort: Limit of all steps after the quick bounds. The search also has the limit `_EFFORTS`,
            and the linear programs have the limit of `effort_of_gap`.
        report: Called with a progress message.
    """
    bound = find_quick_bound(tally, capacity=capacity, known=known)
    if known == bound:
        return Certificate(bound, None, [], "reached")
    if capacity > MAX_CAPACITY or len(tally.sizes) > MAX_SIZES:
        return Certificate(bound, None, [], "quick")
    with effort.lend(_EFFORTS * default_effort(tally).left) as own:
        best = find_filling(tally, capacity=capacity, enough=bound, effort=own)
    if num_packs(best) == bound:
        return Certificate(bound, best, [], "reached")
    enough = min(known, num_packs(best))
    with effort.lend(effort_of_gap(enough, bound).left) as own:
        raised, patterns = tighten_bound(
            tally, capacity=capacity, filling=best, bound=bound, enough=enough, effort=own, report=report
        )
    kind: BoundKind = "reached" if raised == enough else "relaxation" if raised > bound else "quick"
    return Certificate(raised, best, patterns, kind)


def to_lowest_terms(tally: LengthCounts, *, capacity: int) -> tuple[LengthCounts, int]:
    """
    Divide lengths and capacity by the greatest common divisor of the lengths.

    The capacity is rounded down. The possible packings stay the same.
    """
    unit = gcd(*tally.sizes) or 1
    return LengthCounts([size // unit for size in tally.sizes], tally.counts), capacity // unit
