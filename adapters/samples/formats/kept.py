"""
Facts of a data file, kept from one start to the next: the places of its records, and the digest of
each, so that a start need not read it again.

A file is known again by its size, times and inode, as version control does, unless it changed just
before it was read; some of its records are compared, too. Only verification reads all of it.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from packplan.adapters import files
from packplan.core.errors import CorruptArtefactError, OutputError

log = logging.getLogger(__name__)

VERSION = 1
"""Version of what is kept; another way to digest a record, or to find its place, raises it."""

LEAST_BYTES = 2**20
"""Nothing is kept of smaller files: they are read in a moment."""

AUDITED = 32
"""Records of a file that are read on a start, and compared."""

_SCHEMA = f"packplan.kept/{VERSION}"

SETTLED_NS = 2 * 10**9
"""A file that changed within this before it was read might change again without being seen to."""


class KeptFacts:
    """Kept facts of a data file of one or more parts."""

    def __init__(self, cache: Path | None, parts: Sequence[Path], *, kind: str, is_copy: bool = False) -> None:
        """
        Look at how the file stands, before anything reads it.

        Args:
            cache: Folder that facts are kept in; None keeps nothing.
            parts: The file, or its parts.
            kind: Format that the file is read as.
            is_copy: True for a file that was published whole under the digest of its content. It is
                known by its size, so that a change of it is found where a record is read.
        """
        self._parts, self._is_copy = tuple(parts), is_copy
        self._standing = self._now()
        written = max(max(one.get("mtime_ns", 0), one.get("ctime_ns", 0)) for one in self._standing)
        self._is_settled = time.time_ns() - written > SETTLED_NS
        name = "\n".join([kind, *(str(part.resolve()) for part in parts)])
        key = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        is_small = not is_copy and sum(one["size"] for one in self._standing) < LEAST_BYTES
        self._manifest = None if cache is None or is_small else cache / f"{key}-records.json"

    def load(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return the facts and the arrays that were kept; None where the file is another one."""
        if self._manifest is None:
            return None
        try:
            manifest = files.read_manifest(self._manifest, _SCHEMA)
            if manifest is None or manifest["standing"] != self._standing:
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
            with files.writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            entries = {name: files.write_array(folder / f"{stem}-{name}.bin", held) for name, held in arrays.items()}
            content = {"schema": _SCHEMA, "path": str(self._parts[0]), "standing": self._standing}
            files.write_manifest(self._manifest, {**content, "facts": dict(facts), "arrays": entries})
        except OutputError as error:
            log.warning("%s: the next start reads %s again", error, self._parts[0])
            return False
        return True

    def changed(self) -> bool:
        """Return whether the file stands otherwise on disk than before anything read it."""
        try:
            return self._standing != self._now()
        except OSError:  # it is gone
            return True

    def _now(self) -> list[dict[str, int]]:
        return [{"size": part.stat().st_size} if self._is_copy else standing(part) for part in self._parts]

    @property
    def where(self) -> str:
        """Where facts are kept."""
        return str(self._manifest)

    def discard(self) -> None:
        """Forget what is kept, since it is not what the file holds."""
        if self._manifest is not None:
            try:
                self._manifest.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s: it is not what %s holds, and every start finds that again", error, self._parts[0])


def standing(path: Path) -> dict[str, int]:
    """Return a file's size, times and inode: any write, rename or change of times changes them."""
    stat = path.stat()
    return {
        "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino,
    }  # fmt: skip


def audited(num_records: int) -> list[int]:
    """Return the records that a start compares: spread over the file, the first and the last."""
    count = min(AUDITED, num_records)
    return sorted({place * (num_records - 1) // max(count - 1, 1) for place in range(count)})
