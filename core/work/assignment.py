"""
Assignment of the packs of an optimizer step to ranks, by work.

The packs of a step stay the same; only the ranks that compute them change. Loss and gradients are
sums over all packs of the step, so they do not depend on which rank computes a pack. Ranks wait for
each other once per step if gradients are summed at the end of a step. Ranks wait for each other in
each microbatch if weights or gradients are sharded. The busiest rank therefore decides the time of
a step or of a microbatch.

Works are scaled to integers first, all further arithmetic uses integers, and packs of equal work
keep their order. Every rank therefore computes the same assignment, on any processor.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray

SyncPoint = Literal["step", "microbatch"]
"""Where ranks wait for each other: at the end of each step, or in each microbatch."""

UNITS = 2**38
"""Work of the heaviest pack, in integer units. Sums over two million packs fit into 64 bits."""

_TOLERANCE = 10_000
"""
Divisor of the lower bound: a step is level once its busiest rank exceeds the bound by at most one
10,000th.
"""

_ROUNDS = 60
"""
Maximum number of exchange rounds between the ranks of a step. Nearly all steps are level after ten
rounds.
"""

_SINGLE_ROUNDS = 8
"""
Number of first rounds, which exchange single packs because the table of these exchanges is small.
After these rounds, every second round exchanges pairs of packs (see `_PAIRS_UP_TO`).
"""

_STALE = 8
"""Number of rounds without a change after which a step stays as it is."""

_PAIRS_UP_TO = 8
"""
Maximum number of packs of a rank for which pairs of packs are exchanged too. With more packs,
exchanges of single packs suffice.
"""

_BLOCK = 1 << 21
"""Maximum number of entries of an exchange table in memory, unless one row has more."""


def to_units(works: NDArray[Any]) -> IntArray:
    """
    Scale *works* to integers, so that the largest is `UNITS`; int64, same shape.

    Multiplying all works by the same positive factor changes the result by rounding at most.
    """
    heaviest = works.max(initial=0)
    if not heaviest:
        return np.zeros(works.shape, dtype=np.int64)
    units: IntArray = np.rint(works / heaviest * UNITS).astype(np.int64)
    return units


def level_steps(
    works: IntArray, degrees: IntArray | None = None, *, world_size: int, accumulation: int, sync_at: SyncPoint
) -> IntArray:
    """
    Return an order of the packs that gives all ranks about equal work in each step or microbatch.

    Rank r of W trains the positions r, r + W, r + 2W, … of an order. A step has accumulation x W
    neighbouring positions; the last step may have fewer. Each step keeps its packs. The slots of a
    shared pack stay in one microbatch, where they start at a multiple of their number.

    Args:
        works: Work of one rank on the pack in each slot, in units of `to_units`; shape
            (num_slots,). The number of slots is a multiple of *world_size*. A shared pack has one
            slot for each of its ranks.
        degrees: Number of ranks that share the pack in each slot; shape (num_slots,). None if no
            pack is shared.
        world_size: Number of data-parallel ranks, >= 1.
        accumulation: Number of packs of a rank in one step, >= 1.
        sync_at: Where ranks wait for each other.

    >>> works = np.array([8, 1, 7, 2, 6, 3, 5, 4])
    >>> works[level_steps(works, world_size=2, accumulation=4, sync_at="microbatch")].tolist()
    [8, 7, 5, 6, 4, 3, 1, 2]
    >>> order = level_steps(works, world_size=2, accumulation=4, sync_at="step")
    >>> works[order].reshape(4, 2).sum(axis=0).tolist()
    [18, 18]
    """
    assert sync_at in get_args(SyncPoint), sync_at  # noqa: S101  # the schedule has checked it
    order = np.arange(works.size)
    for part in _split_steps(order, world_size * accumulation):
        # A single rank never waits, and with one pack for each rank there is no choice.
        if world_size > 1 and part.shape[1] > world_size:
            ranks = np.ones_like(part) if degrees is None else degrees[part]
            part[:] = np.take_along_axis(part, _assign_step(works[part], ranks, world_size, sync_at), axis=1)
    return order


def _split_steps(packs: IntArray, packs_per_step: int) -> Iterator[IntArray]:
    """Yield the packs of whole steps as rows, then the shorter last step if there is one."""
    packs_per_step = min(packs_per_step, max(packs.size, 1))
    whole = packs.size - packs.size % packs_per_step
    parts = (packs[:whole].reshape(-1, packs_per_step), packs[whole:].reshape(1, -1))
    return (part for part in parts if part.size)


def _busiest_bounds(rows: IntArray, world_size: int) -> IntArray:
    """
    Return a lower bound on the busiest rank's work in each step. *rows* are the works of each
    step's packs, ascending.
    """
    packs_of_rank = rows.shape[1] // world_size
    if packs_of_rank == 2:
        # Pairing the heaviest pack with the lightest is optimal.
        folded: IntArray = (rows + rows[:, ::-1]).max(axis=1)
        return folded
    with_lightest = rows[:, -1] + rows[:, : packs_of_rank - 1].sum(axis=1)
    bounds: IntArray = np.maximum(-(-rows.sum(axis=1) // world_size), with_lightest)
    return bounds


def _assign_step(steps: IntArray, degrees: IntArray, world_size: int, sync_at: SyncPoint) -> IntArray:
    """
    Return the order of each step's slots, as column indices of *steps*; same shape as *steps*.
    """
    num_steps, per_step = steps.shape
    falling = np.lexsort((-steps, -degrees)).reshape(num_steps, -1, world_size)
    if sync_at == "microbatch":
        # Within a microbatch, it does not matter which rank has a pack. Every second microbatch is
        # reversed, so that the sums of ranks are similar too.
        falling[:, 1::2] = falling[:, 1::2, ::-1]
        return falling.reshape(num_steps, per_step)
    if degrees.max() > 1:
        return _assign_shared_first(steps, degrees, falling).transpose(0, 2, 1).reshape(num_steps, per_step)
    held = _assign_heaviest_first(steps, falling)
    _level_ranks(steps, held)
    # Heavy packs first on each rank, so that microbatches at the same time are similar.
    heavy_first = np.argsort(-_gather_works(steps, held), axis=2, kind="stable")
    held = np.take_along_axis(held, heavy_first, axis=2)
    return held.transpose(0, 2, 1).reshape(num_steps, per_step)


def _gather_works(steps: IntArray, held: IntArray) -> IntArray:
    """Return the works of the packs at columns *held* of *steps*; same shape as *held*."""
    return np.take_along_axis(steps, held.reshape(len(steps), -1), axis=1).reshape(held.shape)


def _assign_heaviest_first(steps: IntArray, falling: IntArray) -> IntArray:
    """
    Assign packs by descending work, in rows of one pack for each rank. The heaviest pack of a row
    goes to the rank with the least work so far. The next pack goes to the rank with the next least
    work.

    Args:
        steps: Work of each pack; shape (num_steps, packs of a step).
        falling: Column indices by descending work; shape (num_steps, packs of a rank, world_size).

    Returns: Column indices of the packs of each rank; shape (num_steps, world_size, packs of a
    rank).
    """
    num_steps, packs_of_rank, world_size = falling.shape
    works = _gather_works(steps, falling)
    sums = np.zeros((num_steps, world_size), dtype=np.int64)
    held = np.empty((num_steps, world_size, packs_of_rank), dtype=np.int64)
    rows = np.arange(num_steps)[:, None]
    for number in range(packs_of_rank):
        ranks = np.argsort(sums, axis=1, kind="stable")
        held[rows, ranks, number] = falling[:, number]
        sums[rows, ranks] += works[:, number]
    return held


def _assign_shared_first(steps: IntArray, degrees: IntArray, falling: IntArray) -> IntArray:
    """
    Assign packs by descending degree, then by descending work. Each pack goes to the ranks with the
    least work among the ranks with room. The ranks that share a pack have equally many packs before
    this pack, so all its slots are in one microbatch.

    Args:
        steps: Work of one rank on each slot; shape (num_steps, slots of a step).
        degrees: Number of ranks that share the pack in each slot; same shape as *steps*.
        falling: Column indices by descending degree, then descending work; shape (num_steps, slots
            of a rank, world_size).

    Returns: Column indices of the slots of each rank; shape (num_steps, world_size, slots of a
    rank).
    """
    num_steps, of_rank, world_size = falling.shape
    held = np.empty((num_steps, world_size, of_rank), dtype=np.int64)
    sums = np.zeros((num_steps, world_size), dtype=np.int64)
    used, taken = np.zeros_like(sums), np.zeros(num_steps, dtype=np.int64)
    columns = falling.reshape(num_steps, -1)
    for degree in np.unique(degrees)[::-1].tolist():
        counts = (degrees == degree).sum(axis=1) // degree
        for number in range(counts.max()):
            rows = np.flatnonzero(counts > number)[:, None]
            places = columns[rows, taken[rows] + number * degree + np.arange(degree)]
            is_full = used[rows[:, 0], ::degree] == of_rank
            sum_of = np.where(is_full, np.iinfo(np.int64).max, sums[rows[:, 0], ::degree])
            ranks = sum_of.argmin(axis=1)[:, None] * degree + np.arange(degree)
            held[rows, ranks, used[rows, ranks]] = places
            sums[rows, ranks] += steps[rows, places]
            used[rows, ranks] += 1
        taken += counts * degree
    return held


def _level_ranks(steps: IntArray, held: IntArray) -> None:
    """
    Exchange packs between busy and idle ranks until each step is level, or until no exchange helps.
    The array *held* is changed in place.

    Args:
        steps: Work of each pack; shape (num_steps, packs of a step).
        held: Column indices of the packs of each rank; shape (num_steps, world_size, packs of a
            rank).
    """
    bounds = _busiest_bounds(np.sort(steps, axis=1), held.shape[1])
    limits = bounds + bounds // _TOLERANCE
    active = np.arange(len(steps))
    changed = np.zeros(len(steps), dtype=np.int64)
    # A rank exchanges single packs and, if it has few of them, pairs of packs.
    sizes = [1, 2] if 2 < held.shape[2] <= _PAIRS_UP_TO else [1]
    swaps = [np.array(list(combinations(range(held.shape[2]), size))) for size in sizes]
    for number in range(_ROUNDS):
        works = _gather_works(steps[active], held[active])
        uneven = (works.sum(axis=2).max(axis=1) > limits[active]) & (number - changed[active] <= _STALE)
        active, works = active[uneven], works[uneven]
        if not active.size:
            return
        several = number >= _SINGLE_ROUNDS and number % 2
        exchanged = _exchange(held, active, works, swaps=swaps[-1 if several else 0], number=number)
        changed[active[exchanged]] = number


def _exchange(held: IntArray, active: IntArray, works: IntArray, *, swaps: NDArray[np.int64], number: int) -> IntArray:
    """
    Pair each busy rank with a less busy one, and make the exchange of their packs that evens out
    the two ranks' work best. Pairs that no exchange evens out stay the same. Return the changed
    steps, as indices of *active*.

    Args:
        held: Column indices of the packs of each rank; shape (num_steps, world_size, packs of a
            rank).
        active: Indices of the steps that may be changed.
        works: Work of the packs of each rank; shape (num_active, world_size, packs of a rank).
        swaps: Sets of packs that may be exchanged; shape (num_sets, packs of a set).
        number: Number of the round, which decides which ranks are compared.
    """
    sums = works.sum(axis=2)
    num_active, world_size = sums.shape
    half = world_size // 2
    ranks = np.argsort(-sums, axis=1, kind="stable")
    busy = ranks[:, :half]
    partner = number if number < _SINGLE_ROUNDS else number // 2
    idle = np.roll(ranks[:, world_size - half :][:, ::-1], partner, axis=1)
    step = np.repeat(np.arange(num_active), half)
    busy, idle = busy.ravel(), idle.ravel()
    gap = sums[step, busy] - sums[step, idle]
    changed = np.zeros(num_active, dtype=bool)
    num_rows = max(1, _BLOCK // len(swaps) ** 2)
    for start in range(0, gap.size, num_rows):
        of, one, other, wanted = (array[start : start + num_rows] for array in (step, busy, idle, gap))
        gives = works[of, one][:, swaps].sum(axis=2)
        takes = works[of, other][:, swaps].sum(axis=2)
        left = np.abs(wanted[:, None, None] - 2 * (gives[:, :, None] - takes[:, None, :])).reshape(wanted.size, -1)
        best = left.argmin(axis=1)
        better = np.flatnonzero(left[np.arange(wanted.size), best] < wanted)
        changed[of[better]] = True
        of, one, other = active[of[better]][:, None], one[better][:, None], other[better][:, None]
        given, taken = swaps[best[better] // len(swaps)], swaps[best[better] % len(swaps)]
        kept = held[of, one, given].copy()
        held[of, one, given] = held[of, other, taken]
        held[of, other, taken] = kept
    return np.flatnonzero(changed)
