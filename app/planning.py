"""Lengths -> raw plan -> aligned plan of one split: measured and planned on rank 0, verified on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import attrs
import numpy as np
from tqdm import tqdm

from core.align import AlignedPlan, align_plan
from core.checksum import plan_checksum
from core.config import RunConfig
from core.errors import DataSetError, OutputError, RanksDisagreeError
from core.fingerprint import Fingerprint, plan_fingerprint
from core.lengths import IntArray
from core.plan import RawPlan, build_raw_plan, one_sample_packs, plan_from_arrays, plan_to_arrays, refuse_longer
from core.ports import Arrays, LengthSource, LengthStore, PlanStore, RankGroup
from core.samples import COLUMNS, Table, column, to_row

log = logging.getLogger(__name__)

PROBED_SAMPLES = 8
"""Samples that are measured again, in the opposite order, before new lengths are trusted."""


@attrs.frozen
class PlannedSplit:
    """One split, ready to train or to evaluate."""

    name: str
    table: Table
    raw: RawPlan
    aligned: AlignedPlan
    raw_checksum: str
    checksum: str


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
    seed: int
    refuse_longer: bool
    """Whether a sample over the packing length is an error."""

    @classmethod
    def of(cls, config: RunConfig, split: str) -> Knobs:
        """Return the knobs of the split `train` or `eval`."""
        training, is_train = config.training, split == "train"
        return cls(
            packing=training.packing if is_train else config.eval_packing,
            packing_length=config.packing_length,
            algorithm=training.packing_algorithm,
            min_fill_ratio=str(training.packing_min_fill_ratio),
            drop_last=training.packing_drop_last and is_train,
            # Without packing nothing is too long for a pack.
            allow_single_long=training.packing_allow_single_long or not training.packing,
            dataloader_drop_last=training.dataloader_drop_last and is_train,
            seed=training.seed,
            refuse_longer=config.template.truncation_strategy == "raise",
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

    def plan(self, lengths: IntArray) -> RawPlan:
        """Plan the split."""
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
        )


def plan_split(
    name: str,
    knobs: Knobs,
    *,
    source: LengthSource,
    lengths: LengthStore,
    plans: PlanStore,
    group: RankGroup,
    flush_every: int | None,
    timeout_s: float,
) -> PlannedSplit:
    """
    Measure and plan a split on rank 0, share it, align it, and compare it between all ranks.

    Raises:
        PackplanError: Whatever rank 0 finds wrong, on every rank; RanksDisagreeError if ranks hold different plans.
    """

    def build() -> Arrays:
        table = measure(name, source, lengths, flush_every=flush_every)
        measured = column(table, "length").astype(np.int64)
        if knobs.refuse_longer:
            refuse_longer(measured, limit=knobs.packing_length)
        key = knobs.fingerprint(lengths.digest())
        raw = plans.load(key)
        if raw is None:
            log.info("%s: planning %s samples anew", name, f"{len(table):,}")
            raw = knobs.plan(measured)
            plans.save(key, raw)
        else:
            log.info("%s: the stored plan fits and is used again", name)
        aligned = align_plan(raw, world_size=group.world_size, dataloader_drop_last=knobs.dataloader_drop_last)
        plans.save_aligned(key, aligned, drop_last=knobs.dataloader_drop_last)
        return {"table": table, **plan_to_arrays(raw)}

    arrays = dict(group.from_rank_zero(build, timeout_s=timeout_s))
    table = arrays.pop("table")
    raw = plan_from_arrays(arrays)
    aligned = align_plan(raw, world_size=group.world_size, dataloader_drop_last=knobs.dataloader_drop_last)
    planned = PlannedSplit(name, table, raw, aligned, plan_checksum(raw.packs), plan_checksum(aligned.packs))
    _agree(group, f"the {name} plan's checksum", planned.checksum)
    # A rank that sees other data would train on other samples under the same plan.
    _agree(group, f"what the {name} lengths depend on", source.fingerprint().digest)
    _agree(group, f"the {name} data", source.data_digest(len(source)))
    return planned


def _agree(group: RankGroup, what: str, value: str) -> None:
    values = group.gather(value)
    if len(set(values)) > 1:
        raise RanksDisagreeError(what, values)


def measure(name: str, source: LengthSource, store: LengthStore, *, flush_every: int | None) -> Table:
    """
    Return the measurements of all samples, measuring those that the store does not have.

    The source's shortcut is audited: where an encoded sample measures otherwise, all are encoded in full.

    Raises:
        RecordError: A record cannot become a sample; what was measured before it is kept.

        DataSetError: Encoding a sample twice gives two results.
    """
    total = len(source)
    known = store.resume(source.fingerprint(), total, source.data_digest)
    if len(known) == total:
        log.info("%s: the lengths of all %s samples are stored", name, f"{total:,}")
        return known
    log.info("%s: measuring %s samples, %s are stored", name, f"{total - len(known):,}", f"{len(known):,}")
    every = flush_every or min(max(total // 100, 256), 10_000)
    try:
        return _measure(name, source, store, known, flush_every=every, in_full=False)
    except _ShortcutError as error:
        log.warning("%s: %s: encoding every sample in full instead", name, error)
        store.discard()
        return _measure(name, source, store, known[:0], flush_every=every, in_full=True)


class _ShortcutError(Exception):
    """A sample encodes to another measurement than the source's shortcut gives."""


def _measure(
    name: str, source: LengthSource, store: LengthStore, known: Table, *, flush_every: int, in_full: bool
) -> Table:
    total = len(source)
    parts: list[Table] = [known]
    rows: list[tuple[int, ...]] = []

    def flush() -> None:
        parts.append(_table(rows))
        store.append(parts[-1], source.data_digest(sum(map(len, parts))))
        rows.clear()

    with tqdm(total=total, initial=len(known), desc=f"measuring {name}", unit=" samples", disable=None) as bar:
        try:
            for measurement in source.measure_many(range(len(known), total), in_full=in_full):
                if len(rows) >= flush_every:
                    flush()
                rows.append(to_row(measurement))
                bar.update()
        except BaseException:
            if rows:
                flush()
            raise
    # The store is complete only when the samples have proved steady: otherwise the next run would trust them.
    _audit(source, np.concatenate([*parts, _table(rows)]), in_full=in_full)
    flush()
    return np.concatenate(parts)


def _table(rows: list[tuple[int, ...]]) -> Table:
    return np.array(rows, dtype=np.int32).reshape(-1, len(COLUMNS))


def _audit(source: LengthSource, table: Table, *, in_full: bool) -> None:
    """
    Encode some samples, backwards, and compare.

    Raises:
        DataSetError: A sample encodes otherwise each time.

        _ShortcutError: It does not, but the shortcut measured it otherwise.
    """
    for index in sorted({*_spread(len(table)), *_shape_classes(table)}, reverse=True):
        stored = tuple(table[index].tolist())
        encoded = to_row(source.measure(index))
        if encoded == stored:
            continue
        if in_full or encoded != to_row(source.measure(index)):
            message = (
                f"sample {index} measured {stored} first and {encoded} later "
                f"({', '.join(COLUMNS)}): a plan needs samples that encode the same every time: make the "
                "preprocessing deterministic"
            )
            raise DataSetError(message)
        message = f"sample {index} measured {stored} from its images' headers, but encodes to {encoded} ({', '.join(COLUMNS)})"
        raise _ShortcutError(message)


def _spread(total: int) -> Iterator[int]:
    count = min(total, PROBED_SAMPLES)
    return (index * (total - 1) // max(count - 1, 1) for index in range(count))


def _shape_classes(table: Table) -> list[int]:
    """Return the first sample of each class: as many images, and patches of the same power of two."""
    classes = np.stack([column(table, "images"), np.frexp(column(table, "patches"))[1]])
    _, first = np.unique(classes, axis=1, return_index=True)
    found: list[int] = first.tolist()
    return found


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
