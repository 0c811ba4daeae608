"""
Measures and plans a split, and makes a plan for each epoch if needed.

Rank 0 does this for all ranks, and the ranks compare the result.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.epochs import EpochPlanner, PlannedEpochs, lengths_of_records, plan_first_epoch
from packplan.app.planning.measure import measure
from packplan.app.planning.split import PlannedSplit, Split, align_measured
from packplan.core.epochs import EpochPlan, EpochRecipe, EpochRecord, RecordLengths, epoch_selection, schedule_epochs
from packplan.core.errors import ConfigError, MismatchError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.mixes import measured_mixes_faults
from packplan.core.plan import (
    no_samples_error,
    plan_from_arrays,
    plan_to_arrays,
    refuse_dropped,
    refuse_longer,
    require_supervised,
)
from packplan.core.policy import PlanPolicy
from packplan.core.ports import Arrays, Lock, RankGroup, ReportProgress
from packplan.core.samples.tables import column
from packplan.core.schedule import EpochSchedule

log = logging.getLogger(__name__)

_LATE_S = 1e-3
"""
Seconds to wait after the deadline for results that are already available. The value is not 0, which
would mean no limit.
"""


class Ranks:
    """Ranks of a run. Rank 0 builds arrays for all ranks, and all waits share one deadline."""

    def __init__(self, group: RankGroup, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Set the deadline.

        Args:
            group: All ranks.
            timeout_s: Seconds until the deadline of all waits for rank 0 and for other jobs' locks;
                0 means no limit.
            clock: Function that returns the current time in seconds.
        """
        self.group, self._timeout_s, self._clock, self._started_s = group, timeout_s, clock, clock()

    def seconds_left(self) -> float:
        """
        Return the seconds until the deadline: almost 0 after the deadline, and 0 if there is no
        deadline.
        """
        return max(self._timeout_s - (self._clock() - self._started_s), _LATE_S) if self._timeout_s else 0.0

    def build_on_rank_zero(self, lock: Lock, make: Callable[[ReportProgress], Arrays]) -> Arrays:
        """
        Run *make* on rank 0, and return its arrays on every rank; *lock* makes other jobs wait
        meanwhile.

        Args:
            lock: Lock on the folder of the stores.
            make: Function that runs only on rank 0, perhaps for hours.

        Raises:
            PackplanError: Any error of rank 0, raised on every rank.
        """

        def make_locked(report: ReportProgress) -> Arrays:
            with lock.hold(timeout_s=self.seconds_left(), report=report):
                return make(report)

        return self.group.build_on_rank_zero(make_locked, timeout_s=self.seconds_left())

    def require_same(self, what: str, value: str) -> None:
        """
        Compare a value between all ranks; MismatchError if it differs on any rank.

        Args:
            what: Name of the value, for the error.
            value: Value on this rank.
        """
        values = self.group.gather(value)
        if len(set(values)) > 1:
            rows = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError("ranks_disagree", f"ranks disagree on {what}: {rows}", {"values": values})


def measure_and_plan(
    split: Split,
    ranks: Ranks,
    *,
    world_size: int | None = None,
    resumable: frozenset[str] | None = None,
    is_forecast: bool = False,
) -> PlannedSplit:
    """
    Return a split with its lengths and plan, after comparing both between all ranks.

    Args:
        split: Samples, policy and stores.
        ranks: All ranks; rank 0 measures and plans.
        world_size: Number of ranks to align for; if None, the number of *ranks*.
        resumable: Names of the plans in the run's checkpoints; a resumed run stores no other plan.
            None, for a run from the beginning, allows any plan.
        is_forecast: Whether no run has to train on *world_size* ranks. If so, no aligned plan is
            stored for this number, which `plan show` would otherwise take as its default.

    Raises:
        PackplanError: Any error of rank 0, raised on every rank.
        MismatchError: Ranks have different plans or data.
        ArgumentError: There are no samples; raised before anything is stored.
    """
    name, source = split.name, split.source
    if not len(source):
        raise no_samples_error()
    world_size = world_size or ranks.group.world_size
    arrays = dict(
        ranks.build_on_rank_zero(
            split.stores.lock, partial(_build_plan, split, world_size, resumable, is_forecast=is_forecast)
        )
    )
    table, key = arrays.pop("table"), Fingerprint(json.loads(arrays.pop("key").tobytes()))
    data_digest = source.data_digest(len(source), without=np.flatnonzero(column(table, "bad")).tolist())
    planned = split.measured(table, data_digest).planned(key, plan_from_arrays(arrays), world_size=world_size)

    ranks.require_same(f"the {name} plan's checksum", planned.checksum)
    # A rank that sees other data would train on other samples under the same plan.
    ranks.require_same(f"the inputs of the {name} lengths", source.fingerprint().digest)
    ranks.require_same(f"the {name} data", data_digest)
    return planned


def _build_plan(
    split: Split, world_size: int, resumable: frozenset[str] | None, report: ReportProgress, *, is_forecast: bool
) -> dict[str, Any]:
    """Measure, plan and store a split; return its table, raw plan and key as arrays."""
    name, policy, stores = split.name, split.policy, split.stores
    files = split.encoder.data_files()
    table = measure(split, report)
    stores.lengths.save_file_descriptions(files)
    stores.lengths.save_record_heads(split.source.record_heads)
    lengths = column(table, "length").astype(np.int64)
    refuse_longer(lengths, policy)

    report(f"planning {name}")
    key = split.plan_key(stores.lengths.digest())
    raw = stored = stores.plans.load(key)
    if raw is not None:
        log.info("%s: the stored plan is still valid, and is used again", name)
    else:
        samples = lengths_of_records(policy, table, files)
        _require_drawable(split.recipe, policy, samples)
        log.info("%s: planning %s", name, counted(int(np.count_nonzero(samples.lengths)), "sample"))
        raw = plan_first_epoch(name, policy, samples, recipe=split.recipe, report=report)
    is_kept = resumable is None or split.plan_name(key, raw) in resumable
    if stored is None and is_kept:
        stores.plans.save(key, raw)
    refuse_dropped(raw, lengths, policy)
    if name == "train":
        require_supervised(raw, column(table, "supervised"))
    if is_kept and not is_forecast:
        stores.plans.save_aligned(key, align_measured(raw, lengths, world_size=world_size, **split.align_options))
    inputs = np.frombuffer(json.dumps(dict(key.inputs)).encode(), dtype=np.uint8)
    return {"table": table, "key": inputs, **plan_to_arrays(raw)}


def _require_drawable(recipe: EpochRecipe | None, policy: PlanPolicy, samples: RecordLengths) -> None:
    """Raise ConfigError if a mix draws more samples than its sources have."""
    if recipe is None or recipe.mixes is None:
        return
    entries = len(recipe.mixes.entries)
    if faults := tuple(measured_mixes_faults(recipe.mixes, samples.drawable_lengths(policy), samples.sizes, entries)):
        raise ConfigError("custom.fusion_config", faults)


def plan_epochs(
    split: PlannedSplit, recipe: EpochRecipe, schedule: EpochSchedule, ranks: Ranks
) -> tuple[PlannedSplit, EpochSchedule]:
    """
    Plan all epochs on rank 0, store their records, and return the split and the schedule with all
    epochs.

    Args:
        split: The split with the plan of its first epoch.
        recipe: Samples of each epoch.
        schedule: Schedule of the first epoch's plan, from the step at which training starts.
        ranks: All ranks.

    Raises:
        PackplanError: An epoch cannot be planned; raised on every rank.
    """
    samples = lengths_of_records(split.policy, split.table, split.encoder.data_files())
    planner = EpochPlanner(split.policy, recipe, samples)

    def plan_and_store(report: ReportProgress) -> Arrays:
        key, plans = split.plan_key(split.stores.lengths.digest()), split.stores.plans
        known = {one.epoch: one for one in plans.load_epochs(key)}
        whole, records = _record_epochs(planner, split, schedule, known, report)
        plans.save_epochs(key, records, whole)
        text = json.dumps([attrs.asdict(one) for one in records])
        return {"records": np.frombuffer(text.encode(), dtype=np.uint8)}

    rows = json.loads(ranks.build_on_rank_zero(split.stores.lock, plan_and_store)["records"].tobytes())
    epochs = PlannedEpochs(planner, tuple(EpochRecord(**row) for row in rows), split.works)
    by_work = None if schedule.works is None else lambda epoch: epochs.stats(epoch).work
    num_packs = tuple(one.num_packs for one in epochs.records)
    return attrs.evolve(split, epochs=epochs), attrs.evolve(schedule, num_packs=num_packs, works=by_work)


def _record_epochs(
    planner: EpochPlanner,
    split: PlannedSplit,
    schedule: EpochSchedule,
    known: Mapping[int, EpochRecord],
    report: ReportProgress,
) -> tuple[EpochSchedule, tuple[EpochRecord, ...]]:
    """
    Return the schedule over all epochs, and a record of each epoch; epochs without a record are
    planned now.
    """
    ends = None if schedule.max_steps > 0 else math.ceil(schedule.num_train_epochs)
    with progress(total=ends, desc=f"planning {split.name}", unit=" epochs", delay=BRIEF_S) as bar:

        def record_of(epoch: int) -> EpochRecord:
            report(f"planning epoch {epoch} of {split.name}")
            bar.update()
            if epoch in known:
                return known[epoch]
            if epoch:
                return planner.make_record(planner.plan(epoch))
            first = epoch_selection(planner.recipe, planner.policy, planner.samples, 0)
            return planner.make_record(EpochPlan(0, first, split.raw))

        return schedule_epochs(schedule, record_of)
