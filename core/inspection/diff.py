"""Differences of two plans: samples that moved, and figures that changed."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.packs import Packs
from packplan.core.plan import RawPlan


@attrs.frozen(eq=False)
class PlanDifference:
    """Samples that two plans treat differently; arrays of sample indices, ascending."""

    moved: IntArray
    """Samples in packs of both plans, but with other samples."""

    lost: IntArray
    """Samples in a pack of the first plan alone."""

    gained: IntArray
    """Samples in a pack of the second plan alone."""

    resized: IntArray
    """Samples of both data sets whose lengths differ."""


def plan_difference(first: RawPlan, second: RawPlan, first_lengths: Lengths, second_lengths: Lengths) -> PlanDifference:
    """
    Compare two plans sample by sample.

    Args:
        first: A plan.
        second: Another one, perhaps of more or fewer samples.
        first_lengths: Tokens of each record of the first plan, 0 for one that is no sample.
        second_lengths: Tokens of each record of the second plan, in the same form.

    >>> from packplan.core.plan import build_raw_plan
    >>> a, b = [60, 20, 70], [60, 20, 50]
    >>> one, other = (build_raw_plan(lengths, packing_length=80) for lengths in (a, b))
    >>> difference = plan_difference(one, other, a, b)
    >>> difference.moved.tolist(), difference.resized.tolist()
    ([0, 1, 2], [2])
    """
    lengths, others = as_lengths(first_lengths, least=0), as_lengths(second_lengths, least=0)
    number = max(lengths.size, others.size)
    before, after = first.packs.owners(number), second.packs.owners(number)
    both = (before >= 0) & (after >= 0)
    stayed = _unchanged(first.packs, second.packs, after)
    common = min(lengths.size, others.size)
    return PlanDifference(
        moved=np.flatnonzero(both & ~stayed[before]),
        lost=np.flatnonzero((before >= 0) & (after < 0)),
        gained=np.flatnonzero((before < 0) & (after >= 0)),
        resized=np.flatnonzero(lengths[:common] != others[:common]),
    )


def _unchanged(packs: Packs, others: Packs, other_pack_of: IntArray) -> NDArray[np.bool_]:
    """
    Return a mask of packs that *others* has too, sample by sample; bool of shape (num_packs,). It
    holds only for packs with a sample in *others*.
    """
    theirs = other_pack_of[packs.indices]
    lowest = np.minimum.reduceat(theirs, packs.offsets[:-1])
    highest = np.maximum.reduceat(theirs, packs.offsets[:-1])
    # All samples of a pack are in one of the others, which has no more samples.
    same: NDArray[np.bool_] = (lowest == highest) & (packs.sizes() == others.sizes()[lowest])
    return same
