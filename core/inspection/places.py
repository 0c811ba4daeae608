"""Where a sample lies in a plan, and when its pack is trained."""

from __future__ import annotations

from typing import Literal

import attrs
import numpy as np

from packplan.core.plan import RawPlan
from packplan.core.schedule import EpochSchedule


@attrs.frozen
class Place:
    """Place of a sample in a plan."""

    kind: Literal["packed", "long", "dropped", "skipped", "absent"]
    """
    `packed`: in a pack of training. `long`: a pack by itself since it is long. `dropped`: in a pack
    that the fill filter drops. `skipped`: in no pack since it is long. `absent`: no sample of the
    epoch.
    """

    pack: int | None
    """
    Index of the pack among the plan's packs, or among its dropped ones; None for one in no pack.
    """

    pack_members: tuple[int, ...]
    """All samples of that pack."""


@attrs.frozen
class ScheduledStep:
    """Step and rank of a pack."""

    step: int
    """Optimizer step of the epoch, from 0."""

    rank: int


def place_of(plan: RawPlan, sample: int) -> Place:
    """
    Return the place of a sample in a plan.

    Raises:
        IndexError: It is no sample of the plan.

    >>> from packplan.core.plan import build_raw_plan
    >>> place_of(build_raw_plan([60, 20, 90], packing_length=80), 1).pack_members
    (0, 1)
    """
    for packs, kind in ((plan.packs, "packed"), (plan.dropped_packs, "dropped")):
        found = np.flatnonzero(packs.indices == sample)
        if found.size:
            pack = int(np.searchsorted(packs.offsets, found[0], side="right")) - 1
            alone = kind == "packed" and sample in plan.single_long
            return Place("long" if alone else kind, pack, tuple(packs[pack]))  # type: ignore[arg-type]
    if sample in plan.skipped_long:
        return Place("skipped", None, ())
    message = f"record {sample} is no sample of the plan, which has {plan.num_samples:,}"
    raise IndexError(message)


def scheduled_steps(schedule: EpochSchedule, pack: int, *, epoch: int = 0) -> tuple[ScheduledStep, ...]:
    """
    Return when a pack of the raw plan is trained in an epoch: not at all, once, or more than once
    where packs repeat to fill the ranks.

    Args:
        schedule: Schedule over the plan.
        pack: Index of the pack.
        epoch: Epoch, from 0.
    """
    batches = schedule.num_batches(epoch) * schedule.batch_size * schedule.world_size
    places = np.flatnonzero(schedule.order(epoch)[:batches] == pack)
    per_step = schedule.world_size * schedule.batch_size * schedule.gradient_accumulation_steps
    return tuple(ScheduledStep(place // per_step, place % schedule.world_size) for place in places.tolist())
