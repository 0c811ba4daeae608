"""Measurements of a run on disk, beside its plans: a JSON file for each way to train."""

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packplan.adapters import files
from packplan.core.errors import CorruptArtefactError
from packplan.core.fingerprint import Fingerprint

CPU = "CPU"

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder in which the driver of NVIDIA's GPUs describes each of them."""


def device_name(*, on_cpu: bool) -> str:
    """Return the name of the machine's first GPU, or CPU; read without torch."""
    for file in () if on_cpu else sorted(_GPUS.glob("*/information")):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return CPU


def machine_name() -> str:
    """Return the name of this machine in its network."""
    return platform.node() or "this machine"


class DiskMeasurements:
    """Keeps measurements of one kind in a folder, each under all that it depends on."""

    def __init__(self, folder: Path, *, schema: str, field: str) -> None:
        self._folder, self._schema, self._field = folder, schema, field

    def entries(self) -> Iterator[tuple[Fingerprint, Mapping[str, Any]]]:
        """Yield each key, and what is stored under it; CorruptArtefactError if it is damaged."""
        for file in sorted(self._folder.glob("*.json")):
            yield from self._read(file)

    def load(self, key: Fingerprint) -> Mapping[str, Any]:
        """Return what is stored under a key, or nothing; CorruptArtefactError if it is damaged."""
        return next((measured for _, measured in self._read(self._path(key))), {})

    def save(self, key: Fingerprint, measured: Mapping[str, Any]) -> None:
        """
        Save so that readers see all that was measured, or nothing.

        Args:
            key: All that it depends on.
            measured: Values that JSON knows.
        """
        with files.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": self._schema, "fingerprint": dict(key.inputs), self._field: dict(measured)}
        files.write_manifest(self._path(key), content)

    def _read(self, file: Path) -> Iterator[tuple[Fingerprint, Mapping[str, Any]]]:
        try:
            manifest = files.read_manifest(file, self._schema)
        except CorruptArtefactError as error:
            raise CorruptArtefactError(error.path, error.reason, "delete it, and measure again") from None
        if manifest is not None:
            yield Fingerprint(manifest["fingerprint"]), manifest[self._field]

    def _path(self, key: Fingerprint) -> Path:
        return self._folder / f"{key.digest[:16]}.json"
