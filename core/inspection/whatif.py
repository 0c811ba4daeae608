"""Plans with other packing lengths and numbers of ranks, from lengths alone."""

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
    """Figures of one packing length on one number of ranks."""

    packing_length: int
    world_size: int

    plan: PlanSummary | None = None
    """Figures with a quick lower bound; None without a plan."""

    schedule: ScheduleSummary | None = None

    problem: str | None = None
    """Reason why there are no figures."""

    @property
    def score(self) -> float:
        """
        Coverage x fill / imbalance: share of the ranks' room and time that is used for the data; 0
        without a plan.

        Coverage is the share of tokens planned within the packing length, less the share of packs
        that are dropped since they do not fill the ranks. Long samples exceed the packing length
        and do not count. Fill is the planned tokens over the room of all packs that ranks run. A
        repeated pack counts as empty, and a pack of a long sample as full. Imbalance is the work of
        the busiest rank over the mean rank.
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
    Yield every combination when it is planned.

    Args:
        lengths: Tokens of each record, 0 for one that is no sample.
        packing_lengths: Tokens a pack may hold.
        world_sizes: Data-parallel learners.
        plan: Packing length -> plan of the samples; may raise UserError.
        schedule: Plan and world size -> schedule; may raise UserError.
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
        for world_size in world_sizes:
            try:
                over = summarise_schedule(planned, array, schedule(planned, world_size), works=works)
            except UserError as error:
                yield Alternative(packing_length, world_size, problem=explain(error))
            else:
                yield Alternative(packing_length, world_size, summary, over)


def best_of(alternatives: Iterable[Alternative]) -> dict[int, Alternative]:
    """
    Return, for each number of ranks, the alternative of the highest score above 0. Of equal ones,
    the shortest packs win.
    """
    best: dict[int, Alternative] = {}
    for one in sorted(alternatives, key=lambda one: (-one.score, one.packing_length)):
        if one.score:
            best.setdefault(one.world_size, one)
    return best
