"""
Calibrations of a run on disk, beside its plans: a file for each machine, number of ranks and way to
train, in `calibrations/`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import cattrs

from packplan.adapters import files
from packplan.core.errors import CorruptArtefactError
from packplan.core.fingerprint import Fingerprint
from packplan.core.forecast import CPU, Calibration

SCHEMA = "packplan calibration 1"

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


def num_cores() -> int:
    """Return the cores that a rank computes on: threads of OMP_NUM_THREADS, else all."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) else os.cpu_count() or 1


class DiskCalibrationStore:
    """Keeps the calibrations of a run in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[tuple[Fingerprint, Calibration]]:
        """Yield each stored calibration and what it holds for; CorruptArtefactError if damaged."""
        for file in sorted(self._folder.glob("*.json")):
            try:
                manifest = files.read_manifest(file, SCHEMA)
            except CorruptArtefactError as error:
                raise CorruptArtefactError(error.path, error.reason, "delete it, and calibrate again") from None
            if manifest is not None:
                yield Fingerprint(manifest["fingerprint"]), cattrs.structure(manifest["calibration"], Calibration)

    def save(self, key: Fingerprint, calibration: Calibration) -> None:
        """
        Save so that readers see the whole calibration or none of it.

        Args:
            key: Everything that it depends on.
            calibration: Measured steps.
        """
        with files.writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "fingerprint": dict(key.inputs), "calibration": cattrs.unstructure(calibration)}
        files.write_manifest(self._folder / f"{key.digest[:16]}.json", content)
