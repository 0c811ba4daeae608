"""
The verdict on a run's model on disk, beside its plans: `verdict.json`, which names what it depends
on.
"""

import logging
from pathlib import Path

from packplan.adapters import files
from packplan.core.equality import PackingVerdict
from packplan.core.errors import CorruptArtefactError
from packplan.core.fingerprint import Fingerprint

log = logging.getLogger(__name__)

SCHEMA = "packplan verdict 1"


class DiskVerdictStore:
    """Keeps the verdict of a run in one folder."""

    def __init__(self, folder: Path) -> None:
        self._manifest = folder / "verdict.json"

    def load(self, key: Fingerprint) -> PackingVerdict | None:
        """
        Return the verdict saved under *key*, or None; CorruptArtefactError if it is damaged.
        """
        if not self._manifest.parent.is_dir():
            return None
        try:
            manifest = files.read_manifest(self._manifest, SCHEMA)
        except CorruptArtefactError as error:
            raise CorruptArtefactError(error.path, error.reason, "delete it, and the model is asked again") from None
        if manifest is None:
            return None
        if differences := Fingerprint(manifest["fingerprint"]).differences(key):
            log.debug("the stored verdict does not fit: %s", "; ".join(map(str, differences)))
            return None
        return PackingVerdict.from_dict(manifest["verdict"])

    def save(self, key: Fingerprint, verdict: PackingVerdict) -> None:
        """Save so that readers see the whole verdict or none of it."""
        with files.writing(self._manifest.parent):
            self._manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest = {"schema": SCHEMA, "fingerprint": dict(key.inputs), "verdict": verdict.to_dict()}
        files.write_manifest(self._manifest, manifest)
