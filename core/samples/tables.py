"""
Measurements of samples, and tables of them.

The tables are stored with the plan, beside the data files and the bad records. When a sample is
fetched, its measurement is compared with the stored one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import Difference, RecordError
from packplan.core.fingerprint import field_differences
from packplan.core.lengths import IntArray

UNKNOWN = -1
"""Row of a record that is not in a table of known lengths."""


@attrs.frozen
class Measurement:
    """Size of one encoded sample: tokens, images, frames and patches."""

    length: int
    """Tokens in the forward pass, image tokens included."""

    supervised: int
    """Tokens that the loss counts: labels that are not ignored, without the first position."""

    images: int

    patches: int
    """Vision patches of all images, before merging."""

    cut: bool = attrs.field(default=False, converter=bool)
    """Whether the template truncated the sample."""

    videos: int = 0

    frames: int = 0
    """Frames sampled from all videos."""

    video_patches: int = 0
    """Vision patches of all videos, of two frames each, before merging."""

    bad: bool = attrs.field(default=False, converter=bool)
    """Whether the record cannot become a sample; then all other fields are 0."""

    def differences(self, fetched: Measurement) -> tuple[Difference, ...]:
        """Return the fields in which the *fetched* sample differs from this planned one."""
        return field_differences(self, fetched)

    def __add__(self, other: Measurement) -> Measurement:
        """Return the sum of two measurements; it counts as truncated if one of the two is."""
        return Measurement(*map(operator.add, to_row(self), to_row(other)))

    def __sub__(self, other: Measurement) -> Measurement:
        """Return the difference in each field, which may be negative."""
        return Measurement(*map(operator.sub, to_row(self), to_row(other)))


COLUMNS = tuple(field.name for field in attrs.fields(Measurement))
"""Columns of a table of measurements, in order."""

NOTHING = Measurement(0, 0, 0, 0)
"""Measurement of no record, from which sums begin."""

BAD = Measurement(0, 0, 0, 0, bad=True)
"""Measurement of a record that cannot become a sample."""

Table = NDArray[np.int32]
"""Measurements of many records, by index: int32 of shape (num_records, len(COLUMNS))."""


def to_row(measurement: Measurement) -> tuple[int, ...]:
    """Return the measurement as a row of a table."""
    return tuple(map(int, attrs.astuple(measurement)))


def from_row(table: Table, index: int) -> Measurement:
    """Return the measurement in row *index* of a table."""
    return Measurement(*table[index].tolist())


def column(table: Table, name: str) -> NDArray[np.int32]:
    """Return one column of a table; shape (num_records,)."""
    return table[:, COLUMNS.index(name)]


def sample_indices(table: Table) -> NDArray[np.int64]:
    """Return the indices of records that are not bad, ascending; shape (num_samples,)."""
    return np.flatnonzero(column(table, "bad") == 0)


@attrs.frozen
class MediaFacts:
    """
    Size and digest of an image or video file when it was measured.

    They reveal a changed file without decoding it.
    """

    num_bytes: int

    width: int
    """Width in pixels, from the header."""

    height: int

    head: int
    """
    First eight bytes of the SHA-256 of the first 64 KiB, as a signed number. For a video, of the
    first and last 64 KiB.
    """

    num_frames: int = 0
    """Frames of a video, from its container; 0 for an image."""

    milliseconds: int = 0
    """Duration of a video; 0 for an image."""

    decoded: int = 0
    """1 if a video is decoded to be measured, since its container gives too little information."""

    def differences(self, current: MediaFacts) -> tuple[Difference, ...]:
        """Return the fields in which the *current* file differs from this measured one."""
        return field_differences(self, current)


MEDIA_COLUMNS = tuple(field.name for field in attrs.fields(MediaFacts))
"""Columns of a media table, in order."""

MediaTable = NDArray[np.int64]
"""
Images and videos of many samples, by sample, images first: int64 of shape (num_images + num_videos,
len(MEDIA_COLUMNS)).
"""


@attrs.frozen
class MeasuredSample:
    """Measurement of one sample, and the size and digest of each of its media files."""

    measurement: Measurement

    media: tuple[MediaFacts, ...] = ()
    """Facts of the images of the sample, then of its videos."""


class ShortcutError(Exception):
    """
    A shortcut measured a sample wrongly, so it is no longer used.

    Args:
        where: File and line of the record, or its index.
        quick: Measurement by the shortcut, in the order of `COLUMNS`.
        encoded: Measurement by encoding.
    """

    def __init__(self, where: str, quick: tuple[int, ...], encoded: tuple[int, ...]) -> None:
        super().__init__(where, quick, encoded)
        self.where, self.quick, self.encoded = where, quick, encoded

    def __str__(self) -> str:
        return f"{self.where} measured {self.quick} by a shortcut, but encodes to {self.encoded} ({', '.join(COLUMNS)})"


RecordOutcome = MeasuredSample | RecordError
"""Result of measuring a record. The error of a bad record is a value, since measuring goes on."""


def to_tables(outcomes: Iterable[RecordOutcome]) -> tuple[Table, MediaTable]:
    """Return the table of measurements, with `BAD` for each error, and the table of all media."""
    measured = [MeasuredSample(BAD) if isinstance(one, RecordError) else one for one in outcomes]
    rows = np.array([to_row(one.measurement) for one in measured], dtype=np.int32)
    media = np.array([attrs.astuple(image) for one in measured for image in one.media], dtype=np.int64)
    return rows.reshape(-1, len(COLUMNS)), media.reshape(-1, len(MEDIA_COLUMNS))


def from_tables(table: Table, media: MediaTable, indices: Iterable[int]) -> Iterator[MeasuredSample]:
    """
    Yield the measurements of some records of a table.

    Args:
        table: Measurements of all records; int32, shape (num_records, num_columns).
        media: Media table of the same records; int64, shape (num_media, num_media_columns).
        indices: Records to read, each from 0.
    """
    ends = np.cumsum(num_media(table))
    for index in indices:
        row, end = from_row(table, index), ends[index]
        facts = media[end - row.images - row.videos : end].tolist()
        yield MeasuredSample(row, tuple(MediaFacts(*one) for one in facts))


@attrs.frozen
class VideoTotals:
    """Number of videos of many samples, and their total frames, patches and seconds."""

    videos: int

    frames: int
    """Frames sampled from the videos."""

    patches: int

    seconds: float
    """Duration of all videos."""

    decoded: int
    """
    Videos that were decoded to be measured, since their containers give too little information.
    """


def video_totals(table: Table, media: MediaTable) -> VideoTotals:
    """
    Return the totals over the videos of all samples.

    Args:
        table: Measurements of the records; int32, shape (num_records, num_columns).
        media: Media table of the same records; int64, shape (num_media, num_media_columns).
    """
    videos, frames, patches = (
        int(column(table, name).sum(dtype=np.int64)) for name in ("videos", "frames", "video_patches")
    )
    milliseconds, decoded = (int(media[:, MEDIA_COLUMNS.index(name)].sum()) for name in ("milliseconds", "decoded"))
    return VideoTotals(videos, frames, patches, milliseconds / 1000, decoded)


def num_media(table: Table) -> NDArray[np.int64]:
    """Return the number of images and videos of each record; int64 of shape (num_records,)."""
    return column(table, "images").astype(np.int64) + column(table, "videos")


Identities = NDArray[np.bytes_]
"""Identities of records, as 64 hex digits each; shape (num_records,)."""


def identity_with_media(digest: str, folder: str) -> str:
    """
    Return the identity of a record with media: its digest and its media folder in one digest.

    Args:
        digest: Digest of the record.
        folder: Folder that relative paths of the record's media start from.
    """
    return hashlib.sha256(f"{digest}\n{folder}".encode()).hexdigest()


@attrs.frozen(eq=False)
class KnownLengths:
    """
    Measurements of records, looked up by a record's identity.

    The identity of a record of text is its digest, of one with media its `identity_with_media`.
    """

    identities: Identities
    """Identity of each row."""

    table: Table
    """Measurements of the same records; int32, shape (num_records, num_columns)."""

    media: MediaTable
    """Media table of the same records."""

    @cached_property
    def _sorted_samples(self) -> tuple[Identities, IntArray]:
        """Identities of the records that are not bad, in order, and their rows."""
        rows = sample_indices(self.table)
        rows = rows[np.argsort(self.identities[rows], kind="stable")]
        return self.identities[rows], rows

    def find_rows(self, digests: Sequence[str], folders: Sequence[str]) -> IntArray:
        """
        Return the table row of each record, or `UNKNOWN`; int64, shape (num_records,).

        Args:
            digests: Digest of each record.
            folders: Folder that relative paths of each record's media start from.
        """
        with_media = [identity_with_media(digest, folder) for digest, folder in zip(digests, folders, strict=True)]
        text, media = self._find_rows(digests), self._find_rows(with_media)
        return np.where(text == UNKNOWN, media, text)

    def _find_rows(self, identities: Sequence[str]) -> IntArray:
        """Return the first row of each identity, or `UNKNOWN`."""
        known, rows = self._sorted_samples
        if not rows.size or not identities:
            return np.full(len(identities), UNKNOWN, dtype=np.int64)
        asked = np.array([one.encode() for one in identities])
        places = np.minimum(np.searchsorted(known, asked), len(rows) - 1)
        return np.where(known[places] == asked, rows[places], UNKNOWN)


@attrs.frozen
class DataFile:
    """Name, source, shape and size of a data file when its split was measured."""

    file: str
    """Path of the file in messages."""

    source: str
    """Name of the source; files of one source are counted together."""

    shape: str
    """Name of the shape of the records, as it is logged."""

    records: int
    """Number of records, bad ones included."""


def source_sizes(files: Iterable[DataFile]) -> list[tuple[str, int]]:
    """
    Return source and number of records of each run of neighbouring files of one source.

    >>> files = (DataFile(name, name[0], "messages", 5) for name in ("a1", "a2", "b1"))
    >>> source_sizes(files)
    [('a', 10), ('b', 5)]
    """
    groups = groupby(files, key=lambda file: file.source)
    return [(source, sum(file.records for file in own)) for source, own in groups]


@attrs.frozen
class RecordLocation:
    """Place of a record in messages: its file, and its line or row there."""

    file: str

    number: int
    """Number of the line, the row or another *unit*."""

    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@attrs.frozen
class BadRecord:
    """Record that cannot become a sample, and the reason. Its row in the table is marked as bad."""

    index: int
    """Index of the record in the data, from 0."""

    where: str
    """File and line of the record: the text of its `RecordLocation`."""

    reason: str
    """Reason why it cannot become a sample."""

    sha256: str
    """Digest of the content; a record that has changed is measured again."""
