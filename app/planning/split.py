"""
One split of a run, `train` or `eval`, from its samples to a verified plan.

A `Split` is filled in order: opened, measured, planned, aligned. `plan_split` is read from top to
bottom; rank 0 alone measures and plans, and `Ranks` gives its result to all.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.planning.measure import KnownTable, measure
from packplan.core.align import AlignedPlan, align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecipe, EpochSamples, drawable, plan_epoch, plan_key
from packplan.core.errors import ConfigError, DataSetError, MismatchError, agree, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.mixes import drawn_faults
from packplan.core.plan import (
    RawPlan,
    no_samples,
    plan_from_arrays,
    plan_to_arrays,
    refuse_dropped,
    refuse_longer,
    refuse_unsupervised,
    unsupervised_samples,
)
from packplan.core.policy import PlanPolicy
from packplan.core.ports import Arrays, LengthSource, Lock, RankGroup, ReportProgress
from packplan.core.samples.tables import DataFile, Table, by_source, column
from packplan.core.schedule import PackStats
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.vision import FLOPs

if TYPE_CHECKING:
    from packplan.app.planning.epochs import PlannedEpochs

log = logging.getLogger(__name__)

TAKES_LONG = {"certified", "balanced"}
"""Algorithms whose progress is shown from their start: seconds to minutes for a million samples."""

_LATE_S = 1e-3
"""
Seconds left after the deadline: not 0, which would be for ever. Results that are ready are still
taken.
"""


class Ranks:
    """Ranks of a run, of which rank 0 builds what all read; one deadline for all their waits."""

    def __init__(self, group: RankGroup, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Begin to wait.

        Args:
            group: All ranks.
            timeout_s: Seconds that the waits for rank 0 and for other jobs' locks may take in all,
                from now; 0 means for ever.
            clock: Gives the seconds now.
        """
        self.group, self._timeout_s, self._clock, self._started_s = group, timeout_s, clock, clock()

    def wait(self) -> dict[str, float]:
        """
        Return the options of a port's wait: the seconds that are left, and those in all, which an
        error names. After the deadline, almost none are left.
        """
        left_s = max(self._timeout_s - (self._clock() - self._started_s), _LATE_S) if self._timeout_s else 0.0
        return {"timeout_s": left_s, "limit_s": self._timeout_s}

    def build(self, lock: Lock, make: Callable[[ReportProgress], Arrays]) -> Arrays:
        """
        Return what rank 0 makes, on every rank; meanwhile no other job writes the same stores.

        Args:
            lock: Lock of the stores.
            make: Function that rank 0 alone runs, perhaps for hours.

        Raises:
            PackplanError: Any error of rank 0, on every rank.
        """

        def locked(report: ReportProgress) -> Arrays:
            with lock.held(**self.wait(), report=report):
                return make(report)

        return self.group.from_rank_zero(locked, **self.wait())

    def require_writable(self, locks: Iterable[Lock]) -> None:
        """Make the places of stores; OutputError, on every rank, if one cannot be written."""

        def make(_: ReportProgress) -> Arrays:
            for lock in locks:
                lock.require_writable()
            return {}

        self.group.from_rank_zero(make, **self.wait())

    def require_same(self, what: str, value: str) -> None:
        """
        Compare a value between all ranks; MismatchError if one holds another.

        Args:
            what: The value's name, for the error.
            value: This rank's.
        """
        values = self.group.gather(value)
        if len(set(values)) > 1:
            rows = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError("ranks_disagree", f"ranks disagree on {what}: {rows}", {"values": values})


@attrs.frozen
class Stores:
    """Stores of a split's lengths and plans, and the lock that guards them."""

    lengths: DiskLengthStore
    plans: DiskPlanStore
    lock: Lock


def alignment(config: RunConfig, split: str) -> dict[str, Any]:
    """
    Return the options by which `align_plan` fills all ranks of a run's split; evaluation drops
    nothing.
    """
    if split == "eval":
        size = 1 if config.eval_packing else config.training.per_device_eval_batch_size
        return {"dataloader_drop_last": False, "batch_size": size}
    return {"dataloader_drop_last": config.training.dataloader_drop_last, "batch_size": config.batch_size}


@attrs.define(eq=False)
class Split:
    """One split of a run; its fields are filled from top to bottom."""

    name: str
    policy: PlanPolicy

    alignment: Mapping[str, Any] = MappingProxyType({"dataloader_drop_last": False, "batch_size": 1})
    """Options of `align_plan`."""

    work: WorkModel = WorkModel.estimated({})  # noqa: RUF009  # frozen
    """Work of the model that is trained, forward and backward."""

    recipe: EpochRecipe | None = None
    """Samples of each epoch, where each has a plan of its own; None plans all samples once."""

    max_bad_share: Decimal | None = None
    """Largest share of all records that may be bad; None lets the first bad one stop the run."""

    flush_every: int | None = None
    """Samples between two flushes of measurements; None adapts to the number of samples."""

    stores: Stores = attrs.field(default=None)

    encoder: Any = None
    """Samples of its data files, which are trained."""

    source: LengthSource = attrs.field(default=None)
    """The same samples, to be measured."""

    known: KnownTable | None = None
    """Table of known lengths; None measures all."""

    table: Table = attrs.field(default=None, repr=False)
    """Measurements of all records; int32, shape (num_records, num_columns)."""

    data_digest: str = ""

    key: Fingerprint = attrs.field(default=None)
    """Inputs of the plan."""

    raw: RawPlan = attrs.field(default=None)
    """The plan; where each epoch has one of its own, that of the first."""

    aligned: AlignedPlan = attrs.field(default=None)

    epochs: PlannedEpochs | None = None
    """Epochs that have plans of their own, which `plan_epochs` fills."""

    _works: SampleWorks | None = attrs.field(default=None, repr=False)

    _stats: PackStats | None = attrs.field(default=None, repr=False)

    @property
    def works(self) -> SampleWorks:
        """Work of each record of a measured split, which balances ranks."""
        if self._works is None:
            self._works = table_works(self.work, self.table)
        return self._works

    def pack_stats(self, epoch: int) -> PackStats:
        """Return the packs of an epoch, with statistics."""
        if self.epochs is not None:
            return self.epochs.stats(epoch)
        if self._stats is None:
            lengths = column(self.table, "length").astype(np.int64)
            self._stats = PackStats.from_plan(self.raw, lengths, packed=self.policy.packing, works=self.works)
        return self._stats

    def plan_key(self, lengths_digest: str) -> Fingerprint:
        """Return the inputs of its plans, or of its only one."""
        return plan_key(self.recipe, self.policy, lengths_digest)

    def align(self, world_size: int) -> AlignedPlan:
        """Return the plan for a number of ranks; ArgumentError if they would get no batch."""
        return align_plan(self.raw, world_size=world_size, **self.alignment)

    @property
    def pack_works(self) -> FLOPs:
        """Work of each pack of the raw plan; shape (num_packs,)."""
        return self.raw.packs.sums(self.works.flops)

    @property
    def unsupervised(self) -> IntArray:
        """Planned samples without a supervised token, ascending."""
        return unsupervised_samples(self.raw, column(self.table, "supervised"))

    @property
    def teaches(self) -> bool:
        """Whether any planned sample has a supervised token."""
        return self.unsupervised.size < self.raw.planned_samples

    @property
    def raw_checksum(self) -> str:
        """Checksum of the raw plan."""
        return plan_checksum(self.raw.packs)

    @property
    def checksum(self) -> str:
        """Checksum of the aligned plan."""
        return plan_checksum(self.aligned.packs)


def plan_split(split: Split, ranks: Ranks, *, world_size: int | None = None) -> Split:
    """
    Measure, plan and align a split, compare it between all ranks, and return it.

    Args:
        split: Samples, policy and stores.
        ranks: All ranks; rank 0 measures and plans.
        world_size: Ranks to align for, if not these.

    Raises:
        PackplanError: Any error of rank 0, on every rank; MismatchError if ranks hold
            different plans; ArgumentError, before anything is stored, if there are no samples.
    """
    name, source = split.name, split.source
    if not len(source):
        raise no_samples()
    world_size = world_size or ranks.group.world_size
    arrays = dict(ranks.build(split.stores.lock, partial(_measure_and_plan, split, world_size)))
    split.table, split.key = arrays.pop("table"), Fingerprint(json.loads(arrays.pop("key").tobytes()))
    split.raw = plan_from_arrays(arrays)
    split.aligned = split.align(world_size)
    split.data_digest = source.data_digest(len(source), without=np.flatnonzero(column(split.table, "bad")).tolist())

    ranks.require_same(f"the {name} plan's checksum", split.checksum)
    # A rank that sees other data would train on other samples under the same plan.
    ranks.require_same(f"what the {name} lengths depend on", source.fingerprint().digest)
    ranks.require_same(f"the {name} data", split.data_digest)
    return split


def _measure_and_plan(split: Split, world_size: int, report: ReportProgress) -> dict[str, Any]:
    """Return the table, and the raw plan with its key."""
    name, policy, stores = split.name, split.policy, split.stores
    files = split.encoder.data_files()
    table = measure(split, report)
    stores.lengths.keep_files(files)
    lengths = column(table, "length").astype(np.int64)
    refuse_longer(lengths, policy)

    report(f"planning {name}")
    key = split.plan_key(stores.lengths.digest())
    raw = stores.plans.load(key)
    if raw is not None:
        log.info("%s: the stored plan fits and is used again", name)
    else:
        samples = samples_of(policy, table, files)
        _require_drawable(split.recipe, policy, samples)
        log.info("%s: planning %s", name, counted(int(np.count_nonzero(samples.lengths)), "sample"))
        raw = plan_samples(name, policy, samples, recipe=split.recipe, report=report)
        stores.plans.save(key, raw)
    refuse_dropped(raw, lengths, policy)
    if name == "train":
        refuse_unsupervised(raw, column(table, "supervised"))
    stores.plans.save_aligned(key, align_plan(raw, world_size=world_size, **split.alignment))
    inputs = np.frombuffer(json.dumps(dict(key.inputs)).encode(), dtype=np.uint8)
    return {"table": table, "key": inputs, **plan_to_arrays(raw)}


def _require_drawable(recipe: EpochRecipe | None, policy: PlanPolicy, samples: EpochSamples) -> None:
    """Refuse mixes that ask for more than their measured sources have; ConfigError by key."""
    if recipe is None or recipe.mixes is None:
        return
    entries = len(recipe.mixes.entries)
    if faults := tuple(drawn_faults(recipe.mixes, drawable(policy, samples), samples.sizes, entries)):
        raise ConfigError("custom.fusion_config", faults)


def samples_of(policy: PlanPolicy, table: Table, files: Sequence[DataFile] = ()) -> EpochSamples:
    """
    Return measured records as they are planned.

    Args:
        policy: Settings of planning.
        table: Measurements of the records; shape (num_records, num_columns).
        files: Files of the data, for mixes of them.
    """
    works = table_works(policy.work, table).flops if policy.weighs and policy.work is not None else None
    lengths = column(table, "length").astype(np.int64)
    if (empty := np.flatnonzero((lengths == 0) & (column(table, "bad") == 0))).size:
        fact = f"{counted(empty.size, 'sample')} of {len(lengths):,} {agree(empty.size, 'has', 'have')} no token"
        message = f"{fact}, the first is sample {empty[0]:,}: remove such records"
        raise DataSetError(message)
    return EpochSamples(lengths=lengths, sizes=tuple(size for _, size in by_source(files)), works=works)


def plan_samples(
    name: str,
    policy: PlanPolicy,
    samples: EpochSamples,
    *,
    recipe: EpochRecipe | None = None,
    quick_bound: bool = False,
    report: ReportProgress = lambda _: None,
) -> RawPlan:
    """
    Build the raw plan of all epochs, or of the first, with a progress line.

    Args:
        name: Name of the split, for messages.
        policy: Settings of planning.
        samples: Measured records.
        recipe: Samples of each epoch; None plans all samples.
        quick_bound: Take a bound that is found at once, where plans are only compared.
        report: Called with each progress message too.
    """
    recipe = recipe or EpochRecipe()
    look = "{desc}{postfix} [{elapsed}]"
    delay = 0 if policy.algorithm in TAKES_LONG else BRIEF_S
    with progress(desc=f"planning {name}", bar_format=look, miniters=1, delay=delay, leave=not delay) as bar:

        def show(words: str) -> None:
            report(f"planning {name}: {words}")
            bar.set_postfix_str(words, refresh=False)
            bar.update()

        return plan_epoch(recipe, policy, samples, 0, quick_bound=quick_bound, report=show).raw


def table_works(model: WorkModel, table: Table) -> SampleWorks:
    """
    Return the work of measured records.

    Args:
        model: Work of a model.
        table: Measurements of the records; shape (num_records, num_columns).
    """
    media = {name: column(table, name).astype(np.int64) for name in ("images", "patches", "frames", "video_patches")}
    return SampleWorks.from_lengths(model, column(table, "length").astype(np.int64), **media)
