"""
Start of a run that continues another one, on disk: `continued.json` and the visits of each record.

It is made once, so that the other run may go on or be deleted.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np

from packplan.adapters import files
from packplan.core.errors import CorruptArtefactError, Difference
from packplan.core.fingerprint import Fingerprint
from packplan.core.schedule import Continuation, Visits

SCHEMA = "packplan continued 1"

_ARRAYS = ("total", "epoch")


class DiskContinuation:
    """The start in a folder of a split."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = folder / "continued.json"

    def load(self, key: Fingerprint) -> tuple[Continuation | None, tuple[Difference, ...]]:
        """
        Return the start that was saved, and the differences between its inputs and those of a key;
        CorruptArtefactError if it is damaged.
        """
        try:
            return self._load(key)
        except CorruptArtefactError as error:
            remedy = f"delete {self._manifest}, and it is read again from training.continue_from"
            raise CorruptArtefactError(error.path, error.reason, remedy) from None

    def _load(self, key: Fingerprint) -> tuple[Continuation | None, tuple[Difference, ...]]:
        manifest = files.read_manifest(self._manifest, SCHEMA)
        if manifest is None:
            return None, ()
        inputs = {name: value for name, value in manifest["fingerprint"].items() if name in key.inputs}
        total, epoch = (files.read_array(self.folder, manifest["arrays"][name]) for name in _ARRAYS)
        names = (field.name for field in attrs.fields(Continuation) if field.name != "visits")
        start = Continuation(**{name: manifest[name] for name in names}, visits=Visits(total, epoch))
        return start, Fingerprint(inputs).differences(key)

    def save(self, key: Fingerprint, start: Continuation) -> None:
        """
        Save a start so that readers see the whole of it or none.

        Args:
            key: Inputs that it was made from.
            start: The start.
        """
        self._manifest.unlink(missing_ok=True)
        arrays = {
            name: files.write_array(self.folder / f"continued.{name}.bin", getattr(start.visits, name).astype(np.int32))
            for name in _ARRAYS
        }
        facts = attrs.asdict(start, filter=lambda field, _: field.name != "visits")
        content = {"schema": SCHEMA, "fingerprint": dict(key.inputs), **facts, "arrays": arrays}
        files.write_manifest(self._manifest, content)
