"""
Plans beside each other: what differs, which pairs meet again, what other lengths and ranks give.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import UserError
from packplan.core.forecast import RunForecast
from packplan.core.inspection.summary import PlanSummary, ScheduleSummary, summarise, summarise_schedule
from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.packs import Packs
from packplan.core.plan import RawPlan
from packplan.core.schedule import EpochSchedule
from packplan.core.work import SampleWorks


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
    stayed = _find_unchanged(first.packs, second.packs, after)
    common = min(lengths.size, others.size)
    return PlanDifference(
        moved=np.flatnonzero(both & ~stayed[before]),
        lost=np.flatnonzero((before >= 0) & (after < 0)),
        gained=np.flatnonzero((before < 0) & (after >= 0)),
        resized=np.flatnonzero(lengths[:common] != others[:common]),
    )


def _find_unchanged(packs: Packs, others: Packs, other_pack_of: IntArray) -> NDArray[np.bool_]:
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


@attrs.frozen
class Meetings:
    """
    Pairs of samples that share a pack in two plans.

    Samples that only one plan has are left out. One that occurs more than once in a plan counts
    once, in its first pack.
    """

    pairs: int
    """Pairs that share a pack in the first plan."""

    pairs_again: int
    """Pairs that share a pack in both plans."""

    expected: float
    """
    Expected number of pairs in both, if the second plan grouped the same samples at random into
    packs of its sizes.
    """


def meetings(first: Packs, second: Packs) -> Meetings:
    """
    Count the pairs of samples that share a pack in both plans.

    >>> meetings(Packs.from_lists([[0, 1, 2], [3]]), Packs.from_lists([[0, 1], [2, 3]]))
    Meetings(pairs=3, pairs_again=1, expected=1.0)
    """
    num_records = 1 + int(max(packs.indices.max(initial=-1) for packs in (first, second)))
    packs_of = np.stack([_first_owners(packs, num_records) for packs in (first, second)])
    one, other = packs_of[:, (packs_of >= 0).all(axis=0)]
    pairs, pairs_of_second = _num_pairs(one), _num_pairs(other)
    possible = one.size * (one.size - 1) // 2
    return Meetings(
        pairs=pairs,
        pairs_again=_num_pairs(one * len(second) + other),
        expected=pairs * pairs_of_second / possible if possible else 0.0,
    )


def _first_owners(packs: Packs, num_records: int) -> IntArray:
    """Return the first pack of each record, -1 for none; shape (num_records,)."""
    owners = np.full(num_records, -1, dtype=np.int64)
    # Assigned back to front: the first of several packs is written last, and stays.
    owners[packs.indices[::-1]] = np.repeat(np.arange(len(packs)), packs.sizes())[::-1]
    return owners


def _num_pairs(labels: IntArray) -> int:
    """Return the number of pairs of equal labels."""
    counts = np.unique(labels, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


@attrs.frozen
class Alternative:
    """Figures of one packing length on one number of ranks."""

    packing_length: int
    world_size: int

    plan: PlanSummary | None = None
    """Figures with a quick lower bound; None without a plan."""

    schedule: ScheduleSummary | None = None

    forecast: RunForecast | None = None
    """Predicted time of the run; None without a plan, and where nothing was measured."""

    peak: int | None = None
    """Predicted peak of memory of a step on a rank in bytes; None if it is not known."""

    problem: str | None = None
    """Reason why there are no figures."""


def what_if(
    lengths: Lengths,
    *,
    packing_lengths: Sequence[int],
    world_sizes: Sequence[int],
    plan: Callable[[int], RawPlan],
    schedule: Callable[[RawPlan, int], EpochSchedule],
    forecast: Callable[[RawPlan, EpochSchedule], RunForecast | None] = lambda *_: None,
    peak: Callable[[int, int], int | None] = lambda *_: None,
    works: SampleWorks | None = None,
    explain: Callable[[UserError], str] = str,
) -> Iterator[Alternative]:
    """
    Yield every combination when it is planned.

    Args:
        lengths: Tokens of each record, 0 for one that is no sample.
        packing_lengths: Tokens a pack may hold.
        world_sizes: Data-parallel learners.
        plan: Packing length -> plan of the samples; may raise UserError.
        schedule: Plan and world size -> schedule; may raise UserError.
        forecast: Plan and schedule -> predicted time, or None.
        peak: Tokens of the longest pack and world size -> predicted peak of memory of a rank in
            bytes, or None.
        works: Work of samples; None counts the squares of their lengths.
        explain: Error -> text of a problem.
    """
    array = as_lengths(lengths, least=0)
    for packing_length in packing_lengths:
        try:
            planned = plan(packing_length)
        except UserError as error:
            yield from (Alternative(packing_length, world_size, problem=explain(error)) for world_size in world_sizes)
            continue
        summary = summarise(planned, array)
        most = max(packing_length, summary.longest_pack)
        for world_size in world_sizes:
            try:
                trained = schedule(planned, world_size)
                over = summarise_schedule(planned, array, trained, works=works)
            except UserError as error:
                yield Alternative(packing_length, world_size, problem=explain(error))
            else:
                at_peak = peak(most, world_size)
                yield Alternative(packing_length, world_size, summary, over, forecast(planned, trained), at_peak)


def best_of(alternatives: Iterable[Alternative]) -> dict[int, Alternative]:
    """
    Return, for each number of ranks, the alternative that trains the most planned tokens in a
    second. Of equal ones, the shortest packs win.
    """
    # Sums in another order differ in their last digits.
    planned = [
        (float(f"{one.forecast.tokens_per_second:.9g}"), one) for one in alternatives if one.forecast is not None
    ]
    best: dict[int, Alternative] = {}
    for _, one in sorted(planned, key=lambda pair: (-pair[0], pair[1].packing_length)):
        best.setdefault(one.world_size, one)
    return best
