"""Measurements that are found by the content of records, whatever data set holds these."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.samples.measurement import MeasuredSample, MediaFacts, MediaTable, Table, column, from_row, num_media

Identities = NDArray[np.bytes_]
"""Identities of records, as 64 hex digits each; shape (num_records,)."""

UNKNOWN = -1
"""Row of a record that is not among known ones."""


def media_identity(digest: str, folder: str) -> str:
    """
    Return the identity of a record with images or videos, which the folder of its paths decides
    too.

    Args:
        digest: Digest of the record.
        folder: Folder that relative paths of the record's media start from.
    """
    return hashlib.sha256(f"{digest}\n{folder}".encode()).hexdigest()


@attrs.frozen(eq=False)
class _Sorted:
    """Identities in their order, and their rows."""

    identities: Identities
    rows: IntArray

    def find(self, identities: Sequence[str]) -> IntArray:
        """Return the first row of each identity, or `UNKNOWN`."""
        if not self.rows.size or not identities:
            return np.full(len(identities), UNKNOWN, dtype=np.int64)
        asked = np.array([one.encode() for one in identities])
        places = np.minimum(np.searchsorted(self.identities, asked), len(self.rows) - 1)
        return np.where(self.identities[places] == asked, self.rows[places], UNKNOWN)


@attrs.frozen(eq=False)
class KnownLengths:
    """
    Measurements of records by their identities.

    The identity of a record of text is its digest, that of others is their `media_identity`.
    """

    identities: Identities
    """Identity of each row."""

    table: Table
    """Measurements of the same records; int32, shape (num_records, num_columns)."""

    media: MediaTable
    """Media table of the same records."""

    _text: _Sorted = attrs.field(init=False)
    """Samples of text."""

    _with_media: _Sorted = attrs.field(init=False)
    """Samples with images or videos."""

    _ends: IntArray = attrs.field(init=False)
    """End of each record's rows in the media table."""

    @_text.default
    def _text_default(self) -> _Sorted:
        return self._sorted(num_media(self.table) == 0)

    @_with_media.default
    def _with_media_default(self) -> _Sorted:
        return self._sorted(num_media(self.table) > 0)

    @_ends.default
    def _ends_default(self) -> IntArray:
        return np.cumsum(num_media(self.table))

    def rows(self, digests: Sequence[str], folders: Sequence[str]) -> IntArray:
        """
        Return the row of each record, or `UNKNOWN`; int64, shape (num_records,).

        Args:
            digests: Digest of each record.
            folders: Folder that relative paths of each record's media start from.
        """
        with_media = [media_identity(digest, folder) for digest, folder in zip(digests, folders, strict=True)]
        text, media = self._text.find(digests), self._with_media.find(with_media)
        return np.where(text == UNKNOWN, media, text)

    def sample(self, row: int) -> MeasuredSample:
        """Return the measurement in a row."""
        measurement, end = from_row(self.table, row), int(self._ends[row])
        media = self.media[end - measurement.images - measurement.videos : end].tolist()
        return MeasuredSample(measurement, tuple(MediaFacts(*one) for one in media))

    def _sorted(self, chosen: NDArray[np.bool_]) -> _Sorted:
        """Return the chosen records that are samples."""
        rows = np.flatnonzero(chosen & (column(self.table, "bad") == 0))
        order = np.argsort(self.identities[rows], kind="stable")
        return _Sorted(self.identities[rows[order]], rows[order])
