"""
What a plan would be with another packing length, on other numbers of ranks, from lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from packplan.core.errors import UserError
from packplan.core.inspection.summary import PlanSummary, ScheduleSummary, summarise, summarise_schedule
from packplan.core.lengths import Lengths, as_lengths
from packplan.core.plan import RawPlan
from packplan.core.schedule import EpochSchedule
from packplan.core.work import SampleWorks


@attrs.frozen
class Alternative:
    """One packing length on one number of ranks."""

    packing_length: int
    world_size: int

    plan: PlanSummary | None = None
    """Summary with a bound that is found at once; None if there is no such plan."""

    schedule: ScheduleSummary | None = None

    problem: str | None = None
    """Why there are no figures."""

    @property
    def score(self) -> float:
        """
        Coverage x fill / imbalance: what share of the ranks' room and time goes into the data, 0
        without a plan.

        Coverage is the tokens planned within the packing length over all tokens, less the share of
        packs that do not fill the ranks and are dropped: a long sample breaks the length that is
        asked about. Fill is the planned tokens over what the packs that all ranks run can hold: a
        pack that repeats counts as empty, one of a long sample holds just that. Imbalance is the
        busiest rank's work over the mean rank's.
        """
        if self.plan is None or self.schedule is None:
            return 0.0
        plan, schedule = self.plan, self.schedule
        within = (plan.planned_tokens - plan.long_tokens) / plan.num_tokens
        coverage = within * (1 - schedule.unaligned_packs / plan.num_packs)
        room = (plan.num_packs + schedule.repeated_packs - plan.long_samples) * plan.packing_length + plan.long_tokens
        return coverage * plan.planned_tokens / room / schedule.work_imbalance


def what_if(
    lengths: Lengths,
    *,
    packing_lengths: Sequence[int],
    world_sizes: Sequence[int],
    plan: Callable[[int], RawPlan],
    schedule: Callable[[RawPlan, int], EpochSchedule],
    works: SampleWorks | None = None,
    explain: Callable[[UserError], str] = str,
) -> Iterator[Alternative]:
    """
    Yield every combination, as it is planned.

    Args:
        lengths: Tokens of each record, 0 for one that is no sample.
        packing_lengths: Tokens a pack may hold.
        world_sizes: Data-parallel learners.
        plan: Plans the samples for a packing length; may raise UserError.
        schedule: Gives the schedule over a plan at a world size; may raise UserError.
        works: What samples cost; None counts the squares of their lengths.
        explain: Makes the text of a problem.
    """
    array = as_lengths(lengths, least=0)
    for packing_length in packing_lengths:
        try:
            planned = plan(packing_length)
        except UserError as error:
            yield from (Alternative(packing_length, world_size, problem=explain(error)) for world_size in world_sizes)
            continue
        summary = summarise(planned, array)
        for world_size in world_sizes:
            try:
                over = summarise_schedule(planned, array, schedule(planned, world_size), works=works)
            except UserError as error:
                yield Alternative(packing_length, world_size, problem=explain(error))
            else:
                yield Alternative(packing_length, world_size, summary, over)


def best_of(alternatives: Iterable[Alternative]) -> dict[int, Alternative]:
    """
    Return the alternative of the highest score above 0 for each number of ranks; of equal ones, the
    shortest packs.
    """
    best: dict[int, Alternative] = {}
    for one in sorted(alternatives, key=lambda one: (-one.score, one.packing_length)):
        if one.score:
            best.setdefault(one.world_size, one)
    return best
