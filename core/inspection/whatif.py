"""Plans with other packing lengths and numbers of ranks, from lengths alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from packplan.core.errors import UserError
from packplan.core.forecast import RunForecast
from packplan.core.inspection.summary import PlanSummary, ScheduleSummary, summarise, summarise_schedule
from packplan.core.lengths import Lengths, as_lengths
from packplan.core.plan import RawPlan
from packplan.core.schedule import EpochSchedule
from packplan.core.work import SampleWorks


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
