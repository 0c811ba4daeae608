"""Epochs that are planned separately: the samples, the plan and the stored record of each epoch."""

import hashlib
import json
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.align import require_a_batch
from packplan.core.errors import ArgumentError
from packplan.core.fingerprint import Fingerprint, Value
from packplan.core.lengths import IntArray
from packplan.core.mixes import Mixes, select_records
from packplan.core.packs import plan_checksum
from packplan.core.plan import RawPlan, build_raw_plan
from packplan.core.policy import PlanPolicy
from packplan.core.schedule import EpochSchedule, Progress

MOST_EPOCHS = 10_000
"""
Maximum number of planned epochs. With this limit, a far too large number of steps is refused early.
"""


@attrs.frozen(kw_only=True, eq=False)
class EpochRecipe:
    """Mixes and seed, which decide the samples of each epoch."""

    mixes: Mixes | None = None
    """Mixes from which the epochs draw their samples. If None, every epoch has all samples."""

    seed: int = 0
    """Seed of the random draws, from 0."""

    def fingerprint_inputs(self) -> dict[str, Value]:
        """Return the mixes and the seed as inputs of a plan's fingerprint."""
        mixes = None if self.mixes is None else _mixes_json(self.mixes)
        seed = None if mixes is None else self.seed
        return {"mix": mixes, "mix_seed": seed}


def _mixes_json(mixes: Mixes) -> str:
    """
    Return mixes as JSON, with the index of each file instead of its path, because paths may change.
    """
    entries = [attrs.asdict(mix, filter=lambda _, value: value not in {None, False}) for mix in mixes.entries]
    for entry in entries:
        for source in entry["sources"]:
            source["jsonl"] = mixes.files.index(source["jsonl"])
    return json.dumps(entries, default=str, sort_keys=True)


@attrs.frozen(kw_only=True, eq=False)
class RecordLengths:
    """Lengths and work of all records; each epoch selects the values of its samples."""

    lengths: IntArray
    """
    Number of tokens of each record, 0 for a record that is not a sample; shape (num_records,).
    """

    sizes: tuple[int, ...] = ()
    """
    Number of records in each source of the data, in order. Mixes draw from sources, and an
    `EpochRecord` counts samples and tokens by source.
    """

    works: NDArray[np.float64] | None = None
    """Work of each record, for algorithms that pack by work; shape (num_records,)."""

    images: IntArray | None = None
    """
    Number of images of each record, if the policy limits the images in a pack; shape
    (num_records,).
    """

    indices: IntArray = attrs.field(init=False)
    """Indices of the records that are samples, ascending; shape (num_samples,)."""

    @indices.default
    def _indices(self) -> IntArray:
        return np.flatnonzero(self.lengths)

    def drawable_lengths(self, policy: PlanPolicy) -> IntArray:
        """
        Return the length of each record, or 0 if a mix may not draw it; shape (num_records,).

        A mix never draws bad records, and never draws long samples that the policy skips.
        """
        is_kept = policy.allow_single_long or self.lengths < policy.packing_length
        return np.where(is_kept, self.lengths, 0)


def _as_ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class EpochRecord:
    """Stored figures of one epoch's plan, and its checksum."""

    epoch: int

    selection: str
    """SHA-256 of the record indices that the epoch draws."""

    checksum: str
    """Checksum of the packs of the epoch's raw plan."""

    num_samples: int
    """
    Number of samples that the epoch draws, including skipped samples and samples of dropped packs.
    """

    num_tokens: int
    """Number of tokens of the samples that the epoch draws."""

    num_packs: int
    """Number of packs of the epoch's raw plan."""

    planned_samples: int
    """Number of samples in the packs of the epoch's raw plan."""

    planned_tokens: int
    """Number of tokens in the packs of the epoch's raw plan."""

    fill: float
    """Mean fill of the packs of the epoch's raw plan. The pack of a long sample counts as full."""

    source_samples: tuple[int, ...] = attrs.field(default=(), converter=_as_ints)
    """Number of samples drawn from each source of the data; empty if there is only one source."""

    source_tokens: tuple[int, ...] = attrs.field(default=(), converter=_as_ints)
    """Number of tokens drawn from each source of the data; empty if there is only one source."""


def epoch_selection(recipe: EpochRecipe, policy: PlanPolicy, records: RecordLengths, epoch: int) -> IntArray:
    """
    Return the indices of the records that an epoch draws, ascending; int64.

    An index is repeated if the record is drawn more than once.

    A mix never draws long samples that the policy skips. If such samples were drawn and then
    skipped, the shares of the mix's sources would change.

    Args:
        recipe: Mixes and seed that decide the samples of each epoch.
        policy: Settings that decide the plan.
        records: Lengths and work of all records.
        epoch: Number of the epoch, from 0.
    """
    if recipe.mixes is None:
        return records.indices
    tokens = records.drawable_lengths(policy)
    return select_records(recipe.mixes, tokens, records.sizes, seed=recipe.seed, epoch=epoch)


@attrs.frozen(eq=False)
class EpochPlan:
    """Raw plan of one epoch, and the samples that it packs."""

    epoch: int

    selection: IntArray
    """
    Record indices of the epoch's samples, ascending. An index that is drawn twice appears twice.
    """

    raw: RawPlan
    """Raw plan whose sample indices are record indices."""


def plan_epoch(
    recipe: EpochRecipe,
    policy: PlanPolicy,
    records: RecordLengths,
    epoch: int,
    *,
    quick_bound: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> EpochPlan:
    """
    Draw the samples of an epoch and plan their packs.

    Args:
        recipe: Mixes and seed that decide the samples of each epoch.
        policy: Settings that decide the plan.
        records: Lengths and work of all records.
        epoch: Number of the epoch, from 0.
        quick_bound: Whether to compute the lower bound without a search.
        report: Called with a progress message.

    Raises:
        ArgumentError: No pack is left.
    """
    chosen = epoch_selection(recipe, policy, records, epoch)
    is_all = recipe.mixes is None and chosen.size == records.lengths.size
    taken = slice(None) if is_all else chosen
    known: dict[str, Any] = {"works": records.works, "images": records.images}
    facts = {name: values[taken] for name, values in known.items() if values is not None}
    plan = build_raw_plan(records.lengths[taken], policy, epoch=epoch, quick_bound=quick_bound, report=report, **facts)
    return EpochPlan(epoch, chosen, plan if is_all else plan.with_indices(chosen))


def record_epoch(planned: EpochPlan, records: RecordLengths) -> EpochRecord:
    """
    Return the figures and the checksum of an epoch's plan, in the form that is stored.

    Args:
        planned: Plan of the epoch.
        records: Lengths and work of all records.
    """
    plan, drawn = planned.raw, planned.selection
    drawn_samples: list[int] = []
    drawn_tokens: list[int] = []
    if len(records.sizes) > 1:
        ends = np.searchsorted(drawn, np.cumsum([0, *records.sizes]))
        parts = [records.lengths[drawn[start:end]] for start, end in pairwise(ends.tolist())]
        drawn_samples = [part.size for part in parts]
        drawn_tokens = [int(part.sum()) for part in parts]
    return EpochRecord(
        epoch=planned.epoch,
        selection=hashlib.sha256(drawn.astype("<i8", copy=False).data).hexdigest(),
        checksum=plan_checksum(plan.packs),
        num_samples=plan.num_samples,
        num_tokens=plan.num_tokens,
        num_packs=len(plan.packs),
        planned_samples=plan.planned_samples,
        planned_tokens=plan.planned_tokens,
        fill=plan.fill,
        source_samples=drawn_samples,
        source_tokens=drawn_tokens,
    )


def schedule_epochs(
    schedule: EpochSchedule, make_record: Callable[[int], EpochRecord]
) -> tuple[EpochSchedule, tuple[EpochRecord, ...]]:
    """
    Return a schedule over separately planned epochs, and the record of each epoch.

    `works` of the returned schedule is None.

    Args:
        schedule: Settings of the schedule, and the epoch and step where training starts.
        make_record: Function that plans an epoch, given its number, and returns its record.

    Raises:
        ArgumentError: An epoch has too few packs for one batch on each rank, or there are too many
            epochs.
    """
    records: list[EpochRecord] = []
    start, total = schedule.start, 0
    wanted = Fraction(str(schedule.num_train_epochs))
    if schedule.max_steps <= 0 and wanted > MOST_EPOCHS:
        fact = f"the run has {schedule.num_train_epochs:,} epochs, but at most {MOST_EPOCHS:,} can be planned"
        raise ArgumentError("too_many_epochs", fact, {"epochs": MOST_EPOCHS})
    plain = attrs.evolve(schedule, works=None)
    for epoch in range(MOST_EPOCHS):
        records.append(make_record(epoch))
        _require_batches(records[-1], plain)
        if epoch > start.epoch:
            total += attrs.evolve(plain, num_packs=records[-1].num_packs, start=Progress()).steps_per_epoch
        elif epoch == start.epoch:
            total = attrs.evolve(plain, num_packs=tuple(one.num_packs for one in records)).last_step(epoch)
        ends = total >= schedule.max_steps if schedule.max_steps > 0 else epoch + 1 >= wanted
        if ends and epoch >= start.epoch:
            return attrs.evolve(plain, num_packs=tuple(one.num_packs for one in records)), tuple(records)
    fact = f"the first {MOST_EPOCHS:,} epochs end at optimizer step {total:,}, and no more epochs can be planned"
    raise ArgumentError("too_many_epochs", fact, {"epochs": MOST_EPOCHS, "steps": total})


def _require_batches(record: EpochRecord, schedule: EpochSchedule) -> None:
    """Raise an ArgumentError with the epoch's number if a rank would have no batch."""
    try:
        require_a_batch(
            record.num_packs,
            world_size=schedule.world_size,
            batch_size=schedule.batch_size,
            drop_last=schedule.dataloader_drop_last,
        )
    except ArgumentError as error:
        raise ArgumentError(error.kind, f"epoch {record.epoch}: {error.fact}", error.details) from None


def plan_fingerprint(recipe: EpochRecipe | None, policy: PlanPolicy, lengths_digest: str) -> Fingerprint:
    """
    Return the fingerprint that the plans of all epochs share.

    Args:
        recipe: Mixes and seed, if each epoch has its own plan; None if all epochs share one plan.
        policy: Settings that decide the plan.
        lengths_digest: Digest of the measured lengths.
    """
    key = policy.fingerprint(lengths_digest)
    return key if recipe is None else Fingerprint({**key.inputs, **recipe.fingerprint_inputs()})
