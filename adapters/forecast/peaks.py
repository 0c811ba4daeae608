"""Peaks of memory on disk, beside the plans of a run: a file for each way to train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from packplan.adapters import files
from packplan.core.fingerprint import Fingerprint

SCHEMA = "packplan memory 2"


class DiskPeakStore:
    """Keeps the peaks of a run's step in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: Fingerprint) -> dict[int, int]:
        """
        Return traced packs: tokens -> peak in bytes. CorruptArtefactError if they are damaged.

        Args:
            key: Everything that they depend on; without such peaks, the result is empty.
        """
        manifest = files.read_manifest(self._path(key), SCHEMA)
        return {} if manifest is None else {int(tokens): int(peak) for tokens, peak in manifest["peaks"].items()}

    def save(self, key: Fingerprint, peaks: Mapping[int, int]) -> None:
        """
        Save peaks, whole or not at all.

        Args:
            key: Everything that they depend on.
            peaks: Tokens of a pack -> bytes of a rank.
        """
        with files.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "fingerprint": dict(key.inputs), "peaks": {str(one): peaks[one] for one in peaks}}
        files.write_manifest(self._path(key), content)

    def _path(self, key: Fingerprint) -> Path:
        return self._folder / f"{key.digest[:16]}.json"
