"""What ends a run that has begun: its ranks, processes and numbers."""

from __future__ import annotations

import attrs

from packplan.core.errors.base import RankDifference, UserError, VerificationError
from packplan.core.errors.words import in_ranges


@attrs.define(eq=False)
class RankGoneError(UserError):
    """Another rank did not respond in time."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class RankZeroError(UserError):
    """Rank 0 failed, died, or was too slow, while this rank waited for its plan."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class LostProcessError(UserError):
    """A process that measures samples, or loads them for training, ended before its time."""

    doing: str
    """What it did: `loading data`."""

    reason: str
    remedy: str
    """What to do, as a sentence without its full stop."""

    def _text(self) -> str:
        return f"{self.doing} failed: {self.reason}. {self.remedy}"


@attrs.define(eq=False)
class NotFiniteError(UserError):
    """A loss or a gradient is no finite number, or the weights are ruined."""

    what: str
    number: float

    consequence: str = (
        "the policy was not updated and not saved: lower training.learning_rate, and look at what grpo.reward and "
        "grpo.loss give"
    )

    def _text(self) -> str:
        return f"{self.what} is {self.number}, so {self.consequence}"


@attrs.define(eq=False)
class DifferentRunsError(UserError):
    """Ranks were given different configurations, weights or versions of packages."""

    differences: tuple[RankDifference, ...]

    def _text(self) -> str:
        head = "ranks were given different runs"
        remedy = "start all of them with the same YAML, options, model and packages"
        return "\n  ".join([f"{head}:", *map(str, self.differences), remedy])


@attrs.define(eq=False)
class RanksDisagreeError(VerificationError):
    """Ranks hold different values of what must be equal."""

    what: str
    values: tuple[str, ...]

    def _text(self) -> str:
        rows = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(self.values))
        return f"ranks disagree on {self.what}: {rows}"


@attrs.define(eq=False)
class CoverageError(VerificationError):
    """A rank consumed other packs than its share."""

    what: str
    """What was consumed: training's epoch, or an evaluation."""

    missing: tuple[int, ...]
    """Packs that were not consumed, or not often enough."""

    surplus: tuple[int, ...]
    """Packs that were consumed too often."""

    def _text(self) -> str:
        missing, surplus = (in_ranges(packs, most=10) or "none" for packs in (self.missing, self.surplus))
        return f"{self.what} did not consume what was planned: packs missing {missing}, packs in excess {surplus}"
