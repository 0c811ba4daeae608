"""Data files of any formats, one behind the other, as one data set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.spans import Named
from packplan.core.errors import ContractError, Difference
from packplan.core.samples import DIGEST_BYTES, Place

_NOTHING = hashlib.sha256()

_SHOWN_DIGITS = 12
"""Digits of a digest that a message shows."""


class RecordFile(Protocol):
    """Records of one file, whatever its format."""

    named: Named
    num_with_media_tags: int

    def __len__(self) -> int:
        """Return the number of records."""

    def __getitem__(self, row: int, /) -> Any:
        """Return a record's JSON value; RecordError naming its place if there is none."""

    def where(self, row: int, /) -> Place:
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
        self.num_with_media_tags = sum(file.num_with_media_tags for file in files)
        self._left_out = np.zeros(0, np.int64)
        self._firsts: list[int] | None = None
        self._known: NDArray[np.uint8] | None = None
        """Digests of records that were read, all zero where one was not."""
        self._digest, self._digested = _NOTHING.copy(), range(0)

    def __len__(self) -> int:
        return int(self._ends[-1]) - len(self._left_out)

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Leave out these records, by their positions among all, ascending, and no others."""
        before, self._left_out = self._left_out, np.array(numbers, dtype=np.int64)
        self._firsts = None
        changed = np.setxor1d(before, self._left_out)
        # What is hashed stays, if it is of records before all that changed.
        if changed.size and self._digested and changed[0] <= self.number(self._digested.stop - 1):
            self._digest, self._digested = _NOTHING.copy(), range(0)

    def number(self, index: int) -> int:
        """Return the position of record *index* among all, also those left out."""
        ahead = self._left_out - np.arange(len(self._left_out))
        return index + int(np.searchsorted(ahead, index, side="right"))

    def numbers(self, indices: range) -> NDArray[np.int64]:
        """Return the positions of records among all; shape (len(indices),)."""
        wanted = np.arange(indices.start, indices.stop, indices.step)
        ahead = self._left_out - np.arange(len(self._left_out))
        numbers: NDArray[np.int64] = wanted + np.searchsorted(ahead, wanted, side="right")
        return numbers

    def position(self, number: int) -> int:
        """Return the index of a record that is not left out, by its position among all."""
        return number - int(np.searchsorted(self._left_out, number))

    def record_digest(self, index: int) -> str:
        """Return the digest of record *index* alone."""
        file, row = self._find(index)
        return self._digests(file, row, self.number(index), 1).hex()

    def read(self, index: int) -> tuple[Any, bytes]:
        """
        Return the JSON value of record *index*, and its digest for `remember`, nothing if that is
        known already.

        Raises:
            RecordError: It has no JSON value.
            ContractError: It is not the record whose digest is known.
        """
        file, row = self._find(index)
        value = file[row]
        digest, known = file.digest_of(row, value), self._known_digest(file, row, index)
        if digest == known:
            return value, b""
        if not known:
            return value, digest
        changed = Difference("content", known.hex()[:_SHOWN_DIGITS], digest.hex()[:_SHOWN_DIGITS])
        causes = (f"Its copy was changed: delete {file.copy}, which is made again",) if file.copy else ()
        raise ContractError(index, str(file.where(row)), (changed,), *causes)

    def _known_digest(self, file: RecordFile, row: int, index: int) -> bytes:
        """Return the digest that a record had before; nothing if it was not digested yet."""
        if file.knows_digests:
            return file.digests(row, row + 1)
        if self._known is None:
            return b""
        known: bytes = self._known[self.number(index) if len(self._left_out) else index].tobytes()
        return known if any(known) else b""

    def remember(self, numbers: NDArray[np.int64], digests: NDArray[np.uint8]) -> None:
        """
        Keep digests of records that were read, perhaps in another process, so that they need not be
        read for them again.

        Args:
            numbers: Their positions among all; shape (num_records,).
            digests: Their digests, all zero where there is none; shape (num_records, DIGEST_BYTES).
        """
        known = digests.any(axis=1)
        if known.any():
            if self._known is None:
                self._known = np.zeros((int(self._ends[-1]), DIGEST_BYTES), np.uint8)
            self._known[numbers[known]] = digests[known]

    def _digests(self, file: RecordFile, row: int, number: int, count: int) -> bytes:
        """Return the digests of records of a file, one behind the other."""
        if self._known is not None:
            known = self._known[number : number + count]
            if known.any(axis=1).all():
                return known.tobytes()
        return file.digests(row, row + count)

    @property
    def firsts(self) -> list[int]:
        """The first record of each file."""
        if self._firsts is None:
            self._firsts = [self.position(number) for number in (0, *self._ends[:-1].tolist())]
        return self._firsts

    @property
    def files(self) -> list[tuple[str, int]]:
        """Each file, and how many records it has, also those left out."""
        return [(file.named.name, len(file)) for file in self._files]

    def __getitem__(self, index: int) -> Any:
        """Return the JSON value of record *index*; RecordError naming file and line."""
        file, row = self._find(index)
        return file[row]

    def where(self, index: int) -> Place:
        """Return the file of record *index*, and its line or row there."""
        file, row = self._find(index)
        return file.where(row)

    def folder(self, index: int) -> str:
        """Return the folder that relative media of record *index* start at."""
        return self._find(index)[0].named.folder

    def digest(self, count: int, *, start: int = 0) -> str:
        """
        Return the SHA-256 of *count* records from *start* on: their content, and the folders that
        their media start at.

        Other rows leave it as it is, and so does another format with the same records. Asked for
        rising counts, it reads each record once.
        """
        if start != self._digested.start or start + count < self._digested.stop:
            self._digest, self._digested = _NOTHING.copy(), range(start, start)
        bar = progress(
            total=start + count - self._digested.stop,
            desc="hashing the data", unit=" records", leave=False, delay=BRIEF_S,
        )  # fmt: skip
        with bar:
            while (index := self._digested.stop) < start + count:
                stop = min(start + count, self._hash_file(index, start, start + count))
                bar.update(stop - index)
                self._digested = range(start, stop)
        if self._digested == range(len(self)):
            self._keep()
        return self._digest.hexdigest()

    def _keep(self) -> None:
        """Let files keep the digests of their records, once all of them are known."""
        if self._known is None:
            return
        for number, file in enumerate(self._files):
            if not file.knows_digests:
                digests = self._known[int(self._ends[number]) - len(file) : int(self._ends[number])]
                for row in np.flatnonzero(~digests.any(axis=1)).tolist():  # of records that are left out
                    digests[row] = np.frombuffer(file.digests(row, row + 1), np.uint8)
                file.keep(digests)
        if all(file.knows_digests for file in self._files):
            self._known = None

    def _hash_file(self, index: int, start: int, stop: int) -> int:
        """
        Add some records of the file of record *index* to the digest, and return the first that is
        not in it.
        """
        file, row = self._find(index)
        folder = file.named.folder
        if index == start or self.folder(index - 1) != folder:
            self._digest.update(f"{Path(folder).resolve()}\n".encode())
        number = self.number(index)
        place = int(np.searchsorted(self._left_out, number))
        until = self._left_out[place] - number if place < len(self._left_out) else _AT_ONCE
        count = min(len(file) - row, stop - index, int(until), _AT_ONCE)
        digests = self._digests(file, row, number, count)
        self._digest.update(digests)
        if not file.knows_digests:
            self.remember(np.arange(number, number + count), np.frombuffer(digests, np.uint8).reshape(count, -1))
        return index + count

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_files", "_ends", "_left_out", "num_with_media_tags", "_known")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _firsts=None, _digest=_NOTHING.copy(), _digested=range(0))

    def _find(self, index: int) -> tuple[RecordFile, int]:
        """Return the file of a record, and its row there."""
        if not 0 <= index < len(self):
            message = f"record {index} of {len(self)}"
            raise IndexError(message)
        number = self.number(index) if len(self._left_out) else index
        file = int(np.searchsorted(self._ends, number, side="right"))
        return self._files[file], number - (int(self._ends[file - 1]) if file else 0)


_AT_ONCE = 1000
"""Records that are hashed between two lines of progress."""
