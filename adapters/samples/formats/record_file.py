"""
Records of one file, whatever its format, and the digests by which they are known again.

What was found is kept from one start to the next: the places of records, and the digest of each, so
that a start need not read a file. A file is known again by its size, times and inode, as version
control does, unless it changed just before it was read. Each record is compared when it is read as
a sample; only verification reads all of them for it.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import CorruptArtefactError, OutputError, RecordError, counted
from packplan.core.samples.identity import DIGEST_BYTES, digest_record, inline_image
from packplan.core.samples.tables import RecordLocation

log = logging.getLogger(__name__)

VERSION = 1
"""Version of what is kept; another way to digest a record, or to find its place, raises it."""

LEAST_BYTES = 2**20
"""Nothing is kept of smaller files: they are read in a moment."""

_SCHEMA = f"packplan.kept/{VERSION}"

SETTLED_NS = 2 * 10**9
"""A file that changed within this before it was read might change again without being seen to."""


class FileCache:
    """Kept facts of a data file of one or more parts."""

    def __init__(self, cache: Path | None, parts: Sequence[Path], *, kind: str, is_copy: bool = False) -> None:
        """
        Note the size, times and inode of the file, before anything reads it.

        Args:
            cache: Folder that facts are kept in; None keeps nothing.
            parts: The file, or its parts.
            kind: Format that the file is read as.
            is_copy: True for a file that was published whole under the digest of its content. It is
                known by its size, so that a change of it is found where a record is read.
        """
        self._parts, self._is_copy = tuple(parts), is_copy
        self._state = self._read_state()
        written = max(max(one.get("mtime_ns", 0), one.get("ctime_ns", 0)) for one in self._state)
        self._is_settled = time.time_ns() - written > SETTLED_NS
        name = "\n".join([kind, *(str(part.resolve()) for part in parts)])
        key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        is_small = not is_copy and sum(one["size"] for one in self._state) < LEAST_BYTES
        self._manifest = None if cache is None or is_small else cache / f"{key}-records.json"

    def load(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the facts and the arrays that were kept; None where the file is another one."""
        if self._manifest is None:
            return None
        try:
            manifest = files.read_manifest(self._manifest, _SCHEMA)
            if manifest is None or manifest["standing"] != self._state:
                return None
            folder, entries = self._manifest.parent, manifest["arrays"]
            return manifest["facts"], {name: files.read_array(folder, entry) for name, entry in entries.items()}
        except (CorruptArtefactError, OSError) as error:
            log.warning("%s: %s is read again", error, self._parts[0])
            return None

    def save(self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bool:
        """
        Keep facts and arrays, where there is room, and the file is certain to be what was read;
        return whether they are kept.
        """
        if self._manifest is None or not self._is_settled or self.changed():
            return False
        folder, stem = self._manifest.parent, self._manifest.stem
        try:
            files.make_folder(folder)
            entries = {name: files.write_array(folder / f"{stem}-{name}.bin", held) for name, held in arrays.items()}
            content = {"schema": _SCHEMA, "path": str(self._parts[0]), "standing": self._state}
            files.write_manifest(self._manifest, {**content, "facts": dict(facts), "arrays": entries})
        except OutputError as error:
            log.warning("%s: the next start reads %s again", error, self._parts[0])
            return False
        return True

    def changed(self) -> bool:
        """Return whether the file stands otherwise on disk than before anything read it."""
        try:
            return self._state != self._read_state()
        except OSError:  # it is gone
            return True

    def _read_state(self) -> list[dict[str, int]]:
        return [{"size": part.stat().st_size} if self._is_copy else file_state(part) for part in self._parts]

    @property
    def path(self) -> str:
        """RecordLocation facts are kept."""
        return str(self._manifest)


def file_state(path: Path) -> dict[str, int]:
    """Return a file's size, times and inode: any write, rename or change of times changes them."""
    stat = path.stat()
    return {
        "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino,
    }  # fmt: skip


@attrs.frozen
class FileName:
    """Name of a file in messages, as the user gave it, and the folder of its media."""

    name: str

    folder: str
    """RecordLocation relative media of its records start."""

    copy: str | None = None
    """The copy that is read in the file's place; None if the file itself is read."""


class RecordFile:
    """
    Records of one file; a format says where they are, and how they are read.

    Attributes:
        named: Name and folder of the file.
    """

    unit = "row"

    max_bytes: int | None = None
    """Bytes that the texts of a record may have, images aside; None reads all."""

    named: FileName

    _kept: FileCache

    _digests: NDArray[np.uint8] | None = None
    """Digests of the records, all zero where one is not known; None where none is."""

    _is_kept = False
    """Whether all digests are known, and kept on disk."""

    def __len__(self) -> int:
        """Return the number of records."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> Any:
        """
        Return a record's JSON value, without what columns write for keys that it lacks; RecordError
        naming its place if there is none, or if it has too much text.
        """
        value = self._read_value(row)
        if self.max_bytes is not None and (size := _text_size(value)) > self.max_bytes:
            reason = f"the {self.unit} has {counted(size, 'byte')} of text, but may have {self.max_bytes:,}"
            raise RecordError(str(self.location(row)), f"{reason}: shorten it, or raise custom.max_line_bytes")
        return value

    def _read_value(self, row: int) -> Any:
        """Return a record's JSON value; RecordError naming its place if there is none."""
        raise NotImplementedError

    def _read_digest(self, row: int) -> bytes:
        """Return the digest of a record, which is read for it."""
        raise NotImplementedError

    def location(self, row: int) -> RecordLocation:
        """Return the place of a record."""
        return RecordLocation(self.named.name, row + 1, self.unit)

    @property
    def changed(self) -> bool:
        """Whether the file, which is no copy, is not on disk as it was when it was opened."""
        return self.named.copy is None and self._kept.changed()

    def digests(self, start: int, stop: int) -> NDArray[np.uint8]:
        """
        Return the digests of the records from *start* to before *stop*, which are read where they
        are not known; shape (num_records, DIGEST_BYTES).
        """
        known = self._known_digests()[start:stop]
        for row in np.flatnonzero(~known.any(axis=1)).tolist():
            known[row] = np.frombuffer(self._read_digest(start + row), np.uint8)
        return known

    def known_digest(self, row: int) -> bytes:
        """Return the digest of a record as it was when it was digested; nothing if it was not."""
        digest = b"" if self._digests is None else self._digests[row].tobytes()
        return digest if any(digest) else b""

    def remember(self, start: int, digests: NDArray[np.uint8]) -> None:
        """
        Take over digests of records that were read, perhaps in another process.

        Args:
            start: Row of the first record.
            digests: Digests of records that follow each other, all zero where unknown; shape
                (num_records, DIGEST_BYTES).
        """
        if not self._is_kept:
            known = self._known_digests()[start : start + len(digests)]
            np.copyto(known, digests, where=digests.any(axis=1, keepdims=True))

    def _known_digests(self) -> NDArray[np.uint8]:
        if self._digests is None:
            self._digests = np.zeros((len(self), DIGEST_BYTES), np.uint8)
        return self._digests

    def digest_value(self, _: int, value: Any) -> bytes:
        """Return the digest of a record that was read, by its JSON value where that decides it."""
        return digest_record(value)

    def _restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what is kept of a file that stands as it did."""
        self._digests, self._is_kept = arrays["digests"].reshape(-1, DIGEST_BYTES), True

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are kept beside the digests."""
        return {}

    def keep(self) -> None:
        """Keep the digests of all records for later starts, where they are known."""
        if not self._is_kept and self._digests is not None and self._digests.any(axis=1).all():
            self._is_kept = self._kept.save({}, {**self._arrays(), "digests": self._digests.reshape(-1)})

    def cache_fault(self) -> str | None:
        """Return the difference of all of the file from the kept facts; None if there is none."""
        rows = range(len(self) if self._is_kept else 0)
        for row in progress(rows, desc=f"comparing {self.named.name}", leave=False, delay=BRIEF_S):
            if self._read_digest(row) != self.known_digest(row):
                place = f"{self.unit} {self.location(row).number:,}"
                delete = self.named.copy or "that"
                return f"{place} is another one than {self._kept.path} says: delete {delete}, and build again"
        return None


def _text_size(value: Any) -> int:
    """Return the bytes of a value's texts, about as its JSON would have, without images."""
    if isinstance(value, str):
        return 0 if inline_image(value) is not None else len(value.encode("utf-8", "surrogatepass")) + 2
    if isinstance(value, dict):
        return sum(len(key) + 4 + _text_size(held) for key, held in value.items())
    if isinstance(value, list):
        return sum(_text_size(held) + 1 for held in value)
    return 0 if isinstance(value, bytes) else len(str(value))


def drop_nulls(value: Any) -> Any:
    """Return a value without what columns write for keys that it does not have."""
    if isinstance(value, dict):
        return {key: drop_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [drop_nulls(held) for held in value]
    return value
