"""Resume states: run and progress of a checkpoint, which are checked before they are believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from packplan.core.errors import CorruptArtefactError, Difference, StaleError
from packplan.core.fingerprint import NO_IDENTITY, Fingerprint, RunIdentity
from packplan.core.schedule.schedule import EpochSchedule, Progress

DAMAGED = "name another checkpoint"
"""Remedy for a damaged state."""


@attrs.frozen
class ResumeState:
    """Progress and plan in a checkpoint, by which a resume continues or is refused."""

    plan: str
    """Checksum of the raw plan."""

    data: str
    """Digest of the data set."""

    seed: int
    """Seed of the order of packs."""

    shuffle: bool

    tuner: str
    """Trained weights: `full` or `lora`."""

    order_version: int
    """`ORDER_VERSION` of the run."""

    progress: Progress

    grouping: str = ""
    """`EpochSchedule.grouping`; empty without grouping."""

    inputs: Mapping[str, Any] = attrs.field(factory=dict)
    """Inputs of the plan by name, to tell why it is another one; empty where they are unknown."""

    identity: RunIdentity = NO_IDENTITY
    """Model, loss and settings of the run."""

    def differences(self, now: ResumeState) -> tuple[Difference, ...]:
        """
        Return the fields in which the current state *now* differs from this stored one, and the
        inputs that make its plan another one.
        """
        names = ("plan", "data", "seed", "shuffle", "tuner", "order_version", "grouping")
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in names]
        found = tuple(Difference(name, then, current) for name, then, current in pairs if then != current)
        found += self.identity.fixed.differences(now.identity.fixed)
        if self.plan == now.plan or not (self.inputs and now.inputs):
            return found
        return (*found, *Fingerprint(self.inputs).differences(Fingerprint(now.inputs)))


def resumed(schedule: EpochSchedule, then: ResumeState, now: ResumeState, *, where: str) -> EpochSchedule:
    """
    Return a schedule that goes on from a stored state.

    Args:
        schedule: Order of packs, perhaps on another number of ranks.
        then: The stored state.
        now: State of this run.
        where: Name of the stored state in messages.

    Raises:
        StaleError: It is of another plan, order or run.
        CorruptArtefactError: The stored numbers contradict each other, or the packs.
    """
    if differences := then.differences(now):
        raise StaleError.plan(where, differences)
    return require_start(attrs.evolve(schedule, start=then.progress), where=where)


def require_start(schedule: EpochSchedule, *, where: str) -> EpochSchedule:
    """Return a schedule; CorruptArtefactError about *where* if it cannot start where it does."""
    if (fault := schedule.start_fault()) is not None:
        raise CorruptArtefactError(where, fault, DAMAGED)
    return schedule
