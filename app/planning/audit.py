"""
Audits of measurements: before samples are planned, some are encoded again and compared.

| when | function | samples | why |
|---|---|---|---|
| some are stored | `check_images` | 8, not encoded | images are replaced in place |
| all are stored | `recheck_stored` | up to 8, here | libraries change unnoticed |
| many are missing | `check_repeatability_early` | 8, here and elsewhere | measuring takes hours |
| all are measured | `check_repeatability` | the same, and media's shapes | later runs trust them |

*Here* means in this process, in backward order. *Elsewhere* means in another process, epoch and
order, as in training. While `adapters/samples` measures samples by its shortcut, without encoding
them in full, it also encodes some samples in full, and compares the lengths. It also compares the
first sample of each kind with ms-swift's own encoding. Training compares every sample with its
measurement.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packplan.core.errors import DataSetError, RecordError, StaleError
from packplan.core.lengths import IntArray
from packplan.core.ports import LengthSource, ReportProgress, StoredRows
from packplan.core.samples.tables import (
    MEDIA_COLUMNS,
    Measurement,
    ShortcutError,
    column,
    from_row,
    from_tables,
    num_media,
    sample_indices,
    to_row,
)

REPEATED_SAMPLES = 8
"""
Number of samples that are encoded again, spread over the data. If there are media, one sample of
each shape of media is added.
"""

REPEATED_EPOCH = 1
"""Epoch in which samples are encoded again in another process; measuring uses epoch 0."""

REPEATED_FIRST_ABOVE = 64
"""
If more records than this have no measurement, up to `REPEATED_SAMPLES` of them are encoded three
times before all records are measured.
"""

COMPARED_TOKENS = 16_000
"""
Maximum total number of tokens of the samples that are encoded again if all samples are stored.
Encoding this many tokens takes about 0.3 s if the samples have images. If `REPEATED_SAMPLES`
samples have more tokens, fewer samples are encoded, but at least one.
"""


def check_images(source: LengthSource, stored: StoredRows) -> None:
    """
    Compare the stored facts about images of some samples with the files; StaleError if an image has
    changed.
    """
    indices = _spread_indices(np.flatnonzero(num_media(stored.table)))
    for index, measured in zip(indices, from_tables(stored.table, stored.media, indices), strict=True):
        for number, (then, now) in enumerate(zip(measured.media, source.media_facts(index), strict=True)):
            if differences := then.differences(now):
                changes = "; ".join(map(str, differences))
                fact = f"image {number} of sample {index} has changed since it was measured: {changes}"
                raise StaleError("changed_image", fact, {"index": index, "image": number})


def recheck_stored(source: LengthSource, stored: StoredRows) -> int:
    """
    Encode up to `REPEATED_SAMPLES` stored samples again, fewer if samples are long; return their
    number.

    Raises:
        DataSetError: The encoding of a sample differs from its stored measurement.
    """
    lengths = column(stored.table, "length")
    few = sorted(_spread_indices(sample_indices(stored.table)), key=lengths.__getitem__)
    few = few[: max(int((np.cumsum(lengths[few]) <= COMPARED_TOKENS).sum()), 1)]
    for index in sorted(few, reverse=True):
        measured = from_row(stored.table, index)
        if (encoded := source.measure_in_full(index)) != measured:
            changes = "; ".join(map(str, measured.differences(encoded)))
            message = (
                f"sample {index} no longer encodes as stored: {changes}. Something that the stored lengths depend on "
                "has changed unnoticed: measure and plan again in another training.output_dir"
            )
            raise DataSetError(message)
    return len(few)


def check_repeatability_early(source: LengthSource, num_measured: int, *, report: ReportProgress, skips: bool) -> None:
    """
    If more than `REPEATED_FIRST_ABOVE` records are not measured yet, encode `REPEATED_SAMPLES` of
    these records three times, and compare the results.

    Args:
        source: Source of all records.
        num_measured: Number of records at the start of the data that are already measured.
        report: Called with a progress message.
        skips: Whether to skip records that cannot become samples.

    Raises:
        RecordError: A record cannot become a sample.
        DataSetError: Two encodings of a record differ.
    """
    missing = range(num_measured, len(source))
    if len(missing) <= REPEATED_FIRST_ABOVE:
        return
    report("a few samples are encoded more than once before all are measured")
    first: dict[int, Measurement] = {}
    for index in _spread_indices(missing):
        try:
            first[index] = source.measure_in_full(index)
        except RecordError:
            if not skips:
                raise
    for index in reversed(first):
        _require_same(index, first[index], source.measure_in_full(index), "later")
    _require_same_elsewhere(source, first)


def check_repeatability(source: LengthSource, stored: StoredRows) -> dict[str, Any]:
    """
    Encode some samples twice more, and compare the results; return the audit's entry for the
    manifest.

    Raises:
        DataSetError: Two encodings of a sample differ.
        ShortcutError: All encodings of a sample are equal, but the shortcut measured it
            differently.
    """
    indices = sorted({*_spread_indices(sample_indices(stored.table)), *_first_of_each_shape(stored)}, reverse=True)
    measured = {index: from_row(stored.table, index) for index in indices}
    for index, before in measured.items():
        if (encoded := source.measure_in_full(index)) != before and not stored.in_full:
            _require_same(index, encoded, source.measure_in_full(index), "later")
            raise ShortcutError(f"sample {index}", to_row(before), to_row(encoded))
        _require_same(index, before, encoded, "later")
    _require_same_elsewhere(source, measured)
    return {"samples": indices, "orders": 3, "processes": 2, "epochs": [0, REPEATED_EPOCH]}


def _require_same_elsewhere(source: LengthSource, measured: Mapping[int, Measurement]) -> None:
    """
    Encode samples in another process, epoch and order; DataSetError if a measurement differs.
    """
    indices = [*measured]
    elsewhere = indices[::2] + indices[1::2]
    outcomes = source.measure_many(elsewhere, in_full=True, epoch=REPEATED_EPOCH)
    for index, outcome in zip(elsewhere, outcomes, strict=True):
        if isinstance(outcome, RecordError):
            raise outcome
        _require_same(index, measured[index], outcome.measurement, f"in another process and epoch {REPEATED_EPOCH}")


def _require_same(index: int, first: Measurement, encoded: Measurement, when: str) -> None:
    if encoded != first:
        fact = f"sample {index} encodes differently {when} ({'; '.join(map(str, first.differences(encoded)))})"
        raise DataSetError(f"{fact}, but has to encode the same every time: make the preprocessing deterministic")


def _spread_indices(indices: IntArray | range) -> list[int]:
    """
    Return up to `REPEATED_SAMPLES` of the given ascending indices, including the first and the
    last.
    """
    count = min(len(indices), REPEATED_SAMPLES)
    return [int(indices[place * (len(indices) - 1) // max(count - 1, 1)]) for place in range(count)]


def _first_of_each_shape(stored: StoredRows) -> list[int]:
    """
    Return the index of the first sample with each number of media, each number of videos, and each
    size (width, height) of media. Sizes between the same powers of two count as the same size.
    """
    per_sample, samples = num_media(stored.table), sample_indices(stored.table)
    _, by_number = np.unique(per_sample[samples], return_index=True)
    _, by_kind = np.unique(column(stored.table, "videos")[samples], return_index=True)
    owner = np.repeat(np.arange(len(per_sample)), per_sample)
    sides = np.frexp(stored.media[:, [MEDIA_COLUMNS.index("width"), MEDIA_COLUMNS.index("height")]])[1]
    _, by_shape = np.unique(sides, axis=0, return_index=True)
    return [*samples[by_number].tolist(), *samples[by_kind].tolist(), *owner[by_shape].tolist()]
