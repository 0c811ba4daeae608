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
        plan: Of the samples.
        table: Measurements of the records; int32, shape (num_records, num_columns).
        files: Files of the data, in order.
        media: What is stored of the samples' images and videos; int64, shape (num_media,
            num_image_columns).

    Raises:
        ValueError: The files have another number of records than the table.
    """
    names = list(dict.fromkeys(file.source for file in files))
    owners = np.repeat([names.index(file.source) for file in files], [file.records for file in files])
    if len(owners) != len(table):
        message = f"the files have {len(owners):,} records, but {len(table):,} were measured"
        raise ValueError(message)
    everything = sample_indices(table)

    def count(samples: IntArray = everything, name: str | None = None) -> NDArray[np.int64]:
        """Return the sum of a column over some samples, or their number, for each source."""
        values = np.ones(len(table), np.int64) if name is None else column(table, name).astype(np.int64)
        sums = np.zeros(len(names), np.int64)
        np.add.at(sums, owners[samples], values[samples])
        return sums

    milliseconds = np.zeros(len(names), np.int64)
    np.add.at(milliseconds, np.repeat(owners, num_media(table)), media[:, MEDIA_COLUMNS.index("milliseconds")])
    tokens, owner_of = column(table, "length")[everything], owners[everything]
    lengths = [np.sort(tokens[owner_of == number]) for number in range(len(names))]
    planned, dropped = plan.packs.indices, plan.dropped_packs.indices
    skipped = np.array(plan.skipped_long, dtype=np.int64)
    pack_of = np.repeat(np.arange(len(plan.packs)), plan.packs.sizes())
    met = np.unique(pack_of * len(names) + owners[planned]) % len(names)
    columns = {
        "bad_records": np.bincount(owners, column(table, "bad"), len(names)),
        "num_samples": count(),
        "num_tokens": count(name="length"),
        "supervised_tokens": count(name="supervised"),
        "images": count(name="images"),
        "videos": count(name="videos"),
        "frames": count(name="frames"),
        "video_patches": count(name="video_patches"),
        "video_milliseconds": milliseconds,
        "longest_sample": np.array([own[-1] if own.size else 0 for own in lengths]),
        "planned_samples": count(planned),
        "planned_tokens": count(planned, "length"),
        "dropped_samples": count(dropped),
        "dropped_tokens": count(dropped, "length"),
        "skipped_samples": count(skipped),
        "skipped_tokens": count(skipped, "length"),
        "num_packs": np.bincount(met, minlength=len(names)),
    }
    return tuple(
        SourceSummary(
            name,
            tuple(file for file in files if file.source == name),
            length_quantiles=quantiles(lengths[number]),
            length_histogram=histogram(lengths[number]),
            **{field: int(values[number]) for field, values in columns.items()},
        )
        for number, name in enumerate(names)
    )


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
