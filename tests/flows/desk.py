"""A split with its stores and ranks, over doubles."""

from packplan.app.planning.measure import measure
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.split import PlannedSplit, Split, Stores
from packplan.core.policy import PlanPolicy
from tests.fakes import CountedLengthStore, CountedPlanStore, FreeLock, ListSource, ScriptedGroup

LENGTHS = [60, 20, 50, 30, 40, 40, 80, 7]


def masked(samples) -> ListSource:
    """Return a source of which these samples were truncated to no supervised token."""
    source = ListSource(LENGTHS)
    source.masked = samples
    return source


def policy(**changes) -> PlanPolicy:
    return PlanPolicy(**({"packing_length": 80, "min_fill_ratio": "0.65"} | changes))


class Desk:
    """A source, its stores, and a group: everything that a run has."""

    def __init__(self, source=None, *, lengths=None, plans=None, group=None) -> None:
        self.source = ListSource(LENGTHS) if source is None else source
        self.lengths, self.plans = lengths or CountedLengthStore(), plans or CountedPlanStore()
        self.group = group or ScriptedGroup()
        self.lock = FreeLock()

    def split(self, name="train", *, dataloader_drop_last=False, batch_size=1, **options) -> Split:
        own = {key: options.pop(key) for key in ("max_bad_share", "flush_every", "known") if key in options}
        align_options = {"dataloader_drop_last": dataloader_drop_last, "batch_size": batch_size}
        own["stores"] = Stores(self.lengths, self.plans, self.lock)
        return Split(name, policy(**options), align_options, encoder=self.source, source=self.source, **own)

    def measure(self, **options):
        return measure(self.split(**options), lambda _: None)

    def plan(self, ranks=None, **options) -> PlannedSplit:
        return measure_and_plan(self.split(**options), ranks or Ranks(self.group, timeout_s=1))
