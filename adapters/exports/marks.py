"""The mark of its plan that every export carries."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from packplan.adapters.exports.packs import load_pyarrow
from packplan.core.errors import ArgumentError
from packplan.core.surface import Plan

_CHECKSUM, _LENGTH = b"packplan_checksum", b"packplan_packing_length"
"""Keys of the metadata of an Arrow or Parquet schema."""

INFO = Path("train", "dataset_info.json")
"""File of a `datasets` folder whose description holds the mark."""


@attrs.frozen
class ExportedPlan:
    """Plan that an export was made from."""

    checksum: str
    """Checksum of the plan, as `Plan.checksum` has it."""

    packing_length: int
    """Tokens that a pack of several samples may hold."""

    @classmethod
    def from_plan(cls, plan: Plan) -> ExportedPlan:
        """Return the mark of *plan*."""
        return cls(plan.checksum, plan.raw.packing_length)

    def metadata(self) -> dict[bytes, bytes]:
        """Return the entries for the metadata of a schema."""
        return {_CHECKSUM: self.checksum.encode(), _LENGTH: str(self.packing_length).encode()}

    def description(self) -> str:
        """Return the description of a `datasets` folder: these fields as JSON."""
        return json.dumps({f"packplan_{name}": value for name, value in attrs.asdict(self).items()})


def exported_plan(path: str | Path) -> ExportedPlan:
    """
    Return the plan of a Parquet file or `datasets` folder that was exported here.

    Raises:
        ArgumentError: It is none of ours, or there is none.
    """
    path = Path(path)
    pyarrow = load_pyarrow()
    try:
        if path.is_dir():
            found = json.loads(json.loads((path / INFO).read_text(encoding="utf-8"))["description"])
            return ExportedPlan(found["packplan_checksum"], found["packplan_packing_length"])
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        return ExportedPlan(metadata[_CHECKSUM].decode(), int(metadata[_LENGTH]))
    except (OSError, ValueError, KeyError, TypeError):
        fact = f"{path} is no export of a plan: it carries no checksum of one"
        raise ArgumentError("host", fact, {"path": str(path)}) from None
