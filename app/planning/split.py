"""
One split from its samples to a verified plan: `plan_split` is read from top to bottom.

Rank 0 measures the samples, or takes their stored lengths. It builds the raw plan, or takes the
stored one. Every rank then aligns that plan, and all compare what they have by checksums.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.known_lengths import KnownTable
from packplan.app.planning.measure import measure
from packplan.core.align import AlignedPlan, align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.config import RunConfig
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
from packplan.core.ports import Arrays, LengthSource, LengthStore, Lock, PlanStore, RankGroup, ReportProgress
from packplan.core.samples import DataFile, Table, by_source, column
from packplan.core.work import SampleWorks, WorkModel

log = logging.getLogger(__name__)

TAKES_LONG = {
    "certified": "looks for the fewest packs, which may take minutes",
    "balanced": "levels the work of packs, which takes about 15 s a million samples",
}
"""Algorithms whose start and duration are logged, and the reason."""


@attrs.frozen
class PlannedSplit:
    """One split, ready to train or to evaluate."""

    name: str
    table: Table
    raw: RawPlan
    aligned: AlignedPlan
    data_digest: str

    key: Fingerprint | None = None
    """Inputs of the plan; None where a stored plan is looked at."""

    has_epochs: bool = False
    """Whether each epoch has a plan of its own; `raw` is the first."""

    unsupervised: IntArray = attrs.field(init=False, eq=False)
    """Planned samples without a supervised token, ascending."""

    raw_checksum: str = attrs.field(init=False)
    checksum: str = attrs.field(init=False)

    @unsupervised.default
    def _unsupervised(self) -> IntArray:
        return unsupervised_samples(self.raw, column(self.table, "supervised"))

    @property
    def teaches(self) -> bool:
        """Whether any planned sample has a supervised token."""
        return self.unsupervised.size < self.raw.planned_samples

    @raw_checksum.default
    def _raw_checksum(self) -> str:
        return plan_checksum(self.raw.packs)

    @checksum.default
    def _checksum(self) -> str:
        return plan_checksum(self.aligned.packs)


@attrs.frozen
class Stores:
    """Stores of a split's lengths and plans, and the lock that guards them."""

    lengths: LengthStore
    plans: PlanStore
    lock: Lock


@attrs.frozen
class Alignment:
    """Settings by which a raw plan fills all ranks; evaluation never drops."""

    dataloader_drop_last: bool = False
    """Drop packs, and padded batches, that do not fill all ranks; else packs repeat."""

    batch_size: int = 1
    """Packs of a rank in one forward pass: 1 when packing; without, every pack is one sample."""

    @classmethod
    def from_config(cls, config: RunConfig, split: str) -> Alignment:
        """Return the alignment of a run's split `train` or `eval`."""
        training = config.training
        if split == "eval":
            return cls(batch_size=1 if config.eval_packing else training.per_device_eval_batch_size)
        return cls(training.dataloader_drop_last, config.batch_size)

    def align(self, raw: RawPlan, *, world_size: int) -> AlignedPlan:
        """
        Align a plan for a number of ranks; PlanError if they would get no batch.
        """
        return align_plan(
            raw, world_size=world_size, dataloader_drop_last=self.dataloader_drop_last, batch_size=self.batch_size
        )


@attrs.frozen
class GatheredSplit:
    """Samples, policy and stores of one split, before it is planned."""

    name: str
    policy: PlanPolicy
    source: LengthSource
    stores: Stores
    alignment: Alignment = Alignment()

    max_bad_share: Decimal | None = None
    """Largest share of all records that may be bad; None lets the first bad one stop the run."""

    flush_every: int | None = None
    """Samples between two flushes of measurements; None adapts to the number of samples."""

    recipe: EpochRecipe | None = None
    """Samples of each epoch, where each has a plan of its own; None plans all samples once."""

    known: KnownTable | None = None
    """Table of known lengths; None measures all."""

    def key(self, lengths_digest: str) -> Fingerprint:
        """Return the inputs of its plans, or of its only one."""
        return plan_key(self.recipe, self.policy, lengths_digest)


def require_writable(splits: Iterable[GatheredSplit], *, group: RankGroup, deadline: Deadline) -> None:
    """
    Make the places of stores; OutputError, on every rank, if one cannot be written.

    Args:
        splits: Splits whose lengths and plans are to be stored.
        group: All ranks.
        deadline: Limit of the wait for rank 0.
    """

    def make(_: ReportProgress) -> Arrays:
        for split in splits:
            split.stores.lock.require_writable()
        return {}

    group.from_rank_zero(make, **deadline.wait())


def plan_split(
    split: GatheredSplit, *, group: RankGroup, deadline: Deadline, world_size: int | None = None
) -> PlannedSplit:
    """
    Measure and plan a split on rank 0, share it, align it, and compare it between all ranks.

    Args:
        split: Samples, policy and stores.
        group: All ranks.
        deadline: Limit of the waits for rank 0, and for another job that writes the same stores.
        world_size: Ranks to align for, if not those of the group.

    Raises:
        PackplanError: Any error of rank 0, on every rank; MismatchError if ranks hold
            different plans; PlanError, before anything is stored, if there are no samples.
    """
    name, source = split.name, split.source
    if not len(source):
        raise no_samples()
    ranks = world_size or group.world_size
    arrays = dict(group.from_rank_zero(partial(_measure_and_plan, split, ranks, deadline), **deadline.wait()))
    table, key = arrays.pop("table"), Fingerprint(json.loads(arrays.pop("key").tobytes()))
    raw = plan_from_arrays(arrays)
    aligned = split.alignment.align(raw, world_size=ranks)
    bad = np.flatnonzero(column(table, "bad")).tolist()
    data_digest = source.data_digest(len(source), without=bad)
    planned = PlannedSplit(name, table, raw, aligned, data_digest, key, split.recipe is not None)

    require_agreement(group, f"the {name} plan's checksum", planned.checksum)
    # A rank that sees other data would train on other samples under the same plan.
    require_agreement(group, f"what the {name} lengths depend on", source.fingerprint().digest)
    require_agreement(group, f"the {name} data", planned.data_digest)
    return planned


def _measure_and_plan(split: GatheredSplit, world_size: int, deadline: Deadline, report: ReportProgress) -> Arrays:
    """Return the table and the raw plan; rank 0 alone runs this."""
    name, policy, source, stores = split.name, split.policy, split.source, split.stores
    with stores.lock.held(**deadline.wait(), report=report):
        table = measure(
            name,
            source,
            stores.lengths,
            flush_every=split.flush_every,
            report=report,
            max_bad_share=split.max_bad_share,
            known=split.known,
        )
        stores.lengths.keep_files(source.data_files())
        lengths = column(table, "length").astype(np.int64)
        refuse_longer(lengths, policy)
        report(f"planning {name}")
        key = split.key(stores.lengths.digest())
        raw = stores.plans.load(key)
        if raw is not None:
            log.info("%s: the stored plan fits and is used again", name)
        else:
            samples = samples_of(policy, table, source.data_files())
            _require_drawable(split.recipe, policy, samples)
            log.info("%s: planning %s", name, counted(int(np.count_nonzero(samples.lengths)), "sample"))
            with _duration_logged(name, policy):
                raw = plan_samples(name, policy, samples, recipe=split.recipe, report=report)
            stores.plans.save(key, raw)
        refuse_dropped(raw, lengths, policy)
        if name == "train":
            refuse_unsupervised(raw, column(table, "supervised"))
        stores.plans.save_aligned(key, split.alignment.align(raw, world_size=world_size))
    inputs = np.frombuffer(json.dumps(dict(key.inputs)).encode(), dtype=np.uint8)
    return {"table": table, "key": inputs, **plan_to_arrays(raw)}


def _require_drawable(recipe: EpochRecipe | None, policy: PlanPolicy, samples: EpochSamples) -> None:
    """Refuse mixes that ask for more than their measured sources have; ConfigError by key."""
    if recipe is None or recipe.mixes is None:
        return
    entries = len(recipe.mixes.entries)
    if faults := tuple(drawn_faults(recipe.mixes, drawable(policy, samples), samples.sizes, entries)):
        raise ConfigError("custom.fusion_config", faults)


@contextmanager
def _duration_logged(name: str, policy: PlanPolicy) -> Iterator[None]:
    """Log the start of an algorithm that takes long, and its seconds."""
    takes_long = policy.packing and policy.algorithm in TAKES_LONG
    if takes_long:
        log.info("%s: %s %s", name, policy.algorithm, TAKES_LONG[policy.algorithm])
    started = time.monotonic()
    yield
    if takes_long:
        log.info("%s: %s took %.1f s", name, policy.algorithm, time.monotonic() - started)


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
    epoch: int | None = None,
    quick_bound: bool = False,
    report: ReportProgress = lambda _: None,
) -> RawPlan:
    """
    Build the raw plan of an epoch, or that of all, with a progress line.

    Args:
        name: Name of the split, for messages.
        policy: Settings of planning.
        samples: Measured records.
        recipe: Samples of each epoch; None plans all samples.
        epoch: The epoch; None takes the first one.
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

        return plan_epoch(recipe, policy, samples, epoch or 0, quick_bound=quick_bound, report=show).raw


def table_works(model: WorkModel, table: Table) -> SampleWorks:
    """
    Return the work of measured records.

    Args:
        model: Work of a model.
        table: Measurements of the records; shape (num_records, num_columns).
    """
    media = {name: column(table, name).astype(np.int64) for name in ("images", "patches", "frames", "video_patches")}
    return SampleWorks.from_lengths(model, column(table, "length").astype(np.int64), **media)


def require_agreement(group: RankGroup, what: str, value: str) -> None:
    """
    Compare a value between all ranks; MismatchError if one holds another.

    Args:
        group: All ranks.
        what: The value's name, for the error.
        value: This rank's.
    """
    values = group.gather(value)
    if len(set(values)) > 1:
        rows = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise MismatchError("ranks_disagree", f"ranks disagree on {what}: {rows}", {"values": values})
