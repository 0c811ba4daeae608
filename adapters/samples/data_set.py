"""Data files of any formats, one behind the other, as one data set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.spans import Named
from packplan.core.errors import Difference, StaleError
from packplan.core.samples import DIGEST_BYTES, Where

_SHOWN_DIGITS = 12
"""Digits of a digest that a message shows."""


class RecordFile(Protocol):
    """Records of one file, whatever its format."""

    named: Named
    num_with_media_tags: int

    def __len__(self) -> int:
        """Return the number of records."""

    def __getitem__(self, row: int, /) -> Any:
        """Return a record's JSON value; RecordError naming where it stands if there is none."""

    def where(self, row: int, /) -> Where:
        """Return where a record stands."""

    def digests(self, start: int, stop: int, /) -> bytes:
        """Return the digests of the records from *start* to before *stop*, one behind the other."""

    @property
    def knows_digests(self) -> bool:
        """Whether no record has to be read for its digest."""

    def keep(self, digests: NDArray[np.uint8], /) -> None:
        """Keep the digests of all records for later starts; shape (num_records, DIGEST_BYTES)."""

    def kept_fault(self) -> str | None:
        """Return in what the file is another one than was kept of it; all of it is read."""

    def digest_of(self, row: int, value: Any, /) -> bytes:
        """Return the digest of a record that was read, by its JSON value where that decides it."""

    @property
    def copy(self) -> str | None:
        """Folder of the copy that is read in the file's place; None if the file itself is read."""


class FileRecords:
    """A `core.ports.Records` over data files, in order."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        self._files = list(files)
        self._ends = np.cumsum([len(file) for file in files])
        self.firsts = [0, *self._ends[:-1].tolist()]
        self.num_with_media_tags = sum(file.num_with_media_tags for file in files)
        self._known: NDArray[np.uint8] | None = None
        """Digests of records that were read, all zero where one was not."""
        self._hashed = _Hashed()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def record_digest(self, index: int) -> str:
        """Return the digest of record *index* alone."""
        file, row = self._find(index)
        return self._digests(file, row, index, 1).hex()

    def read(self, index: int) -> tuple[Any, bytes]:
        """
        Return the JSON value of record *index*, and its digest for `remember`, nothing if that is
        known already.

        Raises:
            RecordError: It has no JSON value.
            StaleError: It is not the record whose digest is known.
        """
        file, row = self._find(index)
        value = file[row]
        digest, known = file.digest_of(row, value), self._known_digest(file, row, index)
        if digest == known:
            return value, b""
        if not known:
            return value, digest
        changed = Difference("content", known.hex()[:_SHOWN_DIGITS], digest.hex()[:_SHOWN_DIGITS])
        raise StaleError.sample(index, str(file.where(row)), (changed,), copy=file.copy)

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

    def _digests(self, file: RecordFile, row: int, index: int, count: int) -> bytes:
        """Return the digests of records of a file from *index* on, one behind the other."""
        if self._known is not None:
            known = self._known[index : index + count]
            if known.any(axis=1).all():
                return known.tobytes()
        return file.digests(row, row + count)

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

    def digest(self, count: int, *, start: int = 0, without: Sequence[int] = ()) -> str:
        """
        Return the SHA-256 of records: their content, and the folders that their media start at.

        Other records leave it as it is, and so does another format with the same records. Asked for
        rising counts, it reads each record once.

        Args:
            count: How many records.
            start: The first of them.
            without: Indices of bad records.
        """
        end, skipped = start + count, {index for index in without if start <= index < start + count}
        if not self._hashed.is_part_of(range(start, end), skipped):
            self._hashed = _Hashed(range(start, start))
        self._hashed.skipped = skipped
        bar = progress(
            total=end - self._hashed.indices.stop,
            desc="hashing the data", unit=" records", leave=False, delay=BRIEF_S,
        )  # fmt: skip
        with bar:
            while (index := self._hashed.indices.stop) < end:
                stop = self._hash_file(index, end, skipped)
                bar.update(stop - index)
                self._hashed.indices = range(start, stop)
        if self._hashed.indices == range(len(self)):
            self._keep()
        digest: str = self._hashed.sha256.hexdigest()
        return digest

    def _keep(self) -> None:
        """Let files keep the digests of their records, once all of them are known."""
        if self._known is None:
            return
        for number, file in enumerate(self._files):
            if not file.knows_digests:
                file.keep(self._known[self.firsts[number] : int(self._ends[number])])
        if all(file.knows_digests for file in self._files):
            self._known = None

    def _hash_file(self, index: int, stop: int, skipped: set[int]) -> int:
        """
        Add some records of the file of record *index* to the digest, and return the first that is
        not in it.
        """
        file, row = self._find(index)
        count = min(len(file) - row, stop - index, _AT_ONCE)
        indices = range(index, index + count)
        digests = np.frombuffer(self._digests(file, row, index, count), np.uint8).reshape(count, -1)
        if not file.knows_digests:
            self.remember(indices, digests)
        kept = digests if skipped.isdisjoint(indices) else digests[[one not in skipped for one in indices]]
        if len(kept) and file.named.folder != self._hashed.folder:
            self._hashed.folder = file.named.folder
            self._hashed.sha256.update(f"{Path(file.named.folder).resolve()}\n".encode())
        self._hashed.sha256.update(kept.tobytes())
        return indices.stop

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hashed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _hashed=_Hashed())

    def _find(self, index: int) -> tuple[RecordFile, int]:
        """Return the file of a record, and its row there."""
        if not 0 <= index < len(self):
            message = f"record {index} of {len(self)}"
            raise IndexError(message)
        file = int(np.searchsorted(self._ends, index, side="right"))
        return self._files[file], index - self.firsts[file]


@attrs.define(eq=False)
class _Hashed:
    """Digest of records so far, to which the next are added."""

    indices: range = range(0)

    skipped: set[int] = attrs.field(factory=set)
    """Records between them that are not hashed."""

    folder: str | None = None
    """Folder of the media of the last record."""

    sha256: Any = attrs.field(factory=hashlib.sha256)

    def is_part_of(self, indices: range, skipped: set[int]) -> bool:
        """Return whether the digest of these records can go on from this one."""
        if self.indices.start != indices.start or self.indices.stop > indices.stop:
            return False
        return self.skipped == {index for index in skipped if index < self.indices.stop}


_AT_ONCE = 1000
"""Records that are hashed between two lines of progress."""
