"""Aligned plans: packs of a raw plan, dropped or repeated until all ranks have equally many."""

import attrs
import numpy as np

from packplan.core.batch import largest_degree
from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, as_whole_number, frozen_array
from packplan.core.packs import AnyPacks, HasPacks, Packs, as_packs, concatenate

_TOGETHER = 8
"""
Number of consecutive microbatches that `lay_out_slots` moves as one group. All ranks of a step have
about equal loads if the step's number of microbatches divides this number.
"""

_CLASSES = 8
"""
A length class is as wide as the smallest number of tokens per rank of any shared pack, divided by
this number. Shared packs of the same class are placed next to each other.
"""


@attrs.frozen
class AlignedPlan(HasPacks):
    """
    The packs of a raw plan, with packs dropped or repeated at the end to fit one world size.

    An aligned plan is saved, logged and compared between ranks. Training follows the order of an
    `EpochSchedule`, which aligns each epoch in the same way (`aligned_positions`).
    """

    packs: Packs
    """Packs of the raw plan, without the dropped packs, or followed by the repeated packs."""

    world_size: int
    """Number of data-parallel ranks."""

    dataloader_drop_last: bool
    """
    Whether leftover packs that do not fill all ranks, and incomplete last batches, are dropped. If
    false, packs are repeated to fill all ranks.
    """

    batch_size: int
    """Number of packs in one forward pass of a rank."""

    num_raw_packs: int

    repeated: tuple[int, ...]
    """Pack indices, in the raw plan, of the packs that repeat at the end, in order."""

    num_dropped: int
    """
    Number of packs dropped from the end of the raw plan. Packs of an incomplete last batch, which
    the epoch schedule drops later, are not counted.
    """

    degrees: IntArray | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal), repr=False)
    """
    Number of ranks that share each pack of the raw plan (`pack_degrees`). None if no pack is
    shared.
    """

    max_degree: int = 1
    """Maximum number of ranks that share a pack."""

    tokens: IntArray | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal), repr=False)
    """
    Number of tokens of each pack of the raw plan, used to sort shared packs by length; None leaves
    shared packs in plan order.
    """

    @property
    def shared_by(self) -> IntArray | None:
        """Number of ranks that share each pack of the raw plan; None if no pack is shared."""
        return None if self.degrees is None else np.minimum(self.degrees, self.max_degree)

    @property
    def pad_needed(self) -> int:
        """Number of packs that are repeated at the end."""
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
    Drop or repeat packs, so that every rank computes the same number of packs or shared parts of
    packs.

    Args:
        raw_plan: A raw plan, a `Plan` or a sequence of packs; at least one pack.
        world_size: Number of data-parallel ranks, >= 1.
        dataloader_drop_last: Whether to drop the leftover packs. If false, packs are repeated from
            the front, cyclically; with *degrees*, only packs of the smallest degree.
        batch_size: Number of packs in one forward pass of a rank, >= 1. If leftover packs are
            dropped, each rank has to keep at least this many.
        degrees: Number of ranks that share each pack, powers of two; shape (num_packs,). None means
            one rank for each pack.
        max_degree: Maximum number of ranks that share a pack. None means the largest power of two
            that divides *world_size*.
        tokens: Number of tokens of each pack, used to place shared packs of similar length next to
            each other; shape (num_packs,). None leaves shared packs in plan order.

    Raises:
        ArgumentError: There is no pack, dropping would leave no batch, or *max_degree* is not a
            power of two that divides *world_size*.

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
        degrees=None if degrees is None else frozen_array(degrees),
        max_degree=1 if degrees is None else most,
        tokens=None if tokens is None else frozen_array(tokens),
    )


def aligned_positions(degrees: IntArray, world_size: int, drop_last: bool) -> IntArray:  # noqa: FBT001  # plain values
    """
    Return the positions, in the raw plan, of the packs that together fill all ranks.

    If the packs do not fill all ranks, packs at the end are dropped or packs from the front are
    repeated.

    Only packs of the smallest degree are repeated. Packs of a larger degree are dropped only once
    no pack of a smaller degree is left. The slots always fill all ranks exactly, since
    all degrees are powers of two that divide the number of ranks.

    Args:
        degrees: Number of ranks that share each pack: powers of two that divide *world_size*, 1 for
            a pack that is not shared; shape (num_packs,).
        world_size: Number of data-parallel ranks, >= 1.
        drop_last: Whether to drop packs at the end. If false, packs from the front are repeated.

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
    Return the position of the pack in each slot; shape (num_slots,).

    A microbatch of W ranks has W slots. A pack that d ranks share takes d neighbouring slots,
    starting at a multiple of d.

    Ranks wait for the slowest pack of a microbatch, so packs that take about equally long are
    placed next to each other. Packs are sorted by descending degree, which also makes every
    microbatch full. Shared packs of the same degree are sorted by descending length class. Groups
    of microbatches are then sorted by the position of one of their packs in the epoch's order. The
    slots do not depend on the number of microbatches in a step.

    Args:
        degrees: Number of slots of each pack, in the order of the epoch: powers of two that divide
            *world_size*. Their sum, the number of slots, is a multiple of *world_size*.
        world_size: Number of slots in a microbatch, one for each rank.
        tokens: Number of tokens of each pack, in the order of the epoch. None skips the sorting by
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
    Return the multiple of *world_size* that *num* slots are cut or extended to.

    Args:
        num: Number of slots, >= 0: one for each pack and rank that computes it.
        world_size: Number of data-parallel ranks, >= 1.
        drop_last: Whether to round down instead of up.

    >>> aligned_size(3, 2, False), aligned_size(3, 2, True), aligned_size(0, 2, False)
    (4, 2, 0)
    """
    return num - num % world_size if drop_last else num + -num % world_size


def count_batches(num: int, *, batch_size: int, drop_last: bool) -> int:
    """
    Return the number of batches that one rank forms from *num* packs.

    Args:
        num: Number of packs of one rank, >= 0.
        batch_size: Number of packs in one forward pass of a rank, >= 1.
        drop_last: Whether an incomplete last batch is dropped.

    >>> [count_batches(7, batch_size=3, drop_last=drop_last) for drop_last in (False, True)]
    [3, 2]
    """
    return num // batch_size if drop_last else -(-num // batch_size)


def require_a_batch(num: int, *, world_size: int, batch_size: int, drop_last: bool) -> None:
    """
    Raise an error if the plan has too few packs for one batch on each rank.

    Args:
        num: Number of slots of the raw plan: one for each pack and rank that computes it.
        world_size: Number of data-parallel ranks, >= 1.
        batch_size: Number of packs in one forward pass of a rank, >= 1.
        drop_last: Whether leftover packs and incomplete batches are dropped.

    Raises:
        ArgumentError: A rank would have no batch in a whole epoch.
    """
    mine = aligned_size(num, world_size, drop_last) // world_size
    if not count_batches(mine, batch_size=batch_size, drop_last=drop_last):
        name, each = ("pack", "") if batch_size == 1 else ("sample", f" with a batch of {batch_size:,} each")
        fact = f"{counted(num, name)} cannot fill {counted(world_size, 'rank')}{each}, and the remainder is dropped"
        details = {"num_packs": num, "world_size": world_size, "batch_size": batch_size}
        raise ArgumentError("too_short", fact, details)
