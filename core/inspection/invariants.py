"""
Invariants of every plan, checked against the lengths of its samples; and where a sample lies in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Literal

import attrs
import numpy as np

from packplan.core.errors import agree, counted
from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.packs import Packs
from packplan.core.plan import RawPlan, min_load
from packplan.core.schedule import EpochSchedule


def plan_faults(
    plan: RawPlan,
    lengths: Lengths,
    *,
    packed: bool = True,
    min_fill_ratio: float | str | Decimal | None = None,
) -> Iterator[str]:
    """
    Yield every invariant that a plan breaks, with the first place.

    Each sample is exactly once in a pack, dropped, or skipped. Packs are in canonical order and
    within the packing length. A long sample is alone. The fill filter keeps packs at or above the
    ratio, and drops those below. Counts are those of the packs.

    Args:
        plan: Plan to check.
        lengths: Tokens of each record, 0 for one that is no sample.
        packed: Whether samples share packs; if not, each is alone, whatever its length.
        min_fill_ratio: Ratio of the fill filter; None if no pack may be dropped.
    """
    array = as_lengths(lengths, least=0)
    everywhere = np.concatenate(
        [plan.packs.indices, plan.dropped_packs.indices, np.array(plan.skipped_long, dtype=np.int64)]
    )
    is_sample = array > 0
    if is_sample.sum() != plan.num_samples:
        num_lengths = counted(int(is_sample.sum()), "length")
        yield f"the plan is of {counted(plan.num_samples, 'sample')}, but there are {num_lengths}"
    if everywhere.size and not 0 <= everywhere.min() <= everywhere.max() < array.size:
        yield (
            f"sample {everywhere.max() if everywhere.min() >= 0 else everywhere.min()} is in the plan, but has no "
            "length"
        )
        return
    times = np.bincount(everywhere, minlength=array.size)
    wrong = np.flatnonzero(times != is_sample)
    if wrong.size:
        yield (
            f"{counted(wrong.size, 'sample')} {agree(wrong.size)} not in the plan exactly once: sample {wrong[0]} is "
            f"{times[wrong[0]]} times"
        )
    yield from _order_faults(plan.packs, "pack")
    yield from _order_faults(plan.dropped_packs, "dropped pack")
    yield from _budget_faults(plan, array, packed=packed)
    if packed:
        yield from _filter_faults(plan, array, min_fill_ratio)
    yield from _count_faults(plan, array)


def _order_faults(packs: Packs, what: str) -> Iterator[str]:
    """
    Yield faults of the canonical order: samples ascend in a pack, packs by their first sample.
    """
    ascending = np.diff(packs.indices) > 0
    ascending[packs.offsets[1:-1] - 1] = True
    if not ascending.all():
        pack = int(np.searchsorted(packs.offsets, np.argmin(ascending), side="right")) - 1
        yield f"the samples of {what} {pack} do not ascend"
    firsts = packs.indices[packs.offsets[:-1]]
    if (np.diff(firsts) <= 0).any():
        yield f"{what} {int(np.argmax(np.diff(firsts) <= 0)) + 1} starts before the one in front of it"


def _budget_faults(plan: RawPlan, lengths: IntArray, *, packed: bool) -> Iterator[str]:
    is_long = np.flatnonzero(lengths >= plan.packing_length)
    named = np.sort(np.array([*plan.single_long, *plan.skipped_long], dtype=np.int64))
    if named.tolist() != is_long.tolist():
        yield (
            f"{counted(named.size, 'sample')} {agree(named.size)} named as long, but {is_long.size:,} "
            f"{agree(is_long.size, 'has', 'have')} {counted(plan.packing_length, 'token')} or more"
        )
    for packs, what in ((plan.packs, "pack"), (plan.dropped_packs, "dropped pack")):
        several, loads = packs.sizes() > 1, packs.loads(lengths)
        if not packed and several.any():
            yield f"{what} {int(np.argmax(several))} has several samples, though samples share no packs"
        over = several & (loads > plan.packing_length)
        if over.any():
            pack = int(np.argmax(over))
            yield f"{what} {pack} holds {loads[pack]:,} tokens, over its budget of {plan.packing_length:,}"


def _filter_faults(plan: RawPlan, lengths: IntArray, ratio: float | str | Decimal | None) -> Iterator[str]:
    least = 0 if ratio is None else min_load(ratio, plan.packing_length)
    under = plan.packs.loads(lengths) < least
    if under.any():
        yield f"pack {int(np.argmax(under))} is filled below {ratio}, but was kept"
    enough = plan.dropped_packs.loads(lengths) >= least
    if enough.any():
        yield f"dropped pack {int(np.argmax(enough))} is not filled below {ratio}, but was dropped"


def _count_faults(plan: RawPlan, lengths: IntArray) -> Iterator[str]:
    """Yield every count of a plan that differs from its packs."""
    counts = {
        "num_tokens": lengths.sum(),
        "planned_tokens": lengths[plan.packs.indices].sum(),
        "dropped_tokens": lengths[plan.dropped_packs.indices].sum(),
        "skipped_tokens": lengths[list(plan.skipped_long)].sum(),
        "long_tokens": lengths[list(plan.single_long)].sum(),
    }
    for name, found in counts.items():
        if int(found) != getattr(plan, name):
            yield f"{name} is {getattr(plan, name):,}, but the packs give {int(found):,}"
    if plan.lower_bound > len(plan.packs) + len(plan.dropped_packs):
        yield (
            f"lower_bound is {plan.lower_bound:,}, but the plan has "
            f"{counted(len(plan.packs) + len(plan.dropped_packs), 'pack')}"
        )


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
