"""
Lengths -> raw plan -> aligned plan of one split: measured and planned on rank 0, verified on all
ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from decimal import Decimal
from functools import partial

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.measure import measure
from packplan.core.align import AlignedPlan, align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.config import RunConfig
from packplan.core.errors import DataSetError, EmptyPlanError, RanksDisagreeError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.plan import (
    RawPlan,
    build_raw_plan,
    plan_from_arrays,
    plan_to_arrays,
    refuse_dropped,
    refuse_longer,
)
from packplan.core.policy import PlanPolicy
from packplan.core.ports import Arrays, LengthSource, LengthStore, Lock, PlanStore, RankGroup, ReportProgress
from packplan.core.samples import Table, column, sample_indices
from packplan.core.schedule import ORDER_VERSION, EpochSchedule, ResumeState
from packplan.core.work import SampleWorks

log = logging.getLogger(__name__)

TAKES_LONG = {
    "certified": "looks for the fewest packs, which may take minutes",
    "balanced": "levels the work of packs, which takes about 15 s a million samples",
}
"""Algorithms that say how far they are, and why."""


@attrs.frozen
class PlannedSplit:
    """One split, ready to train or to evaluate."""

    name: str
    table: Table
    raw: RawPlan
    aligned: AlignedPlan
    data_digest: str
    raw_checksum: str = attrs.field(init=False)
    checksum: str = attrs.field(init=False)

    @raw_checksum.default
    def _raw_checksum(self) -> str:
        return plan_checksum(self.raw.packs)

    @checksum.default
    def _checksum(self) -> str:
        return plan_checksum(self.aligned.packs)


@attrs.frozen
class Stores:
    """Where a split's lengths and plans are kept, and who may write there."""

    lengths: LengthStore
    plans: PlanStore
    lock: Lock


@attrs.frozen
class Alignment:
    """How a raw plan is made to fill all ranks; evaluation never drops."""

    dataloader_drop_last: bool = False
    """Drop packs, and padded batches, that do not fill all ranks; else packs repeat."""

    batch_size: int = 1
    """Packs of a rank in one forward pass: 1 when packing; without, every pack is one sample."""

    @classmethod
    def from_config(cls, config: RunConfig, split: str) -> Alignment:
        """Return how a run aligns its split `train` or `eval`."""
        training = config.training
        if split == "eval":
            return cls(batch_size=1 if config.eval_packing else training.per_device_eval_batch_size)
        return cls(training.dataloader_drop_last, 1 if training.packing else training.per_device_train_batch_size)

    def align(self, raw: RawPlan, *, world_size: int) -> AlignedPlan:
        """
        Return what so many ranks consume of a plan; PlanTooShortError if they would get no batch.
        """
        return align_plan(
            raw, world_size=world_size, dataloader_drop_last=self.dataloader_drop_last, batch_size=self.batch_size
        )


@attrs.frozen
class GatheredSplit:
    """What one split of a run is planned from, and where its lengths and plans are kept."""

    name: str
    policy: PlanPolicy
    source: LengthSource
    stores: Stores
    alignment: Alignment = Alignment()

    max_bad_share: Decimal | None = None
    """Largest share of all records that may be bad; None lets the first bad one stop the run."""


@attrs.frozen
class Planner:
    """Plans the splits of a run: rank 0 measures and plans, all ranks take the same plan."""

    group: RankGroup
    """All ranks."""

    deadline: Deadline
    """For rank 0, and for another job that writes the same stores."""

    flush_every: int | None = None
    """Samples between two flushes of what is measured; None adapts to their number."""

    @classmethod
    def from_config(cls, config: RunConfig, group: RankGroup) -> Planner:
        """Return what plans a run; from now on its waits count."""
        training = config.training
        return cls(group, Deadline(training.packing_wait_timeout_s), training.packing_length_cache_persist_every)

    def require_writable(self, splits: Iterable[GatheredSplit]) -> None:
        """Make the places of stores; OutputError, on every rank, if one cannot be written."""

        def make(_: ReportProgress) -> Arrays:
            for split in splits:
                split.stores.lock.require_writable()
            return {}

        self.group.from_rank_zero(make, **self.deadline.wait())

    def plan(self, split: GatheredSplit, *, world_size: int | None = None) -> PlannedSplit:
        """
        Measure and plan a split on rank 0, share it, align it, and compare it between all ranks.

        Args:
            split: What is planned.
            world_size: Ranks to align for, if not those of the group.

        Raises:
            PackplanError: Whatever rank 0 finds wrong, on every rank; RanksDisagreeError if ranks
                hold different plans; DataSetError if the source mixes its samples again in each
                epoch; EmptyPlanError, before anything is stored, if it has none.
        """
        _require_steady(split)
        world_size = world_size or self.group.world_size
        build = partial(self._build, split, world_size)
        arrays = dict(self.group.from_rank_zero(build, **self.deadline.wait()))
        table = arrays.pop("table")
        raw = plan_from_arrays(arrays)
        aligned = split.alignment.align(raw, world_size=world_size)
        name, source = split.name, split.source
        bad = np.flatnonzero(column(table, "bad")).tolist()
        planned = PlannedSplit(name, table, raw, aligned, source.data_digest(len(source), without=bad))
        require_agreement(self.group, f"the {name} plan's checksum", planned.checksum)
        # A rank that sees other data would train on other samples under the same plan.
        require_agreement(self.group, f"what the {name} lengths depend on", source.fingerprint().digest)
        require_agreement(self.group, f"the {name} data", planned.data_digest)
        return planned

    def _build(self, split: GatheredSplit, world_size: int, report: ReportProgress) -> Arrays:
        """Measure and plan on rank 0, and keep both; return what the other ranks need of them."""
        name, policy, stores = split.name, split.policy, split.stores
        with stores.lock.held(**self.deadline.wait(), report=report):
            table = measure(
                name,
                split.source,
                stores.lengths,
                flush_every=self.flush_every,
                report=report,
                max_bad_share=split.max_bad_share,
            )
            stores.lengths.keep_files(split.source.data_files())
            measured = column(table, "length").astype(np.int64)
            refuse_longer(measured, policy)
            report(f"planning {name}")
            key = policy.fingerprint(stores.lengths.digest())
            raw = _plan(name, policy, table, key, stores.plans, report=report)
            refuse_dropped(raw, measured, policy)
            stores.plans.save_aligned(key, split.alignment.align(raw, world_size=world_size))
        return {"table": table, **plan_to_arrays(raw)}


def _require_steady(split: GatheredSplit) -> None:
    """Refuse samples that no static plan can hold: those mixed again each epoch, and none."""
    if split.source.mixes:
        message = (
            f"the {split.name} data are mixed again in each epoch, which a static plan cannot follow: write an "
            "epoch's mix to one JSONL (packplan plan materialise mix.yaml -o mix.jsonl), or set "
            "custom.trainer_variant: rollout"
        )
        raise DataSetError(message)
    if not len(split.source):
        raise EmptyPlanError(0, 0, split.policy.packing_length)


def resume_state_of(planned: PlannedSplit, schedule: EpochSchedule, config: RunConfig) -> ResumeState:
    """
    Return what a checkpoint says of a plan, at the start of a schedule over it.

    Args:
        planned: The plan of `train`.
        schedule: What is trained when.
        config: The run.
    """
    tuner = config.training.tuner_type
    return ResumeState(
        planned.raw_checksum,
        planned.data_digest,
        schedule.seed,
        schedule.shuffle,
        tuner,
        ORDER_VERSION,
        schedule.start,
        schedule.grouping,
    )


def _plan(
    name: str, policy: PlanPolicy, table: Table, key: Fingerprint, plans: PlanStore, *, report: ReportProgress
) -> RawPlan:
    raw = plans.load(key)
    if raw is not None:
        log.info("%s: the stored plan fits and is used again", name)
        return raw
    log.info("%s: planning %s", name, counted(sample_indices(table).size, "sample"))
    takes_long = policy.packing and policy.algorithm in TAKES_LONG
    if takes_long:
        log.info("%s: %s %s", name, policy.algorithm, TAKES_LONG[policy.algorithm])
    started = time.monotonic()
    raw = plan_with_progress(name, policy, table, report=report)
    if takes_long:
        log.info("%s: %s took %.1f s", name, policy.algorithm, time.monotonic() - started)
    plans.save(key, raw)
    return raw


def plan_with_progress(
    name: str,
    policy: PlanPolicy,
    table: Table,
    *,
    quick_bound: bool = False,
    report: ReportProgress = lambda _: None,
) -> RawPlan:
    """
    Plan a split, and show how far it is.

    Args:
        name: Of the split, for messages.
        policy: How it is planned.
        table: Measurements of the records; shape (num_records, num_columns).
        quick_bound: Take a bound that is found at once, where plans are only compared.
        report: Hears how far it is, too.
    """
    look = "{desc}{postfix} [{elapsed}]"
    delay = 0 if policy.algorithm in TAKES_LONG else BRIEF_S
    with progress(desc=f"planning {name}", bar_format=look, miniters=1, delay=delay, leave=not delay) as bar:

        def say(words: str) -> None:
            report(f"planning {name}: {words}")
            bar.set_postfix_str(words, refresh=False)
            bar.update()

        return plan_of(table, policy, quick_bound=quick_bound, report=say)


def plan_of(
    table: Table, policy: PlanPolicy, *, quick_bound: bool = False, report: ReportProgress = lambda _: None
) -> RawPlan:
    """
    Plan the measured records that are not bad; what `core.plan.build_raw_plan` raises.

    Args:
        table: Measurements of the records; shape (num_records, num_columns).
        policy: How they are planned.
        quick_bound: Take a bound that is found at once, where plans are only compared.
        report: Hears how far it is.
    """
    indices = sample_indices(table)
    samples = table[indices]
    lengths, works = column(samples, "length").astype(np.int64), None
    if policy.weighs and policy.work is not None:
        media = {
            name: column(samples, name).astype(np.int64) for name in ("images", "patches", "frames", "video_patches")
        }
        works = SampleWorks.from_lengths(policy.work, lengths, **media).flops
    plan = build_raw_plan(lengths, policy, works=works, quick_bound=quick_bound, report=report)
    return plan.with_indices(indices)


def require_agreement(group: RankGroup, what: str, value: str) -> None:
    """
    Compare a value between all ranks; RanksDisagreeError if one holds another.

    Args:
        group: All ranks.
        what: The value's name, for the error.
        value: This rank's.
    """
    values = group.gather(value)
    if len(set(values)) > 1:
        raise RanksDisagreeError(what, values)
