"""Aligned plans: the raw plan's packs, cut or repeated until the number of ranks divides them."""

import attrs
import numpy as np

from packplan.core.batch import largest_degree
from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, as_whole_number
from packplan.core.packs import AnyPacks, HasPacks, Packs, as_packs, concatenate

_TOGETHER = 8
"""
Number of microbatches that are moved together, as a group. Steps of this many microbatches, or of a
divisor of this number, load the ranks alike.
"""

_CLASSES = 8
"""
Shared packs of one class of length are put together. The width of a class is an eighth of the
fewest tokens that a rank has of a shared pack.
"""


@attrs.frozen
class AlignedPlan(HasPacks):
    """
    Packs of all ranks at one world size: the raw plan, cut or filled at its end.

    An aligned plan is saved, logged and compared between ranks. Training follows the order of an
    `EpochSchedule`, which aligns each epoch in the same way (`aligned_positions`).
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

    degrees: IntArray | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal), repr=False)
    """
    Number of ranks that share each pack of the raw plan (`pack_degrees`). None shares no pack.
    """

    max_degree: int = 1
    """Most ranks that share a pack."""

    tokens: IntArray | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal), repr=False)
    """
    Tokens of each pack of the raw plan, by which shared packs are ordered. None keeps their order.
    """

    @property
    def shared_by(self) -> IntArray | None:
        """Number of ranks that share each pack of the raw plan; None if no pack is shared."""
        return None if self.degrees is None else np.minimum(self.degrees, self.max_degree)

    @property
    def pad_needed(self) -> int:
        """Number of packs that are added at the end."""
        return len(self.repeated)


def align_plan(
    raw_plan: AnyPacks,
    *,
    world_size: int,
    dataloader_drop_last: bool = False,
    batch_size: int = 1,
    degrees: IntArray | None = None,
    max_degree: int | None = None,
    tokens: IntArray | None = None,
) -> AlignedPlan:
    """
    Cut or fill the plan's end, so that every rank runs the same number of packs, or shares of them.

    Args:
        raw_plan: The raw plan, of at least one pack; or a `Plan`, or packs alone.
        world_size: Data-parallel learners, >= 1.
        dataloader_drop_last: Drop the remainder if true, else repeat packs from the front,
            cyclically.
        batch_size: Packs of a rank in one forward pass, >= 1. Dropping the remainder also drops a
            smaller last batch.
        degrees: Number of ranks that share each pack, powers of two; shape (num_packs,). None gives
            each pack one rank.
        max_degree: Most ranks that share a pack; None takes the largest power of two that divides
            *world_size*.
        tokens: Tokens of each pack, by which shared packs of similar length are put together; shape
            (num_packs,). None keeps their order.

    Raises:
        ArgumentError: No pack, dropping would leave no batch, or *max_degree* is impossible.

    >>> from packplan.core.plan import build_raw_plan
    >>> plan = build_raw_plan([5, 5, 5], packing_length=5)
    >>> align_plan(plan, world_size=2, dataloader_drop_last=False).packs.tolist()
    [[0], [1], [2], [0]]
    """
    world_size = as_whole_number("world_size", world_size, most=MOST_RANKS)
    packs = as_packs(raw_plan)
    batch_size = as_whole_number("batch_size", batch_size)
    most = largest_degree(world_size, max_degree)
    ranks = np.ones(len(packs), dtype=np.int64) if degrees is None else np.minimum(degrees, most)
    num_slots = int(ranks.sum())
    require_a_batch(num_slots, world_size=world_size, batch_size=batch_size, drop_last=dataloader_drop_last)
    positions = aligned_positions(ranks, world_size, dataloader_drop_last)
    kept, repeated = positions[: len(packs)], positions[len(packs) :]
    aligned = packs[: kept.size] if degrees is None else packs.take(kept)  # a slice is no copy
    return AlignedPlan(
        packs=concatenate([aligned, packs.take(repeated)]) if repeated.size else aligned,
        world_size=world_size,
        dataloader_drop_last=dataloader_drop_last,
        batch_size=batch_size,
        num_raw_packs=len(packs),
        repeated=tuple(repeated.tolist()),
        num_dropped=len(packs) - min(positions.size, len(packs)),
        degrees=degrees,
        max_degree=1 if degrees is None else most,
        tokens=tokens,
    )


def aligned_positions(degrees: IntArray, world_size: int, drop_last: bool) -> IntArray:  # noqa: FBT001  # plain values
    """
    Return the positions of packs that fill all ranks.

    Packs at the end are cut, or packs from the front are repeated.

    Packs of the smallest degree are repeated or dropped first, packs of the next degree only once
    none of them is left. Since all degrees are powers of two that divide the ranks, the slots
    always fill all ranks exactly.

    Args:
        degrees: Ranks that share each pack, 1 for packs that fit: powers of two that divide
            *world_size*; shape (num_packs,).
        world_size: Data-parallel learners, >= 1.
        drop_last: Cut at the end if true, else repeat from the front.

    >>> ones = np.ones(3, dtype=np.int64)
    >>> aligned_positions(ones, 2, False).tolist(), aligned_positions(ones, 2, True).tolist()
    ([0, 1, 2, 0], [0, 1])
    >>> aligned_positions(np.array([1, 4, 1]), 4, False).tolist()
    [0, 1, 2, 0, 2]
    """
    num_slots = int(degrees.sum())
    missing = aligned_size(num_slots, world_size, drop_last) - num_slots
    positions = np.arange(degrees.size)
    if missing > 0:
        smallest = np.flatnonzero(degrees == degrees.min())
        repeated = smallest[np.arange(missing // degrees.min()) % smallest.size]
        return np.concatenate([positions, repeated])
    if missing < 0:
        last_first = positions[::-1][np.argsort(degrees[::-1], kind="stable")]
        dropped = np.searchsorted(np.cumsum(degrees[last_first]), -missing) + 1
        positions = np.sort(last_first[dropped:])
    return positions


def lay_out_slots(degrees: IntArray, world_size: int, tokens: IntArray | None = None) -> IntArray:
    """
    Return the pack in each slot, as its position in the given order; shape (num_slots,).

    A microbatch of W ranks has W slots. A pack that several ranks share takes one for each,
    beginning at a multiple of their number. Ranks wait for the slowest pack of a microbatch, so
    packs that take about equally long are put together. Packs are sorted by descending degree,
    which also aligns them and fills every microbatch. Shared packs of one degree are sorted by
    descending class of length. Groups of microbatches are then moved to the place that the epoch's
    order gives to one of their packs. The slots do not depend on the number of microbatches in a
    step.

    Args:
        degrees: Slots of each pack, powers of two that divide *world_size*, in the order of the
            epoch. Their sum is a multiple of *world_size*.
        world_size: Slots of a microbatch, one a rank.
        tokens: Tokens of each pack, in the same order. With None, shared packs are not sorted by
            length.

    >>> lay_out_slots(np.array([1, 4, 1, 2, 1, 1, 1, 1]), 4).tolist()
    [1, 1, 1, 1, 3, 3, 0, 2, 4, 5, 6, 7]
    """
    if degrees.max(initial=1) == 1:
        return np.arange(degrees.size)
    of_rank = -(-(degrees if tokens is None else tokens) // degrees)
    classes = of_rank * _CLASSES // of_rank[degrees > 1].min()
    packs = np.lexsort((-np.where(degrees > 1, classes, 0), -degrees))
    slots = np.repeat(packs, degrees[packs]).reshape(-1, world_size)
    whole = len(slots) - len(slots) % _TOGETHER  # a smaller group stays last
    groups = slots[:whole].reshape(-1, _TOGETHER, world_size)
    drawn = np.argsort(groups[:, _TOGETHER // 2, 0])
    return np.concatenate([groups[drawn].ravel(), slots[whole:].ravel()])


def aligned_size(num: int, world_size: int, drop_last: bool) -> int:  # noqa: FBT001  # three plain values
    """
    Return the number of slots that fill all ranks, after cutting or repeating *num* slots.

    Args:
        num: Slots of the packs, >= 0: one for each rank that shares a pack.
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
    Refuse a plan whose packs give the ranks no batch in a whole epoch.

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
        fact = f"{counted(num, name)} cannot feed {counted(world_size, 'rank')}{each}, and the remainder is dropped"
        details = {"num_packs": num, "world_size": world_size, "batch_size": batch_size}
        raise ArgumentError("too_short", fact, details)
