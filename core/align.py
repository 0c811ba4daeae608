"""Raw plan -> aligned plan: what the ranks of one world size consume."""

from __future__ import annotations

import attrs
import numpy as np

from core.errors import PlanTooShortError
from core.lengths import IntArray, positive
from core.packs import Packs, concatenate
from core.plan import RawPlan


@attrs.frozen
class AlignedPlan:
    """Packs whose number every rank divides."""

    packs: Packs
    """The raw plan's packs, cut at the end or filled from the front."""

    world_size: int
    """Data-parallel learners."""

    num_raw_packs: int

    repeated: tuple[int, ...]
    """Positions in the raw plan of the packs that fill the end, in order."""

    num_dropped: int
    """Packs cut from the end of the raw plan."""

    @property
    def pad_needed(self) -> int:
        """Packs added at the end."""
        return len(self.repeated)

    @property
    def per_rank(self) -> int:
        """Packs each rank consumes in an epoch."""
        return len(self.packs) // self.world_size


def align_plan(raw_plan: RawPlan, *, world_size: int, dataloader_drop_last: bool) -> AlignedPlan:
    """
    Cut or fill the plan's end, so that every rank runs the same number of packs.

    Args:
        raw_plan: Packs in canonical order; at least one.

        world_size: Data-parallel learners, >= 1.

        dataloader_drop_last: Drop the remainder if true, else repeat packs from the front, cyclically.

    Raises:
        PlanTooShortError: No pack, or dropping would leave none.

    >>> from core.plan import build_raw_plan
    >>> plan = build_raw_plan([5, 5, 5], packing_length=5)
    >>> align_plan(plan, world_size=2, dataloader_drop_last=False).packs.tolist()
    [[0], [1], [2], [0]]
    """
    world_size = positive("world_size", world_size)
    packs = raw_plan.packs
    positions = aligned_positions(len(packs), world_size, dataloader_drop_last)
    if not positions.size:
        raise PlanTooShortError(len(packs), world_size)
    repeated = positions[len(packs) :]
    kept = packs[: positions.size - repeated.size]
    return AlignedPlan(
        packs=concatenate([kept, packs.take(repeated)]) if repeated.size else kept,
        world_size=world_size,
        num_raw_packs=len(packs),
        repeated=tuple(repeated.tolist()),
        num_dropped=len(packs) - len(kept),
    )


def aligned_positions(num: int, world_size: int, drop_last: bool) -> IntArray:  # noqa: FBT001  # three plain values
    """
    Return the numbers below *num*, cut at the end or repeated from the front until the ranks divide them.

    >>> aligned_positions(3, 2, False).tolist(), aligned_positions(3, 2, True).tolist()
    ([0, 1, 2, 0], [0, 1])
    """
    if drop_last or not num:
        return np.arange(num - num % world_size)
    return np.arange(num + -num % world_size) % num
