"""Raw plan -> aligned plan: what the ranks of one world size consume."""

from __future__ import annotations

import attrs
import numpy as np

from core.errors import PlanTooShortError
from core.lengths import positive
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
    remainder = len(packs) % world_size
    if not len(packs) or (dataloader_drop_last and remainder == len(packs)):
        raise PlanTooShortError(len(packs), world_size)
    num_dropped = remainder if dataloader_drop_last else 0
    pad_needed = 0 if dataloader_drop_last else -len(packs) % world_size
    repeated = np.arange(pad_needed) % len(packs)
    kept = packs[: len(packs) - num_dropped]
    return AlignedPlan(
        packs=concatenate([kept, packs.take(repeated)]) if pad_needed else kept,
        world_size=world_size,
        num_raw_packs=len(packs),
        repeated=tuple(repeated.tolist()),
        num_dropped=num_dropped,
    )
