"""
Reads the records of one file, and keeps a digest of each record.

Each format has a subclass of `RecordFile` in a module of its own.

Positions and digests of records are cached on disk, so that a later start need not read the file.
As in git, a file counts as unchanged if its size, times and inode are unchanged. A file that was
written less than two seconds ago is not cached. Each record is compared with its digest when it is
read as a sample. `packplan plan verify` compares all records.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import CorruptArtefactError, DataSetError, OutputError, RecordError, counted
from packplan.core.samples.identity import DIGEST_BYTES, image_base64
from packplan.core.samples.tables import RecordLocation

log = logging.getLogger(__name__)

VERSION = 1
"""
Version of cached arrays; increase it if digests or positions of records are computed differently.
"""

MIN_CACHED_BYTES = 2**20
"""
Smallest size in bytes of a data file whose arrays are cached. Arrays of a copy are always cached.
"""

_SCHEMA = f"packplan.kept/{VERSION}"

SETTLED_NS = 2 * 10**9
"""Age of a file in nanoseconds above which any further write changes the file's times."""


class FileCache:
    """
    Cache of arrays computed from a data file; the arrays are valid while the file is unchanged.
    """

    def __init__(self, folder: Path | None, parts: Sequence[Path], *, kind: str, is_copy: bool = False) -> None:
        """
        Remember the file's current size, times and inode; call this before reading its content.

        Args:
            folder: Folder of cached arrays; None caches nothing.
            parts: Paths of the file's parts, one for a file in one piece.
            kind: Kind of the arrays; each kind is stored in files of its own.
            is_copy: Whether the file is a copy that is named by the digest of its content. Only the
                size of a copy is compared; other changes are found when a record is read.
        """
        self._parts, self._is_copy = tuple(parts), is_copy
        self._state = self._read_state()
        written = max(max(one.get("mtime_ns", 0), one.get("ctime_ns", 0)) for one in self._state)
        self._is_settled = time.time_ns() - written > SETTLED_NS
        name = "\n".join([kind, *(str(part.resolve()) for part in parts)])
        key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        is_small = not is_copy and sum(one["size"] for one in self._state) < MIN_CACHED_BYTES
        self.path = None if folder is None or is_small else folder / f"{key}-records.json"

    def load(self) -> dict[str, NDArray[Any]] | None:
        """
        Return the cached arrays; None if they are missing or damaged, or the file has changed.
        """
        if self.path is None:
            return None
        try:
            manifest = files.read_manifest(self.path, _SCHEMA)
            if manifest is None or manifest["standing"] != self._state:
                return None
            return {name: files.read_array(self.path.parent, entry) for name, entry in manifest["arrays"].items()}
        except (CorruptArtefactError, OSError) as error:
            log.warning("%s; %s is read in full instead", error, self._parts[0])
            return None

    def save(self, arrays: Mapping[str, NDArray[Any]]) -> bool:
        """
        Cache arrays, and return whether they were written.

        Arrays are not written if there is no cache folder, or if the disk is full. Nor are arrays
        of a data file that is small, or that may have changed while it was read.
        """
        if self.path is None or not self._is_settled or self.file_changed():
            return False
        folder, stem = self.path.parent, self.path.stem
        try:
            files.make_folder(folder)
            entries = {name: files.write_array(folder / f"{stem}-{name}.bin", held) for name, held in arrays.items()}
            content = {"schema": _SCHEMA, "path": str(self._parts[0]), "standing": self._state, "arrays": entries}
            files.write_manifest(self.path, content)
        except OutputError as error:
            log.warning("%s; the next start reads %s in full again", error, self._parts[0])
            return False
        return True

    def file_changed(self) -> bool:
        """
        Return whether the file's size, times or inode have changed since this object was made.
        """
        try:
            return self._state != self._read_state()
        except OSError:  # the file is gone
            return True

    @property
    def sizes(self) -> list[int]:
        """Size in bytes of each part of the file."""
        return [one["size"] for one in self._state]

    def _read_state(self) -> list[dict[str, int]]:
        return [{"size": part.stat().st_size} if self._is_copy else file_state(part) for part in self._parts]


def file_state(path: Path) -> dict[str, int]:
    """Return a file's size, times and inode; any write or rename changes at least one of them."""
    stat = path.stat()
    return {
        "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino,
    }  # fmt: skip


class RecordFile:
    """
    Records of one file, by row; each format has a subclass that finds and reads the records.

    Attributes:
        name: Name of the file in messages: its path, or the URL that it was downloaded from.
        folder: Folder that relative media paths of the records start at.
        copy: Path of the copy that is read in place of the file; None if the file itself is read.
        unit: Word for a row in messages, `row` or `line`.
    """

    unit = "row"

    copy: str | None = None

    max_bytes: int | None = None
    """Largest text of a record in bytes, not counting images; None accepts any size."""

    _is_cached = False
    """Whether the digests of all records are known and cached on disk."""

    def __init__(
        self, parts: Sequence[Path], *, name: str, folder: str, copy: str | None, max_bytes: int | None,
        cache: Path | None,
    ) -> None:  # fmt: skip
        """
        Find the records of a file, in its cached arrays if the file is unchanged.

        Args:
            parts: Files to read: the file, its copy, or the files of a folder.
            name: Name of the file in messages.
            folder: Folder that relative media paths of the records start at.
            copy: Path of the copy that is read in place of the file; None if the file itself is
                read.
            max_bytes: Largest text of a record in bytes; a larger record is refused when it is
                read. None accepts any size.
            cache: Folder of cached arrays; None caches nothing.

        Raises:
            DataSetError: A file cannot be read.
        """
        self.parts, self.name, self.folder, self.copy, self.max_bytes = parts, name, folder, copy, max_bytes
        try:
            self._cache = FileCache(cache, parts, kind=type(self).__name__, is_copy=copy is not None)
            arrays = self._cache.load()
            self._open(arrays)
        except OSError as error:
            raise DataSetError(f"{name} cannot be read ({error.strerror}): name an existing data file") from None
        if arrays is not None:
            self._digests, self._is_cached = arrays["digests"].reshape(-1, DIGEST_BYTES), True

    def _open(self, arrays: Mapping[str, NDArray[Any]] | None) -> None:
        """
        Find the records in the file, or in its cached *arrays*; OSError if reading fails.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in self.__dict__.items() if name != "_digests" or held.any()}

    def reopen(self) -> None:
        """Open the file on another machine; DataSetError if it is missing or has another size."""
        sizes, where = self._cache.sizes, self.parts[0].absolute()
        try:
            self._cache = FileCache(None, self.parts, kind="", is_copy=self.copy is not None)
        except OSError as error:
            reason = f"{Path(error.filename).absolute()} cannot be read ({error.strerror})"
            raise DataSetError(f"{reason}: put the data in a folder that all machines share") from None
        if (here := self._cache.sizes) != sizes:
            raise DataSetError(
                f"{where} has {counted(sum(here), 'byte')} on a node, but {sum(sizes):,} where the run started: "
                "use the same file on all machines"
            )

    def __len__(self) -> int:
        """Return the number of records."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> Any:
        """
        Return the JSON value of the record in *row*.

        RecordError names the file and line of a record that is damaged or exceeds `max_bytes`.
        """
        try:
            value = self._read_value(row)
        except ValueError as error:
            raise RecordError(str(self.location(row)), str(error)) from None
        if self.max_bytes is not None and (size := _text_size(value)) > self.max_bytes:
            reason = f"the {self.unit} has {counted(size, 'byte')} of text, but may have at most {self.max_bytes:,}"
            raise RecordError(str(self.location(row)), f"{reason}: shorten the text, or raise custom.max_line_bytes")
        return value

    def _read_value(self, row: int) -> Any:
        """Return the JSON value in *row*; ValueError with the reason if the record is damaged."""
        raise NotImplementedError

    def _read_digest(self, row: int) -> bytes:
        """Read the record in *row*, and return its digest."""
        raise NotImplementedError

    def location(self, row: int) -> RecordLocation:
        """Return the file and the line or row, from 1, of the record at index *row*, from 0."""
        return RecordLocation(self.name, row + 1, self.unit)

    @property
    def changed(self) -> bool:
        """Whether the file has changed on disk since it was opened; always false for a copy."""
        return self.copy is None and self._cache.file_changed()

    @cached_property
    def _digests(self) -> NDArray[np.uint8]:
        """Digests of the records, all zero where unknown; shape (num_records, DIGEST_BYTES)."""
        return np.zeros((len(self), DIGEST_BYTES), np.uint8)

    def digests(self, start: int, stop: int) -> NDArray[np.uint8]:
        """
        Return the digests of rows *start* to *stop* - 1; shape (num_records, DIGEST_BYTES).

        A record is read only if its digest is unknown.
        """
        known = self.known_digests(start, stop)
        for row in np.flatnonzero(~known.any(axis=1)).tolist():
            known[row] = np.frombuffer(self._read_digest(start + row), np.uint8)
        return known

    def known_digests(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a view of the digests of rows *start* to *stop* - 1, all zero where unknown."""
        return self._digests[start:stop]

    def known_digest(self, row: int) -> bytes:
        """Return the digest of the record in *row*, or empty bytes if it is unknown."""
        digest = self._digests[row].tobytes()
        return digest if any(digest) else b""

    def add_digests(self, start: int, digests: NDArray[np.uint8]) -> None:
        """
        Store digests of consecutive records, which may have been read in another process.

        Args:
            start: Row of the first record.
            digests: Digests of the records, all zero where unknown; shape (num_records,
                DIGEST_BYTES).
        """
        if not self._is_cached:
            if not self._digests.flags.writeable:  # memory that processes share
                self._digests = self._digests.copy()
            np.copyto(self._digests[start : start + len(digests)], digests, where=digests.any(axis=1, keepdims=True))

    def _arrays_to_cache(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that a later start needs, by name."""
        return {"digests": self._digests.reshape(-1)}

    def save_digests(self) -> None:
        """Cache the digests for later starts; all of them have to be known."""
        if not self._is_cached:
            self._is_cached = self._cache.save(self._arrays_to_cache())

    def cache_fault(self) -> str | None:
        """Read the whole file; return a message if it differs from its cached arrays, else None."""
        rows = range(len(self) if self._is_cached else 0)
        for row in progress(rows, desc=f"comparing {self.name}", leave=False, delay=BRIEF_S):
            if self._read_digest(row) != self.known_digest(row):
                place = f"{self.unit} {self.location(row).number:,}"
                fact = f"{place} differs from its digest in {self._cache.path}"
                return f"{fact}: delete {self.copy or 'that file'}, and build the plan again"
        return None


def _text_size(value: Any) -> int:
    """Estimate the size in bytes of a value as JSON, not counting images."""
    if isinstance(value, str):
        return 0 if image_base64(value) is not None else len(value.encode("utf-8", "surrogatepass")) + 2
    if isinstance(value, dict):
        return sum(len(key) + 4 + _text_size(held) for key, held in value.items())
    if isinstance(value, list):
        return sum(_text_size(held) + 1 for held in value)
    return 0 if isinstance(value, bytes) else len(str(value))
