"""A plan by the sources of its samples."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.plan import RawPlan
from packplan.core.samples import MEDIA_COLUMNS, DataFile, MediaTable, Table, column, num_media, sample_indices

QUANTILES = (5, 50, 95)
"""Percentages of a source's samples for quantiles of length."""


@attrs.frozen
class SourceSummary:
    """Figures of a plan for the samples of one source."""

    name: str

    files: tuple[DataFile, ...]

    bad_records: int
    """Records that cannot become samples."""

    num_samples: int
    num_tokens: int
    """Tokens of all samples of the source."""

    supervised_tokens: int
    """Tokens that the loss counts."""

    images: int
    videos: int

    frames: int
    """Frames sampled from the videos."""

    video_patches: int

    video_milliseconds: int
    """Duration of all videos."""

    longest_sample: int
    """Tokens of the longest sample; 0 without samples."""

    length_quantiles: tuple[int, ...]
    """Lengths that 5 %, 50 % and 95 % of the samples do not exceed; empty without samples."""

    length_histogram: tuple[int, ...]
    """Number of samples of 1 token, of 2 and 3, of 4 to 7, and so on."""

    planned_samples: int
    planned_tokens: int

    dropped_samples: int
    """Samples in packs that are filled below the ratio."""

    dropped_tokens: int

    skipped_samples: int
    """Long samples that are in no pack."""

    skipped_tokens: int

    num_packs: int
    """Packs with a sample of the source. A pack counts for each of its sources."""


def summarise_sources(
    plan: RawPlan, table: Table, files: Sequence[DataFile], *, media: MediaTable
) -> tuple[SourceSummary, ...]:
    """
    Return the figures of a plan by source, in the order of their first files.

    Args:
        plan: Plan of the records that are samples.
        table: Measurements of the records; int32, shape (num_records, num_columns).
        files: Files of the data, in order.
        media: Media table of the same records; int64, shape (num_media, num_media_columns).

    Raises:
        ValueError: The files have another number of records than the table.
    """
    names = list(dict.fromkeys(file.source for file in files))
    owners = np.repeat([names.index(file.source) for file in files], [file.records for file in files])
    if len(owners) != len(table):
        message = f"the files have {len(owners):,} records, but {len(table):,} were measured"
        raise ValueError(message)
    counts = _counts(plan, table, media, owners, len(names))
    samples = sample_indices(table)
    tokens, owner_of = column(table, "length")[samples], owners[samples]
    lengths = [np.sort(tokens[owner_of == number]) for number in range(len(names))]
    return tuple(
        SourceSummary(
            name,
            tuple(file for file in files if file.source == name),
            longest_sample=int(own.max(initial=0)),
            length_quantiles=quantiles(own),
            length_histogram=histogram(own),
            **{field: int(values[number]) for field, values in counts.items()},
        )
        for number, (name, own) in enumerate(zip(names, lengths, strict=True))
    )


def _counts(
    plan: RawPlan, table: Table, media: MediaTable, owners: IntArray, num_sources: int
) -> dict[str, NDArray[np.int64]]:
    """
    Return the fields of a summary that are counts or sums, each of shape (num_sources,).

    *owners* are the sources of the records; shape (num_records,).
    """

    def total(samples: IntArray, name: str | None = None) -> NDArray[np.int64]:
        """Return the sum of a column over some samples, or their number, for each source."""
        values = None if name is None else column(table, name)[samples]
        return np.bincount(owners[samples], values, num_sources).astype(np.int64)

    everything = sample_indices(table)
    parts = {
        "num": everything,
        "planned": plan.packs.indices,
        "dropped": plan.dropped_packs.indices,
        "skipped": np.array(plan.skipped_long, dtype=np.int64),
    }
    pack_of = np.repeat(np.arange(len(plan.packs)), plan.packs.sizes())
    met = np.unique(pack_of * num_sources + owners[plan.packs.indices]) % num_sources
    media_owners = np.repeat(owners, num_media(table))
    milliseconds = media[:, MEDIA_COLUMNS.index("milliseconds")]
    return {
        "bad_records": np.bincount(owners, column(table, "bad"), num_sources),
        "supervised_tokens": total(everything, "supervised"),
        **{name: total(everything, name) for name in ("images", "videos", "frames", "video_patches")},
        "video_milliseconds": np.bincount(media_owners, milliseconds, num_sources),
        **{f"{part}_samples": total(samples) for part, samples in parts.items()},
        **{f"{part}_tokens": total(samples, "length") for part, samples in parts.items()},
        "num_packs": np.bincount(met, minlength=num_sources),
    }


def quantiles(ascending: NDArray[np.integer]) -> tuple[int, ...]:
    """
    Return the lengths that 5 %, 50 % and 95 % of all do not exceed; empty without lengths.

    >>> quantiles(np.arange(1, 101))
    (5, 50, 95)
    """
    size = len(ascending)
    return tuple(int(ascending[-(-size * percent // 100) - 1]) for percent in QUANTILES if size)


def histogram(lengths: NDArray[np.integer]) -> tuple[int, ...]:
    """
    Return the number of lengths of 1 token, of 2 and 3, of 4 to 7, and so on.

    >>> histogram(np.array([1, 2, 3, 9]))
    (1, 2, 0, 1)
    """
    bits = np.frexp(lengths.astype(np.float64))[1]
    return tuple(np.bincount(bits)[1:].tolist())
