"""Lengths -> raw plan -> aligned plan of one split: measured and planned on rank 0, verified on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

import attrs
import numpy as np

from app.deadline import Deadline
from app.measuring import measure
from app.progress import progress
from core.align import AlignedPlan, align_plan
from core.checksum import plan_checksum
from core.config import RunConfig
from core.course import Bookmark, Course
from core.errors import DataSetError, EmptyPlanError, OutputError, RanksDisagreeError
from core.fingerprint import Fingerprint, plan_fingerprint
from core.lengths import IntArray
from core.plan import (
    RawPlan,
    build_raw_plan,
    one_sample_packs,
    plan_from_arrays,
    plan_to_arrays,
    refuse_dropped,
    refuse_longer,
)
from core.ports import Arrays, LengthSource, LengthStore, Lock, PlanStore, RankGroup, Tell
from core.samples import Table, column

log = logging.getLogger(__name__)


@attrs.frozen
class PlannedSplit:
    """One split, ready to train or to evaluate."""

    name: str
    table: Table
    raw: RawPlan
    aligned: AlignedPlan
    raw_checksum: str
    checksum: str
    data_digest: str


@attrs.frozen
class Stores:
    """Where a split's lengths and plans are kept, and who may write there."""

    lengths: LengthStore
    plans: PlanStore
    lock: Lock


@attrs.frozen
class Knobs:
    """How one split is planned; evaluation never drops."""

    packing: bool
    packing_length: int
    algorithm: str
    min_fill_ratio: str
    drop_last: bool
    allow_single_long: bool
    dataloader_drop_last: bool

    batch_size: int
    """Packs of a rank in one forward pass: 1 when packing; without, every pack is one sample."""

    seed: int
    refuse_longer: bool
    """Whether a sample over the packing length is an error."""

    max_dropped_share: str
    """Share of the tokens that the fill filter may drop. The packs do not depend on it, nor does the fingerprint."""

    @classmethod
    def of(cls, config: RunConfig, split: str) -> Knobs:
        """Return the knobs of the split `train` or `eval`."""
        training, is_train = config.training, split == "train"
        packing = training.packing if is_train else config.eval_packing
        padded = training.per_device_train_batch_size if is_train else training.per_device_eval_batch_size
        return cls(
            packing=packing,
            packing_length=config.packing_length,
            algorithm=training.packing_algorithm,
            min_fill_ratio=str(training.packing_min_fill_ratio),
            drop_last=training.packing_drop_last and is_train,
            # Without packing nothing is too long for a pack.
            allow_single_long=training.packing_allow_single_long or not training.packing,
            dataloader_drop_last=training.dataloader_drop_last and is_train,
            batch_size=1 if packing else padded,
            seed=training.seed,
            refuse_longer=config.template.truncation_strategy == "raise",
            max_dropped_share=str(training.packing_max_dropped_share),
        )

    def fingerprint(self, lengths_digest: str) -> Fingerprint:
        """Return what the raw plan depends on."""
        return plan_fingerprint(
            lengths_digest=lengths_digest,
            packing=self.packing,
            packing_length=self.packing_length,
            algorithm=self.algorithm,
            min_fill_ratio=self.min_fill_ratio,
            drop_last=self.drop_last,
            allow_single_long=self.allow_single_long,
            seed=self.seed,
        )

    def align(self, raw: RawPlan, *, world_size: int) -> AlignedPlan:
        """Return what so many ranks consume of the split's plan; PlanTooShortError if they would get no batch."""
        return align_plan(
            raw, world_size=world_size, dataloader_drop_last=self.dataloader_drop_last, batch_size=self.batch_size
        )

    def refuse_too_long(self, lengths: IntArray) -> None:
        """Refuse samples that are too long for the template; SampleTooLongError."""
        if self.refuse_longer:
            refuse_longer(lengths, limit=self.packing_length)

    def refuse_dropped(self, raw: RawPlan, lengths: IntArray) -> None:
        """Refuse a plan that drops too much of the data; DroppedTokensError."""
        refuse_dropped(raw, lengths, max_share=self.max_dropped_share, min_fill_ratio=self.min_fill_ratio)

    def plan(self, lengths: IntArray, *, quick_bound: bool = False, tell: Tell = lambda _: None) -> RawPlan:
        """
        Plan the split.

        Args:
            lengths: Tokens of each sample, shape (num_samples,).

            quick_bound: Take a bound that is found at once, where plans are only compared.

            tell: Hears how far `certified` is.
        """
        if not self.packing:
            return one_sample_packs(
                lengths, packing_length=self.packing_length, allow_single_long=self.allow_single_long
            )
        return build_raw_plan(
            lengths,
            packing_length=self.packing_length,
            algorithm=self.algorithm,
            min_fill_ratio=self.min_fill_ratio,
            drop_last=self.drop_last,
            allow_single_long=self.allow_single_long,
            seed=self.seed,
            quick_bound=quick_bound,
            tell=tell,
        )


def plan_split(
    name: str,
    knobs: Knobs,
    *,
    source: LengthSource,
    stores: Stores,
    group: RankGroup,
    flush_every: int | None,
    deadline: Deadline,
    world_size: int | None = None,
) -> PlannedSplit:
    """
    Measure and plan a split on rank 0, share it, align it, and compare it between all ranks.

    Args:
        name: Of the split, for messages.

        knobs: How it is planned.

        source: Its samples.

        stores: Where rank 0 keeps what it measures and plans.

        group: All ranks.

        flush_every: Samples between two flushes of what is measured; None adapts to their number.

        deadline: For rank 0, and for another job that writes the same stores.

        world_size: Ranks to align for, if not those of the group.

    Raises:
        PackplanError: Whatever rank 0 finds wrong, on every rank; RanksDisagreeError if ranks hold different plans;
            DataSetError if the source mixes its samples anew each epoch; EmptyPlanError, before anything is stored, if it
            has none.
    """
    if source.mixes:
        message = (
            f"the {name} data are mixed anew each epoch, which a static plan cannot follow: write an epoch's mix to one "
            "JSONL (python -m app.plan materialise mix.yaml -o mix.jsonl), or set custom.trainer_variant: rollout"
        )
        raise DataSetError(message)
    if not len(source):
        raise EmptyPlanError(0, 0, 0, knobs.packing_length)
    world_size = world_size or group.world_size

    def build(tell: Tell) -> Arrays:
        with stores.lock.held(timeout_s=deadline.left_s(), tell=tell):
            table = measure(name, source, stores.lengths, flush_every=flush_every, tell=tell)
            measured = column(table, "length").astype(np.int64)
            knobs.refuse_too_long(measured)
            tell(f"planning {name}")
            key = knobs.fingerprint(stores.lengths.digest())
            raw = _plan(name, knobs, measured, key, stores.plans, tell=tell)
            knobs.refuse_dropped(raw, measured)
            aligned = knobs.align(raw, world_size=world_size)
            stores.plans.save_aligned(key, aligned, drop_last=knobs.dataloader_drop_last)
        return {"table": table, **plan_to_arrays(raw)}

    arrays = dict(group.from_rank_zero(build, timeout_s=deadline.left_s()))
    table = arrays.pop("table")
    raw = plan_from_arrays(arrays)
    aligned = knobs.align(raw, world_size=world_size)
    data_digest = source.data_digest(len(source))
    planned = PlannedSplit(
        name, table, raw, aligned, plan_checksum(raw.packs), plan_checksum(aligned.packs), data_digest
    )  # fmt: skip
    _agree(group, f"the {name} plan's checksum", planned.checksum)
    # A rank that sees other data would train on other samples under the same plan.
    _agree(group, f"what the {name} lengths depend on", source.fingerprint().digest)
    _agree(group, f"the {name} data", data_digest)
    return planned


def bookmark_of(planned: PlannedSplit, course: Course, config: RunConfig) -> Bookmark:
    """Return what a checkpoint says of a plan, at the start of a course over it."""
    tuner = config.training.tuner_type
    return Bookmark(planned.raw_checksum, planned.data_digest, course.seed, course.shuffle, tuner, course.start)


def _plan(name: str, knobs: Knobs, lengths: IntArray, key: Fingerprint, plans: PlanStore, *, tell: Tell) -> RawPlan:
    raw = plans.load(key)
    if raw is not None:
        log.info("%s: the stored plan fits and is used again", name)
        return raw
    log.info("%s: planning %s samples anew", name, f"{lengths.size:,}")
    takes_long = knobs.packing and knobs.algorithm == "certified"
    raw = _plan_with_progress(name, knobs, lengths, tell) if takes_long else knobs.plan(lengths)
    plans.save(key, raw)
    return raw


def _plan_with_progress(name: str, knobs: Knobs, lengths: IntArray, tell: Tell) -> RawPlan:
    """Plan by an algorithm that takes its time, and say when it starts, how far it is, and how long it took."""
    log.info("%s: %s looks for the fewest packs, which may take minutes", name, knobs.algorithm)
    started = time.monotonic()
    with progress(desc=f"planning {name}", bar_format="{desc}{postfix} [{elapsed}]", miniters=1) as bar:

        def say(words: str) -> None:
            tell(f"planning {name}: {words}")
            bar.set_postfix_str(words, refresh=False)
            bar.update()

        raw = knobs.plan(lengths, tell=say)
    log.info("%s: %s took %.1f s", name, knobs.algorithm, time.monotonic() - started)
    return raw


def _agree(group: RankGroup, what: str, value: str) -> None:
    values = group.gather(value)
    if len(set(values)) > 1:
        raise RanksDisagreeError(what, values)


def usable_folders(paths: Iterable[Path]) -> Arrays:
    """Make folders and their parents, and return nothing; OutputError if one cannot be written."""
    for path in paths:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise OutputError(str(path), error.strerror or str(error)) from None
    return {}
