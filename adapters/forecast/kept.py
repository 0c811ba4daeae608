"""Calibrations of a run on disk, beside its plans: a JSON file for each way to train."""

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


class DiskCalibrations:
    """Keeps calibrations of a run in a folder, each under all that it depends on."""

    SCHEMA = "packplan calibration 1"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[tuple[Fingerprint, Mapping[str, Any]]]:
        """Yield each key, and what is stored under it; CorruptArtefactError if it is damaged."""
        for file in sorted(self._folder.glob("*.json")):
            try:
                manifest = files.read_manifest(file, self.SCHEMA)
            except CorruptArtefactError as error:
                raise CorruptArtefactError(error.path, error.reason, "delete it, and measure again") from None
            if manifest is not None:
                yield Fingerprint(manifest["fingerprint"]), manifest["calibration"]

    def save(self, key: Fingerprint, measured: Mapping[str, Any]) -> None:
        """
        Save so that readers see all that was measured, or nothing.

        Args:
            key: All that it depends on.
            measured: Values that JSON knows.
        """
        with files.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": self.SCHEMA, "fingerprint": dict(key.inputs), "calibration": dict(measured)}
        files.write_manifest(self._folder / f"{key.digest[:16]}.json", content)
