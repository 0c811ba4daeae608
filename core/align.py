"""Raw plan -> aligned plan: the packs that the ranks of one world size consume."""

import attrs
import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, as_whole_number
from packplan.core.packs import AnyPacks, HasPacks, Packs, as_packs, concatenate


@attrs.frozen
class AlignedPlan(HasPacks):
    """
    Packs of all ranks of one world size: the raw plan, filled or cut at its end.

    They are saved, compared between ranks and logged. What is trained is the order of an
    `EpochSchedule`, which aligns the pack indices of each epoch by `aligned_positions` too.
    """

    packs: Packs
    """The raw plan's packs, cut at the end or filled from the front."""

    world_size: int
    """Data-parallel learners."""

    dataloader_drop_last: bool
    """
    Whether packs and padded batches that do not fill all ranks are dropped. Otherwise packs repeat.
    """

    batch_size: int
    """Packs of a rank in one forward pass."""

    num_raw_packs: int

    repeated: tuple[int, ...]
    """Pack indices, in the raw plan, of the packs that repeat at the end, in order."""

    num_dropped: int
    """
    Packs cut from the end of the raw plan. A smaller last batch, which the schedule drops too, is
    not counted.
    """

    @property
    def pad_needed(self) -> int:
        """Packs added at the end."""
        return len(self.repeated)


def align_plan(
    raw_plan: AnyPacks, *, world_size: int, dataloader_drop_last: bool = False, batch_size: int = 1
) -> AlignedPlan:
    """
    Cut or fill the plan's end, so that every rank runs the same number of packs.

    Args:
        raw_plan: The raw plan, of at least one pack; or a `Plan`, or packs alone.
        world_size: Data-parallel learners, >= 1.
        dataloader_drop_last: Drop the remainder if true, else repeat packs from the front,
            cyclically.
        batch_size: Packs of a rank in one forward pass, >= 1. Dropping the remainder also drops a
            smaller last batch.

    Raises:
        ArgumentError: No pack, or dropping would leave no batch.

    >>> from packplan.core.plan import build_raw_plan
    >>> plan = build_raw_plan([5, 5, 5], packing_length=5)
    >>> align_plan(plan, world_size=2, dataloader_drop_last=False).packs.tolist()
    [[0], [1], [2], [0]]
    """
    world_size = as_whole_number("world_size", world_size, most=MOST_RANKS)
    packs = as_packs(raw_plan)
    batch_size = as_whole_number("batch_size", batch_size)
    require_a_batch(len(packs), world_size=world_size, batch_size=batch_size, drop_last=dataloader_drop_last)
    positions = aligned_positions(len(packs), world_size, dataloader_drop_last)
    repeated = positions[len(packs) :]
    kept = packs[: positions.size - repeated.size]
    return AlignedPlan(
        packs=concatenate([kept, packs.take(repeated)]) if repeated.size else kept,
        world_size=world_size,
        dataloader_drop_last=dataloader_drop_last,
        batch_size=batch_size,
        num_raw_packs=len(packs),
        repeated=tuple(repeated.tolist()),
        num_dropped=len(packs) - len(kept),
    )


def aligned_positions(num: int, world_size: int, drop_last: bool) -> IntArray:  # noqa: FBT001  # three plain values
    """
    Return positions of *num* packs, cut at the end or repeated from the front to fill all ranks.

    Args:
        num: Number of packs, >= 0.
        world_size: Data-parallel learners, >= 1.
        drop_last: Cut at the end if true, else repeat from the front.

    >>> aligned_positions(3, 2, False).tolist(), aligned_positions(3, 2, True).tolist()
    ([0, 1, 2, 0], [0, 1])
    """
    return np.arange(aligned_size(num, world_size, drop_last)) % max(num, 1)


def aligned_size(num: int, world_size: int, drop_last: bool) -> int:  # noqa: FBT001  # three plain values
    """
    Return the number of packs after *num* packs are cut or repeated to fill all ranks.

    Args:
        num: Number of packs, >= 0.
        world_size: Data-parallel learners, >= 1.
        drop_last: Cut at the end if true, else repeat from the front.

    >>> aligned_size(3, 2, False), aligned_size(3, 2, True), aligned_size(0, 2, False)
    (4, 2, 0)
    """
    return num - num % world_size if drop_last else num + -num % world_size


def count_batches(num: int, *, batch_size: int, drop_last: bool) -> int:
    """
    Return the number of batches that one rank forms from *num* packs.

    Args:
        num: Packs of one rank, >= 0.
        batch_size: Packs of a rank in one forward pass, >= 1.
        drop_last: Whether a smaller last batch is dropped.

    >>> [count_batches(7, batch_size=3, drop_last=drop_last) for drop_last in (False, True)]
    [3, 2]
    """
    return num // batch_size if drop_last else -(-num // batch_size)


def require_a_batch(num: int, *, world_size: int, batch_size: int, drop_last: bool) -> None:
    """
    Raise an error if a plan's packs give each rank no batch in a whole epoch.

    Args:
        num: Packs of the raw plan.
        world_size: Data-parallel learners, >= 1.
        batch_size: Packs of a rank in one forward pass, >= 1.
        drop_last: Drop packs and batches that do not fill all ranks.

    Raises:
        ArgumentError: The ranks get no batch.
    """
    mine = aligned_size(num, world_size, drop_last) // world_size
    if not count_batches(mine, batch_size=batch_size, drop_last=drop_last):
        name, each = ("pack", "") if batch_size == 1 else ("sample", f" with a batch of {batch_size:,} each")
        fact = f"{counted(num, name)} cannot feed {counted(world_size, 'rank')}{each} while the remainder is dropped"
        details = {"num_packs": num, "world_size": world_size, "batch_size": batch_size}
        raise ArgumentError("too_short", fact, details)
