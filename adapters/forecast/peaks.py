"""Peaks of memory on disk, beside the plans of a run: a file for each way to train."""

from __future__ import annotations

from pathlib import Path

from packplan.adapters import files
from packplan.core.fingerprint import Fingerprint

SCHEMA = "packplan memory 1"


class DiskPeakStore:
    """Keeps the peaks of a run's step in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: Fingerprint) -> int | None:
        """Return a peak in bytes; None if there is none. CorruptArtefactError if it is damaged."""
        manifest = files.read_manifest(self._path(key), SCHEMA)
        return None if manifest is None else int(manifest["peak"])

    def save(self, key: Fingerprint, peak: int) -> None:
        """
        Save a peak, whole or not at all.

        Args:
            key: Everything that it depends on.
            peak: Bytes of a rank.
        """
        with files.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "fingerprint": dict(key.inputs), "peak": peak}
        files.write_manifest(self._path(key), content)

    def _path(self, key: Fingerprint) -> Path:
        return self._folder / f"{key.digest[:16]}.json"
