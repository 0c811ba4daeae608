"""What is stored, and the data that it was made from."""

from __future__ import annotations

import attrs

from packplan.core.errors.base import Difference, UserError, VerificationError
from packplan.core.errors.words import counted


@attrs.define(eq=False)
class StaleLengthsError(UserError):
    """Stored lengths were measured from other inputs."""

    where: str
    differences: tuple[Difference, ...]
    borrowed: bool = False
    """Whether they are another run's, which training.packing_lengths_from names."""

    def _text(self) -> str:
        head = f"the lengths in {self.where} were measured from other inputs"
        tail = (
            "restore the inputs, or remove training.packing_lengths_from to measure here"
            if self.borrowed
            else "use another training.output_dir, restore the inputs, or delete that folder to measure again "
            "(checkpoints lie elsewhere and stay)"
        )
        return "\n  ".join([f"{head}:", *map(str, self.differences), tail])


@attrs.define(eq=False)
class PlanChangedError(UserError):
    """A checkpoint was trained from another plan."""

    checkpoint: str
    differences: tuple[Difference, ...]

    def _text(self) -> str:
        head = f"{self.checkpoint} was trained from another plan or in another way, so this run cannot go on with it"
        ways = []
        keys = {difference.key for difference in self.differences}
        if "order_version" in keys:
            ways.append("this version trains packs in another order: install the one that wrote the checkpoint")
        if keys - {"order_version"}:
            ways.append("restore the data and the settings")
        again = "start again from its weights: set model.model to it, and remove training.resume_from_checkpoint"
        return "\n  ".join([f"{head}:", *map(str, self.differences), f"{' and '.join(ways)}, or {again}"])


@attrs.define(eq=False)
class ChangedImageError(UserError):
    """An image is not the one that was measured."""

    index: int
    image: int
    differences: tuple[Difference, ...]

    def _text(self) -> str:
        changes = "; ".join(map(str, self.differences))
        return (
            f"image {self.image} of sample {self.index} is not the one that was measured: {changes}. Restore it, or "
            "use "
            "another training.output_dir to measure and plan again"
        )


@attrs.define(eq=False)
class ContractError(UserError):
    """A fetched sample is not the sample that was planned."""

    index: int
    record: str
    differences: tuple[Difference, ...]
    cause: str = (
        "The data changed after it was measured: restore it, or use another training.output_dir to measure and plan "
        "again"
    )
    """What happened, and what to do, as a sentence without its full stop."""

    def _text(self) -> str:
        changes = "; ".join(f"{d.key} planned {d.stored}, fetched {d.current}" for d in self.differences)
        return f"sample {self.index} ({self.record}) is not the one that was planned: {changes}. {self.cause}"


@attrs.define(eq=False)
class NotBuiltError(UserError):
    """What is to be looked at is not stored."""

    folder: str
    reason: str

    def _text(self) -> str:
        return f"{self.folder} {self.reason}: packplan plan build measures and plans"


@attrs.define(eq=False)
class LockedError(UserError):
    """Another job writes the same folder."""

    folder: str
    holder: str
    limit_s: float
    """Seconds that a run waits, for all that it waits for."""

    def _text(self) -> str:
        return (
            f"{self.folder} is being written by {self.holder}, and this run has waited {self.limit_s:,g} s in all: "
            "wait until "
            "it is done, end it, use another training.output_dir, or raise training.packing_wait_timeout_s"
        )


@attrs.define(eq=False)
class CorruptArtefactError(VerificationError):
    """A stored file is not what was written."""

    path: str
    reason: str
    remedy: str = "delete its folder to measure and plan again"

    def _text(self) -> str:
        return f"{self.path} is damaged: {self.reason}; {self.remedy}"


@attrs.define(eq=False)
class UnsoundError(VerificationError):
    """Artefacts or data are not what was measured and planned."""

    num_findings: int

    def _text(self) -> str:
        findings = counted(self.num_findings, "finding")
        return f"{findings}: what is stored is not what training would use"
