"""A split with its stores and ranks, over doubles."""

from packplan.app.planning.deadline import Deadline
from packplan.app.planning.split import Alignment, GatheredSplit, PlannedSplit, Stores, plan_split
from packplan.core.policy import PlanPolicy
from tests.fakes import CountedLengthStore, CountedPlanStore, FreeLock, ListSource, ScriptedGroup

LENGTHS = [60, 20, 50, 30, 40, 40, 80, 7]


def policy(**changes) -> PlanPolicy:
    return PlanPolicy(**({"packing_length": 80, "min_fill_ratio": "0.65"} | changes))


class Desk:
    """A source, its stores, and a group: everything that a run has."""

    def __init__(self, source=None, *, lengths=None, plans=None, group=None) -> None:
        self.source = ListSource(LENGTHS) if source is None else source
        self.lengths, self.plans = lengths or CountedLengthStore(), plans or CountedPlanStore()
        self.group = group or ScriptedGroup()
        self.lock = FreeLock()

    def split(self, name="train", *, alignment=None, max_bad_share=None, flush_every=None, **changes) -> GatheredSplit:
        stores = Stores(self.lengths, self.plans, self.lock)
        aligned = alignment or Alignment()
        return GatheredSplit(name, policy(**changes), self.source, stores, aligned, max_bad_share, flush_every)

    def plan(self, deadline=None, **options) -> PlannedSplit:
        return plan_split(self.split(**options), group=self.group, deadline=deadline or Deadline(1))
