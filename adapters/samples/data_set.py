"""Data files of any formats, one behind the other, as one data set."""

import bisect
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.record_file import RecordFile
from packplan.core.config.run import CustomConfig
from packplan.core.errors import Difference, RecordError, StaleError
from packplan.core.samples.identity import DIGEST_BYTES
from packplan.core.samples.places import is_place
from packplan.core.samples.records import to_messages
from packplan.core.samples.tables import Where

_SHOWN_DIGITS = 12
"""Digits of a digest that a message shows."""


@cache
def absolute_folder(folder: str) -> str:
    """Return the absolute path of a folder, or the place that it is, as digests have it."""
    return folder if is_place(folder) else str(Path(folder).resolve())


def read_messages(record: object, custom: CustomConfig) -> dict[str, Any]:
    """Return a record as messages, as a run reads it; ValueError if it cannot become a sample."""
    return to_messages(
        record,
        object_field_order=custom.object_field_order,
        use_summary=custom.use_summary,
        columns=custom.columns,
        urls=custom.media_cache is not None,
        literal_image_tags=custom.literal_image_tags,
    )


class FileRecords:
    """Records of data files, in order, by index in any order; an index never changes."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        self._files = list(files)
        self._ends: list[int] = np.cumsum([len(file) for file in files]).tolist()
        self.firsts = [0, *self._ends[:-1]]
        self.num_with_media_tags = sum(file.num_with_media_tags for file in files)
        self._known: NDArray[np.uint8] | None = None
        """Digests of records that were read, all zero where one was not."""

    def __len__(self) -> int:
        return self._ends[-1]

    def record_digest(self, index: int) -> str:
        """Return the digest of record *index* alone."""
        file, row = self._find(index)
        return self._digests(file, row, range(index, index + 1)).tobytes().hex()

    def read(self, index: int) -> tuple[Any, bytes]:
        """
        Return the JSON value of record *index*, and its digest for `remember`, nothing if that is
        known already.

        Raises:
            RecordError: It has no JSON value.
            StaleError: It is not the record whose digest is known.
        """
        file, row = self._find(index)
        try:
            value = file[row]
        except (RecordError, OSError) as error:
            if file.changed:
                raise StaleError.file(file.named.name, str(error)) from error
            raise
        digest, known = file.digest_of(row, value), self._known_digest(file, row, index)
        if digest == known:
            return value, b""
        if not known:
            return value, digest
        changed = Difference("content", known.hex()[:_SHOWN_DIGITS], digest.hex()[:_SHOWN_DIGITS])
        stale = StaleError.sample(index, str(file.where(row)), (changed,), copy=file.named.copy)
        raise StaleError.file(file.named.name, str(stale)) if file.changed else stale

    def _known_digest(self, file: RecordFile, row: int, index: int) -> bytes:
        """Return the digest that a record had before; nothing if it was not digested yet."""
        if file.knows_digests:
            return file.digests(row, row + 1)
        if self._known is None:
            return b""
        known: bytes = self._known[index].tobytes()
        return known if any(known) else b""

    def remember(self, indices: range, digests: NDArray[np.uint8]) -> None:
        """
        Keep digests of records that were read, perhaps in another process, so that they need not be
        read for them again.

        Args:
            indices: Records, one behind the other.
            digests: Their digests, all zero where there is none; shape (num_records, DIGEST_BYTES).
        """
        known = digests.any(axis=1)
        if known.any():
            if self._known is None:
                self._known = np.zeros((len(self), DIGEST_BYTES), np.uint8)
            self._known[indices.start : indices.stop][known] = digests[known]

    def _digests(self, file: RecordFile, row: int, indices: range) -> NDArray[np.uint8]:
        """Return the digests of records of a file, read where they are not known; one a row."""
        known = None if self._known is None else self._known[indices.start : indices.stop]
        if known is not None and known.any(axis=1).all():
            return known
        found = np.frombuffer(file.digests(row, row + len(indices)), np.uint8).reshape(-1, DIGEST_BYTES)
        if not file.knows_digests:
            self.remember(indices, found)
        return found

    @property
    def files(self) -> list[tuple[str, int]]:
        """Each file, and how many records it has."""
        return [(file.named.name, len(file)) for file in self._files]

    def __getitem__(self, index: int) -> Any:
        """Return the JSON value of record *index*; RecordError naming file and line."""
        file, row = self._find(index)
        return file[row]

    def where(self, index: int) -> Where:
        """Return the file of record *index*, and its line or row there."""
        file, row = self._find(index)
        return file.where(row)

    def folder(self, index: int) -> str:
        """Return the folder that relative media of record *index* start at."""
        return self._find(index)[0].named.folder

    def digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        """
        Return the SHA-256 of the first records: their content, and the folders that their media
        start at.

        Later records do not change it, nor does another format with the same records.
        Asked for rising counts, it reads each record once.

        Args:
            count: Number of records.
            without: Indices of bad records.
        """
        sha256, folder, index = hashlib.sha256(), "", 0
        with progress(total=count, desc="hashing the data", unit=" records", leave=False, delay=BRIEF_S) as bar:
            while index < count:
                file, row = self._find(index)
                indices = np.arange(index, index + min(len(file) - row, count - index, _AT_ONCE))
                digests = self._digests(file, row, range(index, index + len(indices)))
                kept = digests[~np.isin(indices, without)]
                if len(kept) and file.named.folder != folder:
                    folder = file.named.folder
                    sha256.update(f"{absolute_folder(folder)}\n".encode())
                sha256.update(kept.tobytes())
                index += len(indices)
                bar.update(len(indices))
        if count == len(self):
            self._keep()
        return sha256.hexdigest()

    def _keep(self) -> None:
        """Let files keep the digests of their records, once all of them are known."""
        if self._known is None:
            return
        for number, file in enumerate(self._files):
            if not file.knows_digests:
                file.keep(self._known[self.firsts[number] : self._ends[number]])
        if all(file.knows_digests for file in self._files):
            self._known = None

    def _find(self, index: int) -> tuple[RecordFile, int]:
        """Return the file of a record, and its row there."""
        if not 0 <= index < len(self):
            message = f"record {index} of {len(self)}"
            raise IndexError(message)
        file = bisect.bisect_right(self._ends, index)
        return self._files[file], index - self.firsts[file]


_AT_ONCE = 10_000
"""Records that are hashed between two lines of progress."""
