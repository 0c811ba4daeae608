"""
Epochs with plans of their own: all are planned and counted before the first step, and each is
planned again when it is trained, one ahead, so that two plans at most are in memory.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.split import Ranks, Split, samples_of
from packplan.core.epochs import (
    EpochPlan,
    EpochRecipe,
    EpochRecord,
    EpochSamples,
    plan_epoch,
    record_of,
    select_epoch,
    with_epochs,
)
from packplan.core.errors import MismatchError
from packplan.core.plan import refuse_dropped
from packplan.core.policy import PlanPolicy
from packplan.core.ports import Arrays, ReportProgress
from packplan.core.schedule import EpochSchedule, PackStats
from packplan.core.work.model import SampleWorks

log = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class EpochPlanner:
    """Plans the epochs of a split."""

    policy: PlanPolicy
    recipe: EpochRecipe
    samples: EpochSamples

    @classmethod
    def from_split(cls, split: Split) -> EpochPlanner:
        """Return the planner of a split that has a recipe, and is measured."""
        samples = samples_of(split.policy, split.table, split.encoder.data_files())
        return cls(split.policy, split.recipe or EpochRecipe(), samples)

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch; ArgumentError if it drops too much, or no pack remains."""
        plan = plan_epoch(self.recipe, self.policy, self.samples, epoch, quick_bound=True)
        refuse_dropped(plan.raw, self.samples.lengths, self.policy)
        return plan

    def record(self, plan: EpochPlan) -> EpochRecord:
        """Return what is kept of a plan."""
        return record_of(plan, self.samples)


@attrs.frozen(eq=False)
class PlannedEpochs:
    """
    All epochs of a run: what is kept of each, and the packs of the one that is trained.

    While an epoch is trained, a thread plans the next one. It shares nothing with training, and
    takes part in nothing that ranks do together.
    """

    planner: EpochPlanner

    records: tuple[EpochRecord, ...]
    """Record of each epoch."""

    works: SampleWorks
    """Work of the records."""

    _held: dict[int, Future[PackStats]] = attrs.field(factory=dict, init=False, repr=False)

    def stats(self, epoch: int) -> PackStats:
        """
        Return the statistics of an epoch's packs, and begin to plan the next epoch.

        Raises:
            MismatchError: The plan is not the one that was counted before the first step.
        """
        for old in self._held.keys() - {epoch, epoch + 1}:
            del self._held[old]
        found = self._begun(epoch).result()
        if epoch < self.records[-1].epoch:
            self._begun(epoch + 1)
        return found

    def _begun(self, epoch: int) -> Future[PackStats]:
        if epoch not in self._held:
            self._held[epoch] = future = Future[PackStats]()
            # A run that ends does not wait for a plan that it will not train.
            Thread(target=self._plan, args=(epoch, future), name=f"plan-epoch-{epoch}", daemon=True).start()
        return self._held[epoch]

    def _plan(self, epoch: int, future: Future[PackStats]) -> None:
        try:
            future.set_result(self._checked(epoch))
        except Exception as error:  # noqa: BLE001  # raised where the plan is asked for
            future.set_exception(error)

    def _checked(self, epoch: int) -> PackStats:
        planner, counted_before = self.planner, self.records[epoch]
        plan = planner.plan(epoch)
        if (found := planner.record(plan)) != counted_before:
            fact = (
                f"the plan of epoch {epoch} has the checksum {found.checksum}, but before the first step it had "
                f"{counted_before.checksum}"
            )
            raise MismatchError("ranks_disagree", fact, {"epoch": epoch})
        return PackStats.from_plan(plan.raw, planner.samples.lengths, packed=planner.policy.packing, works=self.works)


def plan_epochs(split: Split, schedule: EpochSchedule, ranks: Ranks) -> EpochSchedule:
    """
    Plan and count all epochs on rank 0, store a record of each, and return the schedule over them;
    the same schedule where all epochs have one plan.

    Args:
        split: The split, whose first epoch is planned.
        schedule: Settings of the schedule, from where training starts.
        ranks: All ranks.

    Raises:
        PackplanError: An epoch cannot be planned; on every rank.
    """
    if split.recipe is None:
        return schedule
    planner = EpochPlanner.from_split(split)

    def build(report: ReportProgress) -> Arrays:
        key, plans = split.plan_key(split.stores.lengths.digest()), split.stores.plans
        known = {one.epoch: one for one in plans.load_epochs(key)}
        whole, records = _counted(planner, split, schedule, known, report)
        plans.save_epochs(key, records, whole)
        told = json.dumps([attrs.asdict(one) for one in records])
        return {"records": np.frombuffer(told.encode(), dtype=np.uint8)}

    rows = json.loads(ranks.build(split.stores.lock, build)["records"].tobytes())
    split.epochs = epochs = PlannedEpochs(planner, tuple(EpochRecord(**row) for row in rows), split.works)
    by_work = None if schedule.works is None else lambda epoch: epochs.stats(epoch).work
    return attrs.evolve(schedule, num_packs=tuple(one.num_packs for one in epochs.records), works=by_work)


def _counted(
    planner: EpochPlanner,
    split: Split,
    schedule: EpochSchedule,
    known: Mapping[int, EpochRecord],
    report: ReportProgress,
) -> tuple[EpochSchedule, tuple[EpochRecord, ...]]:
    """Return the schedule over all epochs, and the record of each, known or planned now."""
    ends = None if schedule.max_steps > 0 else math.ceil(schedule.num_train_epochs)
    with progress(total=ends, desc=f"planning {split.name}", unit=" epochs", delay=BRIEF_S) as bar:

        def record(epoch: int) -> EpochRecord:
            report(f"planning epoch {epoch} of {split.name}")
            bar.update()
            if epoch in known:
                return known[epoch]
            if epoch:
                return planner.record(planner.plan(epoch))
            first = select_epoch(planner.recipe, planner.policy, planner.samples, 0)
            return planner.record(EpochPlan(0, first, split.raw))

        return with_epochs(schedule, record, alike_from=planner.recipe.alike_from)
