"""
Measurements of samples, and tables of measurements.

The tables are stored with the plan, together with the list of data files and of bad records. When a
sample is fetched in training, its measurement is compared with the stored measurement.
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
"""Row index of a record that is not in a table of known lengths."""


@attrs.frozen
class Measurement:
    """Size of one encoded sample: tokens, images, frames and patches."""

    length: int
    """Number of tokens in the forward pass, image tokens included."""

    supervised: int
    """
    Number of tokens that the loss counts: labels that are not ignored, except the first position.
    """

    images: int

    patches: int
    """Number of vision patches of all images, before merging."""

    cut: bool = attrs.field(default=False, converter=bool)
    """Whether the template truncated the sample."""

    videos: int = 0

    frames: int = 0
    """Number of frames sampled from all videos."""

    video_patches: int = 0
    """Number of vision patches of all videos, before merging. A patch covers two frames."""

    bad: bool = attrs.field(default=False, converter=bool)
    """Whether the record cannot become a sample. If so, all other fields are 0."""

    def differences(self, fetched: Measurement) -> tuple[Difference, ...]:
        """Return the fields that differ between this planned sample and the *fetched* sample."""
        return field_differences(self, fetched)

    def __add__(self, other: Measurement) -> Measurement:
        """
        Return the sum of two measurements, which counts as truncated if at least one of the two is
        truncated.
        """
        return Measurement(*map(operator.add, to_row(self), to_row(other)))

    def __sub__(self, other: Measurement) -> Measurement:
        """Return the difference in each field, which may be negative."""
        return Measurement(*map(operator.sub, to_row(self), to_row(other)))


COLUMNS = tuple(field.name for field in attrs.fields(Measurement))
"""Columns of a table of measurements, in order."""

NOTHING = Measurement(0, 0, 0, 0)
"""Empty measurement, with which a sum starts."""

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

    With these values, a changed file is detected without decoding it.
    """

    num_bytes: int

    width: int
    """Width in pixels, from the header."""

    height: int

    head: int
    """
    First eight bytes of a SHA-256, as a signed number. The digest covers the first 64 KiB of an
    image file, and the first and last 64 KiB of a video file.
    """

    num_frames: int = 0
    """Number of frames of a video, read from its container; 0 for an image."""

    milliseconds: int = 0
    """Duration of a video in milliseconds; 0 for an image."""

    decoded: int = 0
    """
    1 if the video had to be decoded to be measured, because its container has too little
    information.
    """

    def differences(self, current: MediaFacts) -> tuple[Difference, ...]:
        """Return the fields that differ between this measured file and the *current* file."""
        return field_differences(self, current)


MEDIA_COLUMNS = tuple(field.name for field in attrs.fields(MediaFacts))
"""Columns of a media table, in order."""

MediaTable = NDArray[np.int64]
"""
Images and videos of many samples, ordered by sample, images before videos: int64 of shape
(num_images + num_videos, len(MEDIA_COLUMNS)).
"""


@attrs.frozen
class MeasuredSample:
    """Measurement of one sample, and the size and digest of each of its media files."""

    measurement: Measurement

    media: tuple[MediaFacts, ...] = ()
    """Facts of the sample's images, then facts of its videos."""


class ShortcutError(Exception):
    """
    A shortcut measured a sample wrongly, so the shortcut must no longer be used.

    Args:
        where: File and line of the record, or its index.
        quick: Measurement by the shortcut, in the order of `COLUMNS`.
        encoded: Measurement of the fully encoded sample, in the order of `COLUMNS`.
    """

    def __init__(self, where: str, quick: tuple[int, ...], encoded: tuple[int, ...]) -> None:
        super().__init__(where, quick, encoded)
        self.where, self.quick, self.encoded = where, quick, encoded

    def __str__(self) -> str:
        values = zip(COLUMNS, self.quick, self.encoded, strict=True)
        wrong = ", ".join(f"{name} {quick} instead of {encoded}" for name, quick, encoded in values if quick != encoded)
        return f"a shortcut measured {wrong} for {self.where}"


RecordOutcome = MeasuredSample | RecordError
"""
Result of measuring a record. The error of a bad record is returned and not raised, so that
measuring continues.
"""


def to_tables(outcomes: Iterable[RecordOutcome]) -> tuple[Table, MediaTable]:
    """Return the table of measurements, with `BAD` for each bad record, and the media table."""
    measured = [MeasuredSample(BAD) if isinstance(one, RecordError) else one for one in outcomes]
    rows = np.array([to_row(one.measurement) for one in measured], dtype=np.int32)
    media = np.array([attrs.astuple(image) for one in measured for image in one.media], dtype=np.int64)
    return rows.reshape(-1, len(COLUMNS)), media.reshape(-1, len(MEDIA_COLUMNS))


def from_tables(table: Table, media: MediaTable, indices: Iterable[int]) -> Iterator[MeasuredSample]:
    """
    Yield the measurements of selected records.

    Args:
        table: Measurements of all records; int32, shape (num_records, num_columns).
        media: Media table of the same records; int64, shape (num_media, num_media_columns).
        indices: Indices of the selected records, from 0.
    """
    ends = np.cumsum(num_media(table))
    for index in indices:
        row, end = from_row(table, index), ends[index]
        facts = media[end - row.images - row.videos : end].tolist()
        yield MeasuredSample(row, tuple(MediaFacts(*one) for one in facts))


@attrs.frozen
class VideoTotals:
    """Totals over the videos of many samples: videos, frames, patches and seconds."""

    videos: int

    frames: int
    """Number of frames sampled from all videos."""

    patches: int

    seconds: float
    """Total duration of all videos in seconds."""

    decoded: int
    """
    Number of videos that had to be decoded to be measured, because their containers have too little
    information.
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
    Return the identity of a record with media: a digest of the record's digest and its media
    folder.

    Args:
        digest: Digest of the record.
        folder: Folder to which the paths of the record's media are relative.
    """
    return hashlib.sha256(f"{digest}\n{folder}".encode()).hexdigest()


@attrs.frozen(eq=False)
class KnownLengths:
    """
    Measurements of records, which can be found by a record's identity.

    The identity of a text record is its digest. The identity of a record with media is the result
    of `identity_with_media`.
    """

    identities: Identities
    """Identity of the record in each row."""

    table: Table
    """Measurements of the same records; int32, shape (num_records, num_columns)."""

    media: MediaTable
    """Media table of the same records."""

    @cached_property
    def _sorted_samples(self) -> tuple[Identities, IntArray]:
        """Sorted identities of the records that are not bad, and the rows of these records."""
        rows = sample_indices(self.table)
        rows = rows[np.argsort(self.identities[rows], kind="stable")]
        return self.identities[rows], rows

    def find_rows(self, digests: Sequence[str], folders: Sequence[str]) -> IntArray:
        """
        Return the table row of each record, or `UNKNOWN`; int64, shape (num_records,).

        Args:
            digests: Digest of each record.
            folders: Folder to which the paths of each record's media are relative.
        """
        with_media = [identity_with_media(digest, folder) for digest, folder in zip(digests, folders, strict=True)]
        text, media = self._find_rows(digests), self._find_rows(with_media)
        return np.where(text == UNKNOWN, media, text)

    def _find_rows(self, identities: Sequence[str]) -> IntArray:
        """Return the first row with each identity, or `UNKNOWN`."""
        known, rows = self._sorted_samples
        if not rows.size or not identities:
            return np.full(len(identities), UNKNOWN, dtype=np.int64)
        asked = np.array([one.encode() for one in identities])
        places = np.minimum(np.searchsorted(known, asked), len(rows) - 1)
        return np.where(known[places] == asked, rows[places], UNKNOWN)


def find_changed_records(stored: IntArray, current: IntArray) -> IntArray | None:
    """
    Return the indices of new or changed records; None if all compared records are the same.

    The indices are empty if records were only moved or removed.

    Args:
        stored: First eight bytes of each stored record's digest; int64, shape (num_stored,).
        current: First eight bytes of each current record's digest; int64, shape (num_records,).
            Records after the first num_stored are not compared.

    >>> find_changed_records(np.array([7, 8, 9]), np.array([7, 5, 9, 6]))
    array([1])
    """
    compared = current[: len(stored)]
    same = np.array_equal(compared, stored[: len(compared)])
    return None if same else np.flatnonzero(~np.isin(compared, stored))


@attrs.frozen
class DataFile:
    """Name, source, shape and size of a data file when its split was measured."""

    file: str
    """Path of the file, as messages print it."""

    source: str
    """Name of the source to which the file belongs. Files of one source are counted together."""

    shape: str
    """Name of the shape of the file's records, as it is logged."""

    records: int
    """Number of records, bad ones included."""


def source_sizes(files: Iterable[DataFile]) -> list[tuple[str, int]]:
    """
    Merge neighbouring files of the same source; return the source and the number of records of each
    group.

    >>> files = (DataFile(name, name[0], "messages", 5) for name in ("a1", "a2", "b1"))
    >>> source_sizes(files)
    [('a', 10), ('b', 5)]
    """
    groups = groupby(files, key=lambda file: file.source)
    return [(source, sum(file.records for file in own)) for source, own in groups]


@attrs.frozen
class RecordLocation:
    """Place of a record as messages print it: the file, and the line or row in the file."""

    file: str

    number: int
    """Number of the line, the row or another *unit*."""

    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@attrs.frozen
class BadRecord:
    """
    Record that cannot become a sample, with the reason. The record's row in the table is marked as
    bad.
    """

    index: int
    """Index of the record in the data, from 0."""

    where: str
    """File and line of the record, as its `RecordLocation` prints them."""

    reason: str
    """Reason why the record cannot become a sample."""

    sha256: str
    """Digest of the record's content. A changed record is measured again."""
