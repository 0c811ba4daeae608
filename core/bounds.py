"""Lower bounds on the number of packs: how far from the best a plan can be."""

from __future__ import annotations

from core.any_fit import fit_decreasing
from core.lengths import Lengths, lengths_up_to, positive
from core.patterns.certificate import certify, reduced
from core.patterns.quick_bounds import quick_bound
from core.runs import Runs


def lower_bound(lengths: Lengths, *, capacity: int, known: int | None = None, quick: bool = False) -> int:
    """
    Return a number of packs that no packing can go below: the strongest bound that is known.

    Martello and Toth's L2 and dual-feasible functions; where no quick packing shows that they are tight, the linear
    relaxation over patterns, which takes some seconds for thousands of distinct lengths, and minutes for ten thousand. Where the
    capacity (over the greatest common divisor of the lengths) is beyond 131,072 or the distinct lengths beyond 20,000,
    the relaxation is left out.

    Args:
        lengths: Tokens of each sample, each from 1 to *capacity*.

        capacity: Tokens a pack may hold, >= 1.

        known: Packs of a packing that is known; a bound of so many ends the search.

        quick: Leave the relaxation out in any case, which takes a fraction of a second.

    Raises:
        InvalidLengthError: A length is not a whole number from 1 to *capacity*.

    >>> lower_bound([60, 60, 50], capacity=100)
    3
    """
    capacity = positive("capacity", capacity)
    runs = Runs.of(lengths_up_to(lengths, capacity=capacity))
    if not runs.sizes:
        return 0
    runs, capacity = reduced(runs, capacity=capacity)
    if quick:
        return quick_bound(runs, capacity=capacity)
    best_fit = fit_decreasing(runs, capacity=capacity, fullest=True).num_bins
    return certify(runs, capacity=capacity, known=min(best_fit, known or best_fit)).bound
