"""
Measured lengths on disk: `lengths.bin`, rows of little-endian int32, beside the manifest `lengths.json`.

Rows are appended and flushed first, the manifest that counts and digests them follows: what a manifest names is
whole, and what a crash leaves behind it is cut off on resuming. A flush costs what is new. The data of the rows
measured so far is digested with them: rows appended to it, or mended behind them, leave them valid.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adapters import artefacts
from core.errors import CorruptArtefactError, Difference, StaleLengthsError
from core.fingerprint import Fingerprint
from core.samples import COLUMNS, Table

SCHEMA = "packplan lengths 1"

_DTYPE = np.dtype("<i4")


class DiskLengthStore:
    """A `core.ports.LengthStore` in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = folder / "lengths.json"
        self._rows = folder / "lengths.bin"
        self._hash = hashlib.sha256()
        self._num_measured = 0
        self._key: Fingerprint | None = None
        self._num_samples = 0

    def resume(self, key: Fingerprint, num_samples: int, data_digest: Callable[[int], str]) -> Table:
        """Return the rows measured so far under *key*; see `core.ports.LengthStore`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key, self._num_samples = key, num_samples
        self._hash, self._num_measured = hashlib.sha256(), 0
        manifest = artefacts.read_manifest(self._manifest, SCHEMA)
        if manifest is None:
            self._rows.write_bytes(b"")
            return np.zeros((0, len(COLUMNS)), dtype=np.int32)
        differences = Fingerprint(manifest["fingerprint"]).differences(key)
        measured = manifest["num_measured"]
        if measured > num_samples:
            differences += (Difference("data.records", measured, num_samples),)
        elif (current := data_digest(measured)) != manifest["data_sha256"]:
            differences += (Difference(f"data.sha256 of the first {measured:,}", manifest["data_sha256"], current),)
        if differences:
            raise StaleLengthsError(str(self.folder), differences)
        size = measured * len(COLUMNS) * _DTYPE.itemsize
        found = self._rows.stat().st_size if self._rows.is_file() else 0
        if found < size:
            raise CorruptArtefactError(str(self._rows), f"it has {found:,} bytes, but its manifest names {size:,}")
        with self._rows.open("rb") as file:
            data = file.read(size)
        self._hash.update(data)
        if self._hash.hexdigest() != manifest["sha256"]:
            raise CorruptArtefactError(str(self._rows), "its content does not match the manifest's digest")
        if found > size:
            os.truncate(self._rows, size)
        self._num_measured = measured
        return np.frombuffer(data, dtype=_DTYPE).reshape(-1, len(COLUMNS))

    def append(self, rows: Table, data_digest: str) -> None:
        """Add the next rows; readers see all of them or none; *data_digest* is of all samples so far."""
        assert self._key is not None  # noqa: S101  # `resume` comes first
        data = np.ascontiguousarray(rows, dtype=_DTYPE).tobytes()
        with self._rows.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._hash.update(data)
        self._num_measured += len(rows)
        artefacts.write_manifest(
            self._manifest,
            {
                "schema": SCHEMA,
                "fingerprint": dict(self._key.inputs),
                "fingerprint_sha256": self._key.digest,
                "num_samples": self._num_samples,
                "data_sha256": data_digest,
                "num_measured": self._num_measured,
                "columns": list(COLUMNS),
                "dtype": _DTYPE.str,
                "file": self._rows.name,
                "sha256": self._hash.hexdigest(),
            },
        )

    def discard(self) -> None:
        """Forget all rows: the manifest goes first, so that no reader trusts them meanwhile."""
        self._manifest.unlink(missing_ok=True)
        artefacts.sync_folder(self.folder)
        self._rows.write_bytes(b"")
        self._hash, self._num_measured = hashlib.sha256(), 0

    def digest(self) -> str:
        """Return the SHA-256 hex digest of all rows."""
        return self._hash.hexdigest()
