"""
Plans on disk: `raw_plan.json` and its flat arrays, stored once, and `plan_ws<W>.json`, derived for a world size.

The arrays are published first and the manifest that digests them last, so a reader sees a whole plan or none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from adapters import artefacts
from core.align import AlignedPlan
from core.checksum import plan_checksum
from core.errors import CorruptArtefactError
from core.fingerprint import Fingerprint
from core.plan import RawPlan, plan_from_arrays, plan_to_arrays

log = logging.getLogger(__name__)

SCHEMA = "packplan raw plan 1"

ALIGNED_SCHEMA = "packplan aligned plan 1"


class DiskPlanStore:
    """A `core.ports.PlanStore` in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = folder / "raw_plan.json"

    def load(self, key: Fingerprint) -> RawPlan | None:
        """Return the plan saved under *key*, or None if there is none; CorruptArtefactError if damaged."""
        try:
            return self._load(key)
        except CorruptArtefactError as error:
            remedy = f"delete {self._manifest} to plan anew; the lengths stay"
            raise CorruptArtefactError(error.path, error.reason, remedy) from None

    def _load(self, key: Fingerprint) -> RawPlan | None:
        manifest = artefacts.read_manifest(self._manifest, SCHEMA)
        if manifest is None:
            return None
        if differences := Fingerprint(manifest["fingerprint"]).differences(key):
            log.info("the stored plan does not fit: %s", "; ".join(map(str, differences)))
            return None
        arrays = {name: artefacts.read_array(self.folder, entry) for name, entry in manifest["arrays"].items()}
        try:
            plan = plan_from_arrays(arrays)
        except (ValueError, KeyError) as error:
            raise CorruptArtefactError(str(self._manifest), f"it is no plan: {error}") from None
        if plan_checksum(plan.packs) != manifest["checksum"]:
            raise CorruptArtefactError(str(self._manifest), "its packs do not have the checksum it names")
        return plan

    def save(self, key: Fingerprint, plan: RawPlan) -> None:
        """Save so that readers see the whole plan or none of it."""
        arrays = plan_to_arrays(plan)
        checksum = plan_checksum(plan.packs)
        self._manifest.unlink(missing_ok=True)
        entries = {name: artefacts.write_array(self.folder / f"raw_plan.{name}.bin", a) for name, a in arrays.items()}
        artefacts.write_manifest(
            self._manifest,
            {
                "schema": SCHEMA,
                "fingerprint": dict(key.inputs),
                "fingerprint_sha256": key.digest,
                "checksum": checksum,
                "num_packs": len(plan.packs),
                "num_single_long": len(plan.single_long),
                "num_skipped_long": len(plan.skipped_long),
                "num_dropped_packs": len(plan.dropped_packs),
                "num_dropped_samples": plan.dropped_samples,
                "lower_bound": plan.lower_bound,
                "packing_length": plan.packing_length,
                "num_samples": plan.num_samples,
                "num_tokens": plan.num_tokens,
                "planned_tokens": plan.planned_tokens,
                "dropped_tokens": plan.dropped_tokens,
                "skipped_tokens": plan.skipped_tokens,
                "arrays": entries,
            },
        )

    def save_aligned(self, key: Fingerprint, aligned: AlignedPlan, *, drop_last: bool) -> None:
        """Say what training at one world size consumes: counts and checksums; its packs derive from the raw plan."""
        content: dict[str, Any] = {
            "schema": ALIGNED_SCHEMA,
            "plan_fingerprint_sha256": key.digest,
            "checksum": plan_checksum(aligned.packs),
            "world_size": aligned.world_size,
            "dataloader_drop_last": drop_last,
            "num_raw_packs": aligned.num_raw_packs,
            "num_aligned_packs": len(aligned.packs),
            "pad_needed": aligned.pad_needed,
            "num_dropped": aligned.num_dropped,
        }
        artefacts.write_manifest(self.folder / f"plan_ws{aligned.world_size}.json", content)
