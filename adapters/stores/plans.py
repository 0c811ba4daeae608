"""
Stores a plan as `raw_plan.json` with its arrays, and `plan_ws<W>.json` for each world size W.

If each epoch has its own plan, only the first plan is stored, and `schedule_ws<W>.json` has a
record of each epoch.

The arrays are published first, and the manifest with their digests is published last. So a reader
finds a whole plan or none. `verdict.json`, in the folder above those of the splits, has the probe's
verdict on the run's model.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import cattrs
import numpy as np
from cattrs.errors import BaseValidationError

from packplan.adapters import files
from packplan.adapters.stores.lengths import collect_damage
from packplan.core.align import AlignedPlan, align_plan
from packplan.core.epochs import EpochRecord
from packplan.core.equality import PackingVerdict
from packplan.core.errors import ArgumentError, CorruptArtefactError
from packplan.core.fingerprint import Fingerprint
from packplan.core.packs import plan_checksum
from packplan.core.plan import RawPlan, plan_from_arrays, plan_to_arrays
from packplan.core.ports import StoredPlan
from packplan.core.schedule import EpochSchedule

log = logging.getLogger(__name__)

SCHEMA = "packplan raw plan 3"

ALIGNED_SCHEMA = "packplan aligned plan 1"

EPOCHS_SCHEMA = "packplan epochs 1"

VERDICT_SCHEMA = "packplan verdict 2"


_COUNTED = (
    "lower_bound", "bound_kind", "packing_length", "num_samples", "num_tokens", "planned_tokens", "dropped_tokens",
    "skipped_tokens",
)  # fmt: skip
"""Fields of `RawPlan` that its manifest stores under the same names."""


@contextmanager
def _advise_to_delete(path: Path) -> Iterator[None]:
    """Add the advice to delete *path* to any CorruptArtefactError in this context."""
    try:
        yield
    except CorruptArtefactError as error:
        remedy = f"delete {path}: the next run writes it again, and the lengths stay valid"
        raise CorruptArtefactError(error.path, error.reason, remedy) from None


class DiskPlanStore:
    """Stores a raw plan, its aligned plans and the records of its epochs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = folder / "raw_plan.json"

    def load(self, key: Fingerprint) -> RawPlan | None:
        """
        Return the plan saved under *key*, if any; CorruptArtefactError if the plan is damaged.
        """
        with _advise_to_delete(self._manifest):
            manifest = files.read_manifest(self._manifest, SCHEMA)
            if manifest is None:
                return None
            if differences := Fingerprint(manifest["fingerprint"]).differences(key):
                log.info("the stored plan does not fit this run: %s", "; ".join(map(str, differences)))
                return None
            return self._read_plan(manifest)

    def inspect(self) -> StoredPlan | None:
        """
        Verify and return the stored plan, whatever its key; None if there is none.

        No file is written.
        """
        with _advise_to_delete(self._manifest):
            manifest = files.read_manifest(self._manifest, SCHEMA)
            if manifest is None:
                return None
            key = Fingerprint(manifest["fingerprint"])
            plan = self._read_plan(manifest)
        aligned = [self._read_aligned_manifest(path) for path in self._aligned_manifests()]
        sizes = [one["world_size"] for one in aligned if one and one["plan_fingerprint_sha256"] == key.digest]
        return StoredPlan(key, plan, tuple(sorted(sizes)), self.load_epochs(key))

    def _read_aligned_manifest(self, path: Path) -> dict[str, Any] | None:
        with _advise_to_delete(path):
            return files.read_manifest(path, ALIGNED_SCHEMA)

    def damage(self) -> list[CorruptArtefactError]:
        """Return an error for each file that is damaged or does not match the raw plan."""
        found: list[CorruptArtefactError] = []
        plan, manifest = None, None
        with collect_damage(found):
            manifest = files.read_manifest(self._manifest, SCHEMA)
        for entry in manifest["arrays"].values() if manifest else ():
            with collect_damage(found):
                files.read_array(self.folder, entry)
        if manifest and not found:
            with collect_damage(found):
                plan = self._read_plan(manifest)
        for path in self._aligned_manifests():
            with collect_damage(found):
                aligned = self._read_aligned_manifest(path)
                # Files of an earlier plan are kept, but never taken for files of this plan.
                key = manifest and manifest["fingerprint_sha256"]
                if plan and aligned and aligned["plan_fingerprint_sha256"] == key:
                    _require_alignment(path, aligned, plan)
        for path in self._epoch_manifests():
            with collect_damage(found):
                _read_epochs(path)
        return found

    def save(self, key: Fingerprint, plan: RawPlan) -> None:
        """Save a plan; a reader finds the whole plan or none of it."""
        arrays = plan_to_arrays(plan)
        self._manifest.unlink(missing_ok=True)
        entries = {name: files.write_array(self.folder / f"raw_plan.{name}.bin", a) for name, a in arrays.items()}
        content = {
            "schema": SCHEMA,
            "fingerprint": dict(key.inputs),
            "fingerprint_sha256": key.digest,
            "checksum": plan_checksum(plan.packs),
            **_plan_counts(plan),
            "arrays": entries,
        }
        files.write_manifest(self._manifest, content)

    def save_aligned(self, key: Fingerprint, aligned: AlignedPlan) -> None:
        """
        Save the counts and the checksum of a plan that is aligned to one world size.

        The packs of the aligned plan are not saved, since a reader derives them from the raw plan.
        """
        content = {"schema": ALIGNED_SCHEMA, "plan_fingerprint_sha256": key.digest, **_alignment_facts(aligned)}
        files.write_manifest(self.folder / f"plan_ws{aligned.world_size}.json", content)

    def load_epochs(self, key: Fingerprint) -> tuple[EpochRecord, ...]:
        """
        Return the epoch records saved under *key*; an empty tuple if none are saved.

        If several world sizes have records, the longest list is returned. CorruptArtefactError is
        raised if a file is damaged.
        """
        stored = (_read_epochs(path) for path in self._epoch_manifests())
        return max((records for digest, records in stored if digest == key.digest), key=len, default=())

    def save_epochs(self, key: Fingerprint, records: Sequence[EpochRecord], schedule: EpochSchedule) -> None:
        """
        Save the record and the number of steps of each epoch beside the plan saved under *key*.

        Args:
            key: Fingerprint of the inputs of the plans.
            records: Record of each epoch.
            schedule: Schedule of the same epochs; its world size is a part of the file's name.
        """
        content = {
            "schema": EPOCHS_SCHEMA,
            "plan_fingerprint_sha256": key.digest,
            "fingerprint": dict(key.inputs),
            "world_size": schedule.world_size,
            "total_steps": schedule.total_steps,
            "epochs": [{**attrs.asdict(one), "steps": schedule.num_epoch_steps(one.epoch)} for one in records],
        }
        files.write_manifest(self.folder / f"schedule_ws{schedule.world_size}.json", content)

    def _epoch_manifests(self) -> list[Path]:
        return sorted(self.folder.glob("schedule_ws*.json"))

    def _aligned_manifests(self) -> list[Path]:
        return sorted(self.folder.glob("plan_ws*.json"))

    def _read_plan(self, manifest: Mapping[str, Any]) -> RawPlan:
        """
        Read the plan that a manifest describes; CorruptArtefactError if the arrays do not fit it.
        """
        arrays = {name: files.read_array(self.folder, entry) for name, entry in manifest["arrays"].items()}
        try:
            plan = plan_from_arrays(arrays)
        except (ValueError, LookupError) as error:
            raise CorruptArtefactError(str(self._manifest), f"it is not a plan: {error}") from None
        if plan_checksum(plan.packs) != manifest["checksum"]:
            raise CorruptArtefactError(str(self._manifest), "its checksum does not match its packs")
        if differing := [name for name, count in _plan_counts(plan).items() if manifest.get(name) != count]:
            raise CorruptArtefactError(str(self._manifest), f"its arrays contradict its {', '.join(differing)}")
        return plan


def _read_epochs(path: Path) -> tuple[str, tuple[EpochRecord, ...]]:
    """Read a manifest of epochs; return the digest of its fingerprint, and its records."""
    with _advise_to_delete(path):
        manifest = files.read_manifest(path, EPOCHS_SCHEMA)
        if manifest is None:
            return "", ()
        try:
            return manifest["plan_fingerprint_sha256"], cattrs.structure(manifest["epochs"], tuple[EpochRecord, ...])
        except (BaseValidationError, LookupError):
            raise CorruptArtefactError(str(path), "its records do not describe epochs") from None


def _plan_counts(plan: RawPlan) -> dict[str, int | str]:
    """Return the counts and the lower bound of a plan, with the keys of its manifest."""
    return {
        "num_packs": len(plan.packs),
        "num_single_long": len(plan.single_long),
        "num_skipped_long": len(plan.skipped_long),
        "num_dropped_packs": len(plan.dropped_packs),
        "num_dropped_samples": plan.dropped_samples,
        **{name: getattr(plan, name) for name in _COUNTED},
    }


def _alignment_facts(aligned: AlignedPlan) -> dict[str, Any]:
    """Return the counts and the checksum of an aligned plan, with the keys of its manifest."""
    needed = np.ones(0, dtype=np.int64) if aligned.degrees is None else aligned.degrees
    shared = np.flatnonzero(needed > 1)
    sharing = {"max_degree": aligned.max_degree, "degrees": np.stack([shared, needed[shared]]).tolist()}
    return {
        "checksum": plan_checksum(aligned.packs),
        "world_size": aligned.world_size,
        "dataloader_drop_last": aligned.dataloader_drop_last,
        "num_raw_packs": aligned.num_raw_packs,
        "num_aligned_packs": len(aligned.packs),
        "pad_needed": aligned.pad_needed,
        "repeated": list(aligned.repeated),
        "num_dropped": aligned.num_dropped,
        **(sharing if aligned.max_degree > 1 else {}),
    }


def _require_alignment(path: Path, manifest: Mapping[str, Any], plan: RawPlan) -> None:
    """Raise CorruptArtefactError if a manifest of an aligned plan does not match the raw plan."""
    options: dict[str, Any] = {"dataloader_drop_last": manifest["dataloader_drop_last"]}
    if "degrees" in manifest:
        options |= {"degrees": np.ones(len(plan.packs), dtype=np.int64), "max_degree": manifest["max_degree"]}
        np.put(options["degrees"], *manifest["degrees"])
    try:
        aligned = align_plan(plan, world_size=manifest["world_size"], **options)
        differing = [name for name, value in _alignment_facts(aligned).items() if manifest.get(name) != value]
    except ArgumentError as error:
        differing = [error.fact]
    if path.name != f"plan_ws{manifest['world_size']}.json":
        differing.append("file name")
    if differing:
        reason = f"it differs from the raw plan in: {', '.join(differing)}"
        raise CorruptArtefactError(str(path), reason, "delete this file: the next run writes it again")


class DiskVerdictStore:
    """Stores the verdict of the probe on a run's model in one folder."""

    def __init__(self, folder: Path) -> None:
        self._manifest = folder / "verdict.json"

    def load(self, key: Fingerprint) -> PackingVerdict | None:
        """
        Return the verdict saved under *key*, if any; CorruptArtefactError if its file is damaged.
        """
        with _advise_to_delete(self._manifest):
            manifest = files.read_manifest(self._manifest, VERDICT_SCHEMA)
        if manifest is None:
            return None
        if differences := Fingerprint(manifest["fingerprint"]).differences(key):
            log.debug("the stored verdict does not fit this run: %s", "; ".join(map(str, differences)))
            return None
        return PackingVerdict.from_dict(manifest["verdict"])

    def save(self, key: Fingerprint, verdict: PackingVerdict) -> None:
        """Save a verdict; a reader finds the whole verdict or none of it."""
        files.make_folder(self._manifest.parent)
        manifest = {"schema": VERDICT_SCHEMA, "fingerprint": dict(key.inputs), "verdict": verdict.to_dict()}
        files.write_manifest(self._manifest, manifest)
