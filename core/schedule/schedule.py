"""
Epoch schedules: the order of packs in each epoch, also after a resume on another number of ranks.

A pack is identified by its index in the raw plan or, if each epoch has its own plan, in the epoch's
plan. Rank r of W trains the positions r, r + W, r + 2W, … of an order. The packs that all ranks
have consumed are therefore a prefix of the order. The shuffle depends only on the seed, the epoch
and the number of packs that it shuffles. Orders never change for one `ORDER_VERSION`, because
resumed runs rely on them.

If the work of packs is known, the packs of each optimizer step are assigned to the ranks by work.
Each step still has the same packs.

If packs have degrees, several ranks share a long pack. An order then consists of *slots*: a pack
has one slot for each rank that shares it, at the positions of these ranks. Consumed packs are
counted in slots.

`EpochSchedule.order` returns the remaining packs of an epoch, `batches` returns the remaining
batches of one rank, and `steps` groups these batches. The other methods count steps and packs, or
handle runs that were resumed within an epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from math import inf
from numbers import Real
from typing import Any, Self, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.align import (
    AlignedPlan,
    aligned_positions,
    aligned_size,
    count_batches,
    lay_out_slots,
    require_a_batch,
)
from packplan.core.batch import largest_degree
from packplan.core.errors import SHARED_BY, ArgumentError, Difference, counted
from packplan.core.fingerprint import NO_IDENTITY, Fingerprint, RunIdentity
from packplan.core.lengths import MOST_RANKS, IntArray, as_whole_number, as_works, require_bools
from packplan.core.packers import as_seed
from packplan.core.shuffling import seeded_permutation
from packplan.core.work.assignment import SyncPoint, level_steps, to_units

Works = NDArray[np.number]
"""Work of each pack of a raw plan, in any unit; shape (num_packs,)."""

ORDER_VERSION = 2
"""
Version of the orders. Raise it if a rank gets other packs than before in any step. A test compares
orders with stored orders.
"""


DAMAGED_STATE_REMEDY = "name another checkpoint"
"""Remedy for a damaged resume state."""


@attrs.frozen
class EpochSegment:
    """Part of an epoch that was trained with one number of ranks, and with one way to fill them."""

    world_size: int
    dataloader_drop_last: bool
    pack_offset: int
    """Number of slots of this segment's order that all ranks together have consumed."""

    max_degree: int = 1
    """Maximum number of ranks that shared a pack."""

    def __attrs_post_init__(self) -> None:
        if self.world_size < 1 or self.pack_offset < 0 or self.pack_offset % self.world_size:
            message = (
                f"a segment of {counted(self.world_size, 'rank')} cannot have consumed "
                f"{counted(self.pack_offset, 'pack')}: each rank consumes the same number"
            )
            raise ValueError(message)
        largest_degree(self.world_size, self.max_degree)


@attrs.frozen
class Progress:
    """Position of training: between two optimizer steps, or between two batches of a step."""

    step: int = 0
    """Number of optimizer steps done so far."""

    epoch: int = 0
    """Epoch of the next step."""

    epoch_step: int = 0
    """Number of optimizer steps done so far in the epoch of the next step."""

    segments: tuple[EpochSegment, ...] = ()
    """
    Segments of the epoch of the next step, up to the segment in progress; empty at the start of the
    epoch.
    """

    def __attrs_post_init__(self) -> None:
        consumed = sum(segment.pack_offset // segment.world_size for segment in self.segments)
        if self.epoch < 0 or not 0 <= self.epoch_step <= min(self.step, consumed):
            message = (
                f"step {self.step}, epoch {self.epoch} and epoch step {self.epoch_step} do not agree, or contradict "
                f"the {counted(consumed, 'pack')} that a rank has consumed of the epoch"
            )
            raise ValueError(message)


@attrs.frozen
class Step:
    """Packs that one rank trains in one optimizer step."""

    number: int
    """Number of the step, from 1, as trainers log it."""

    epoch: int
    """Epoch of the step, from 0."""

    batches: tuple[tuple[int, ...], ...]
    """Pack indices of each microbatch of the rank, in order."""

    ranks: tuple[range, ...] = ()
    """Ranks that share the pack of each microbatch, this rank included; empty without degrees."""


def _checked_packs(num_packs: int | tuple[int, ...]) -> int | tuple[int, ...]:
    if isinstance(num_packs, tuple):
        return tuple(as_whole_number("num_packs", num, least=0) for num in num_packs)
    return as_whole_number("num_packs", num_packs, least=0)


@attrs.frozen(repr=False)
class EpochSchedule:
    """
    Order of packs, batches and steps in each epoch, starting at the progress `start`.

    Raises an ArgumentError unless each rank has at least one batch in every whole epoch. After a
    resume on another number of ranks, an epoch has no further step if its remaining packs are too
    few for a batch.
    """

    num_packs: int | tuple[int, ...] = attrs.field(converter=_checked_packs)
    """
    Number of packs in the raw plan, >= 1; a tuple with the number for every epoch if each epoch has
    its own plan. `num_epoch_packs` returns the number for one epoch.
    """

    world_size: int
    """Number of data-parallel ranks, >= 1."""

    dataloader_drop_last: bool
    """
    Whether to drop leftover packs that do not fill all ranks, and an incomplete last batch. If
    false, packs are repeated to fill all ranks, and the last batch may be smaller.
    """

    gradient_accumulation_steps: int
    """
    Number of batches of a rank in one optimizer step. The last step of an epoch may have fewer.
    """

    num_train_epochs: float
    """Number of epochs, which may be fractional."""

    batch_size: int = 1
    """
    Number of packs in one forward pass of a rank: 1 with packing. Without packing, a pack is one
    sample.
    """

    max_steps: int = -1
    """Total number of optimizer steps; 0 or -1 if the number of epochs decides."""

    seed: int = 0
    """Seed of the order, from 0 to 2**64 - 1."""

    shuffle: bool = True
    """Whether the packs of each epoch are shuffled. If false, packs keep the order of the plan."""

    works: Works | Callable[[int], Works] | None = attrs.field(
        default=None, eq=attrs.cmp_using(eq=np.array_equal), hash=False, repr=False
    )
    """
    Work of each pack, by which a step's packs are assigned to ranks; None keeps their order. If
    each epoch has its own plan, this is a function that returns the work of the packs of a given
    epoch. Works need a `batch_size` of 1.
    """

    sync_at: SyncPoint = "step"
    """
    Where ranks wait for each other, which decides how `works` are levelled: over each `step`, or in
    each `microbatch`.
    """

    start: Progress = Progress()
    """
    Progress at which this schedule starts, with segments only if the run was resumed within an
    epoch.
    """

    degrees: IntArray | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal), hash=False, repr=False)
    """
    Number of ranks that are to share each pack, a power of two; None if no pack is shared.
    `pack_degrees` limits this number to `most_ranks`. Degrees need a `batch_size` of 1, and one
    plan for all epochs.
    """

    max_degree: int | None = None
    """
    Maximum number of ranks that share a pack, if packs have degrees. None means the largest power
    of two that divides the number of ranks.
    """

    tokens: IntArray | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal), hash=False, repr=False)
    """
    Number of tokens of each pack, used to place shared packs of similar length next to each other.
    None leaves shared packs of the same degree in the order of the epoch.
    """

    plan: str = ""
    """Checksum of the plan, by which a resume state is compared; empty if it is unknown."""

    _assigned: dict[int, IntArray] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    """
    Cache of the last requested epoch: epoch -> its order after packs were assigned to ranks by
    work, read-only.
    """

    _last_steps: list[int] = attrs.field(factory=list, init=False, eq=False, repr=False)
    """
    Number of the last step of each epoch, starting with the epoch of `start`; used only if epochs
    differ.
    """

    @classmethod
    def from_plan(cls, aligned: AlignedPlan, **fields: Any) -> Self:
        """
        Return the schedule that trains an aligned plan.

        A schedule stores no packs: `order` returns pack indices of the raw plan, dropped or
        repeated in the same way as in the aligned plan.

        Args:
            aligned: Aligned plan of an epoch.
            fields: Further fields by name: `gradient_accumulation_steps`, `num_train_epochs`,
                `max_steps`, `seed`, `shuffle`, `works`, `sync_at`, `start`, `plan`.

        >>> from packplan.core.align import align_plan
        >>> from packplan.core.plan import build_raw_plan
        >>> plan = build_raw_plan([5, 5, 5], packing_length=5)
        >>> aligned = align_plan(plan, world_size=2, dataloader_drop_last=False)
        >>> options = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "shuffle": False}
        >>> EpochSchedule.from_plan(aligned, **options).order(0).tolist()
        [0, 1, 2, 0]
        """
        return cls(
            num_packs=aligned.num_raw_packs,
            world_size=aligned.world_size,
            dataloader_drop_last=aligned.dataloader_drop_last,
            batch_size=aligned.batch_size,
            degrees=aligned.degrees,
            max_degree=None if aligned.degrees is None else aligned.max_degree,
            tokens=aligned.tokens,
            **fields,
        )

    def __attrs_post_init__(self) -> None:
        as_whole_number("world_size", self.world_size, most=MOST_RANKS)
        for name, least in {"gradient_accumulation_steps": 1, "batch_size": 1, "max_steps": -1}.items():
            as_whole_number(name, getattr(self, name), least=least)
        as_seed(self.seed)
        require_bools(shuffle=self.shuffle, dataloader_drop_last=self.dataloader_drop_last)
        if self.max_steps <= 0 and not (isinstance(self.num_train_epochs, Real) and 0 < self.num_train_epochs < inf):
            message = f"the number of epochs is {self.num_train_epochs!r}, but has to be finite and above 0"
            raise ArgumentError("argument", message)
        largest_degree(self.world_size, self.max_degree)
        for epoch in range(1 if isinstance(self.num_packs, int) else len(self.num_packs)):
            num, ranks = self.num_epoch_slots(epoch), {"world_size": self.world_size, "batch_size": self.batch_size}
            require_a_batch(num, drop_last=self.dataloader_drop_last, **ranks)
        if self.sync_at not in get_args(SyncPoint):
            message = f"sync_at is {self.sync_at!r}, but has to be one of {', '.join(get_args(SyncPoint))}"
            raise ArgumentError("argument", message)
        if self.works is not None and not callable(self.works):
            self._epoch_works(0)  # checked
        if not (self.works is None and self.degrees is None) and self.batch_size != 1:
            message = f"works and degrees assign packs, so batch_size has to be 1, not {self.batch_size}"
            raise ArgumentError("argument", message)

    def __repr__(self) -> str:
        num, epoch = self.packs_per_epoch - self.num_epoch_slots(self.start.epoch), self.start.epoch
        packs = counted(self.num_epoch_packs(epoch), "pack")
        packs += f", {abs(num):,} {'repeated' if num > 0 else 'dropped'}," if num else ""
        each = (
            f"{self.num_epoch_steps(epoch):,} in epoch {epoch}"
            if self.epochs_differ
            else f"{self.steps_per_epoch:,} an epoch"
        )
        done = f", {self.start.step:,} done" if self.start.step else ""
        total = counted(self.total_steps, "step")
        return f"EpochSchedule({total}, {each}{done}: {packs} on {counted(self.world_size, 'rank')})"

    def steps(self, *, rank: int = 0) -> Iterator[Step]:
        """
        Yield the remaining steps of *rank*. Raise an ArgumentError if there is no such rank.

        The last step is `total_steps` or the last step of the last planned epoch, whichever is
        earlier.

        >>> schedule = EpochSchedule(
        ...     num_packs=3, world_size=1, dataloader_drop_last=False,
        ...     gradient_accumulation_steps=2, num_train_epochs=1, shuffle=False,
        ... )
        >>> [step.batches for step in schedule.steps()]
        [((0,), (1,)), ((2,),)]
        """
        if not 0 <= rank < self.world_size:
            message = f"rank is {rank}, but has to be from 0 to {self.world_size - 1} (world_size {self.world_size})"
            raise ArgumentError("argument", message)
        number, epoch, window = self.start.step, self.start.epoch, self.gradient_accumulation_steps
        while number < self.total_steps and self.num_epoch_packs(epoch):
            batches = [tuple(batch) for batch in self.batches(epoch, rank=rank)]
            degrees = () if self.degrees is None else self.pack_degrees(epoch).tolist()
            for first in range(0, len(batches), window)[: self.total_steps - number]:
                number += 1
                mine = batches[first : first + window]
                sizes = [degrees[pack] for (pack,) in mine] if degrees else []
                blocks = (range(rank // size * size, (rank // size + 1) * size) for size in sizes)
                yield Step(number, epoch, tuple(mine), tuple(blocks))
            epoch += 1

    def batches(self, epoch: int, *, rank: int) -> list[list[int]]:
        """Return the remaining batches of *rank* in *epoch*, each a list of pack indices."""
        mine = self.order(epoch)[rank :: self.world_size].tolist()
        count = count_batches(len(mine), batch_size=self.batch_size, drop_last=self.dataloader_drop_last)
        return [mine[number * self.batch_size : (number + 1) * self.batch_size] for number in range(count)]

    def order(self, epoch: int) -> IntArray:
        """
        Return the remaining pack indices of *epoch* over all ranks, in the order of training; shape
        (num_left,).

        A pack is listed once for each rank that shares it.

        Unless the run was resumed within this epoch, these are all packs of the epoch.
        """
        if epoch in self._assigned:
            return self._assigned[epoch]
        order = self._remaining_order(epoch)
        if self.works is None:
            return order
        degrees = self.pack_degrees(epoch)
        units = to_units(self._epoch_works(epoch) / degrees)[order]
        ranks = {"world_size": self.world_size, "accumulation": self.gradient_accumulation_steps}
        order = order[level_steps(units, degrees[order], sync_at=self.sync_at, **ranks)]
        order.flags.writeable = False
        self._assigned.clear()
        self._assigned[epoch] = order
        return order

    def _whole_order(self, epoch: int, segment: EpochSegment) -> IntArray:
        """
        Return all packs of *epoch*, aligned to a segment's ranks as in `align_plan`, in the order
        drawn from the seed.
        """
        degrees = self.pack_degrees(epoch, segment.max_degree)
        packs = aligned_positions(degrees, segment.world_size, segment.dataloader_drop_last)
        if self.shuffle:
            packs = packs[seeded_permutation(packs.size, seed=(self.seed, epoch))]
        return self._lay_out(packs, degrees, segment)

    def _lay_out(self, packs: IntArray, degrees: IntArray, segment: EpochSegment) -> IntArray:
        """Return the pack of each slot of a segment, given its *packs* in order."""
        tokens = None if self.tokens is None else self.tokens[packs]
        return packs[lay_out_slots(degrees[packs], segment.world_size, tokens)]

    def pack_degrees(self, epoch: int, max_degree: int | None = None) -> IntArray:
        """
        Return the number of ranks that share each pack of *epoch*; int64, shape (num_packs,).

        Args:
            epoch: Number of the epoch, from 0.
            max_degree: Maximum number of ranks that share a pack. None means the maximum of this
                schedule.
        """
        num = self.num_epoch_packs(epoch)
        if self.degrees is None:
            return np.ones(num, dtype=np.int64)
        needed = np.asarray(self.degrees)
        if needed.shape != (num,) or needed.min() < 1 or (needed & (needed - 1)).any():
            message = f"degrees has the shape {needed.shape}, but has to be {num} powers of two, one for each pack"
            raise ArgumentError("argument", message)
        return np.minimum(needed, max_degree or self.most_ranks)

    @property
    def most_ranks(self) -> int:
        """Maximum number of ranks that share a pack; 1 without degrees."""
        return 1 if self.degrees is None else largest_degree(self.world_size, self.max_degree)

    def num_epoch_slots(self, epoch: int) -> int:
        """
        Return the number of slots of all packs of *epoch*: one for each rank that shares a pack.
        """
        return self.num_epoch_packs(epoch) if self.degrees is None else self._num_slots

    @cached_property
    def _num_slots(self) -> int:
        return int(self.pack_degrees(0).sum())

    def _epoch_works(self, epoch: int) -> NDArray[np.float64]:
        """Return the work of each pack of *epoch*; shape (num_packs,). `works` must not be None."""
        return as_works(self.works(epoch) if callable(self.works) else self.works, self.num_epoch_packs(epoch))

    @property
    def epochs_differ(self) -> bool:
        """Whether each epoch has its own packs."""
        return not isinstance(self.num_packs, int)

    def num_epoch_packs(self, epoch: int) -> int:
        """Return the number of packs in the raw plan of *epoch*; 0 for an epoch without a plan."""
        if isinstance(self.num_packs, int):
            return self.num_packs
        return self.num_packs[epoch] if epoch < len(self.num_packs) else 0

    def num_epoch_batches(self, epoch: int) -> int:
        """Return the number of batches of each rank in the whole *epoch*, with this world size."""
        return self._num_batches(aligned_size(self.num_epoch_slots(epoch), self.world_size, self.dataloader_drop_last))

    def num_epoch_steps(self, epoch: int) -> int:
        """Return the number of optimizer steps in the whole *epoch*, with this world size."""
        return -(-self.num_epoch_batches(epoch) // self.gradient_accumulation_steps)

    def _num_batches(self, num: int) -> int:
        """Return the number of batches that each rank forms from *num* packs over all ranks."""
        return count_batches(num // self.world_size, batch_size=self.batch_size, drop_last=self.dataloader_drop_last)

    @property
    def packs_per_epoch(self) -> int:
        """Number of slots over all ranks in the whole epoch of `start`, repeated packs included."""
        return aligned_size(self.num_epoch_slots(self.start.epoch), self.world_size, self.dataloader_drop_last)

    @property
    def batches_per_epoch(self) -> int:
        """
        Number of batches of each rank in the whole epoch of `start`, with this world size; 0 only
        after the last planned epoch.
        """
        return self.num_epoch_batches(self.start.epoch)

    @property
    def steps_per_epoch(self) -> int:
        """
        Number of optimizer steps in the whole epoch of `start`, with this world size; 0 only after
        the last planned epoch.
        """
        return self.num_epoch_steps(self.start.epoch)

    @property
    def total_steps(self) -> int:
        """
        Number of optimizer steps at the end of training, including steps before `start`.

        An epoch before `start` counts as one epoch, even if it had another number of steps on other
        ranks.
        """
        if self.max_steps > 0:
            return self.max_steps
        start = self.start
        first_steps = start.epoch_step + self.num_remaining_steps(start.epoch)
        before = start.step - start.epoch_step
        if self.epochs_differ:
            return self._total_where_epochs_differ(first_steps)
        per_epoch = self.steps_per_epoch
        if (before, first_steps) == (start.epoch * per_epoch, per_epoch):
            # The float product is rounded up, as in transformers.
            return math.ceil(self.num_train_epochs * per_epoch)
        share = self.num_train_epochs - start.epoch
        if share < 1:
            return max(start.step, before + math.ceil(share * first_steps))
        return before + first_steps + math.ceil((share - 1) * per_epoch)

    def _total_where_epochs_differ(self, first_steps: int) -> int:
        """
        Return `total_steps` if epochs differ. *first_steps* is the number of done and remaining
        steps in the epoch of `start`.
        """
        start, wanted = self.start, Fraction(str(self.num_train_epochs))
        whole, share = divmod(wanted, 1)
        if whole > start.epoch:
            return self.last_step(int(whole) - 1) + math.ceil(share * self.num_epoch_steps(int(whole)))
        return max(start.step, start.step - start.epoch_step + math.ceil((wanted - start.epoch) * first_steps))

    @property
    def num_epochs(self) -> int:
        """
        Number of epochs at the end of training, including epochs before `start`. The last epoch may
        be partial.
        """
        if self.total_steps <= self.start.step:
            return self.start.epoch
        return self._epoch_after(self.total_steps - 1) + 1

    def last_step(self, epoch: int) -> int:
        """
        Return the number of the last optimizer step of *epoch*, which must not be before the epoch
        of `start`.

        Steps are counted from 1, and steps before `start` are included.
        """
        start = self.start
        end = start.step + self.num_remaining_steps(start.epoch)
        if isinstance(self.num_packs, int):
            return end + (epoch - start.epoch) * self.steps_per_epoch
        if not self._last_steps:
            self._last_steps.append(end)
            for later in range(start.epoch + 1, len(self.num_packs)):
                self._last_steps.append(self._last_steps[-1] + self.num_epoch_steps(later))
        return self._last_steps[epoch - start.epoch]

    def _epoch_after(self, step: int) -> int:
        """
        Return the epoch in which training continues after *step* steps; *step* is at least
        `start.step`.
        """
        start = self.start
        beyond = step - self.last_step(start.epoch)
        if beyond < 0 or not self.num_epoch_packs(start.epoch):
            return start.epoch
        if isinstance(self.num_packs, int):
            return start.epoch + 1 + beyond // self.steps_per_epoch
        return start.epoch + bisect_right(self._last_steps, step)

    def trained_packs(self, epoch: int, num_steps: int) -> IntArray:
        """
        Return the packs of the first *num_steps* remaining steps of *epoch*; shape (num_trained,).

        The packs of all ranks are listed, including repeated packs. A shared pack is listed once
        for each of its ranks.
        """
        order, window = self.order(epoch), self.gradient_accumulation_steps
        num_batches = min(self._num_batches(order.size), num_steps * window)
        return order[: num_batches * self.batch_size * self.world_size]

    def num_remaining_batches(self, epoch: int) -> int:
        """Return the number of remaining batches of each rank in *epoch*."""
        if not self._is_resumed(epoch):
            return self.num_epoch_batches(epoch)
        return self._num_resumed_batches

    @cached_property
    def _num_resumed_batches(self) -> int:
        """
        Number of remaining batches of each rank in the epoch within which the run was resumed.
        """
        return self._num_batches(self._remaining_order(self.start.epoch).size)

    def num_remaining_steps(self, epoch: int) -> int:
        """Return the number of remaining optimizer steps of *epoch*."""
        return -(-self.num_remaining_batches(epoch) // self.gradient_accumulation_steps)

    def start_fault(self) -> str | None:
        """
        Return the reason why `start` is impossible with these packs, or None.

        A damaged checkpoint may contain progress that no run can have.
        """
        start, begun = self.start, self.start.step - self.start.epoch_step
        if isinstance(self.num_packs, int) and not start.epoch <= begun <= start.epoch * self.num_packs:
            each = f"each has 1 to {counted(self.num_packs, 'step')}"
            return f"{counted(start.epoch, 'epoch')} cannot have taken {counted(begun, 'step')}: {each}"
        for segment in start.segments:
            most = max(int(self.pack_degrees(start.epoch, segment.max_degree).sum()), self.world_size)
            if segment.world_size > most:
                return f"a segment has {counted(segment.world_size, 'rank')}, but can have at most {most:,}"
        for segment, order in self._segment_orders(start.epoch)[: len(start.segments)]:
            if segment.pack_offset >= order.size:
                return (
                    f"a segment consumed {counted(segment.pack_offset, 'pack')} of the {order.size:,} left of epoch "
                    f"{start.epoch}, so the next epoch has begun"
                )
        return None

    def progress_at(self, step: int) -> Progress:
        """
        Return the progress after *step* optimizer steps, where *step* is at least `start.step`.
        """
        epoch = self._epoch_after(step)
        num_batches = (step - self._steps_before(epoch)) * self.gradient_accumulation_steps
        return self._progress(epoch, step, num_batches=num_batches)

    def progress_after(self, epoch: int, num_batches: int) -> Progress:
        """
        Return the progress after each rank has trained *num_batches* batches of *epoch*.

        The returned progress may be within a step.

        Args:
            epoch: Epoch of the batches, `start.epoch` or later.
            num_batches: Number of batches of each rank since `start`, or since the start of the
                epoch if that is later.
        """
        before = self._steps_before(epoch)
        if num_batches >= self.num_remaining_batches(epoch):
            return Progress(step=before + self.num_remaining_steps(epoch), epoch=epoch + 1)
        return self._progress(epoch, before + num_batches // self.gradient_accumulation_steps, num_batches=num_batches)

    def _steps_before(self, epoch: int) -> int:
        """Return the number of optimizer steps before the remaining batches of *epoch*."""
        return self.start.step if epoch == self.start.epoch else self.last_step(epoch - 1)

    def _progress(self, epoch: int, step: int, *, num_batches: int) -> Progress:
        """Return the progress after *step* steps and *num_batches* remaining batches of *epoch*."""
        if not (num_batches or self._is_resumed(epoch)):
            return Progress(step=step, epoch=epoch)
        *earlier, last = self._segments(epoch)
        now = attrs.evolve(last, pack_offset=last.pack_offset + num_batches * self.batch_size * self.world_size)
        steps = num_batches // self.gradient_accumulation_steps
        steps += self.start.epoch_step if self._is_resumed(epoch) else 0
        return Progress(step=step, epoch=epoch, epoch_step=steps, segments=(*earlier, now))

    def _is_resumed(self, epoch: int) -> bool:
        """
        Return whether the run was resumed within *epoch*, so that only a part of the epoch is left.
        """
        return epoch == self.start.epoch and bool(self.start.segments)

    def _remaining_order(self, epoch: int) -> IntArray:
        """Return the remaining order of *epoch*, before packs are assigned to ranks by work."""
        segment, order = self._segment_orders(epoch)[-1]
        return order[segment.pack_offset :]

    def consumed_packs(self, epoch: int) -> IntArray:
        """
        Return the packs of *epoch* that were trained before `start`; empty unless the run was
        resumed within *epoch*.
        """
        return np.concatenate([order[: segment.pack_offset] for segment, order in self._segment_orders(epoch)])

    def _segment_orders(self, epoch: int) -> list[tuple[EpochSegment, IntArray]]:
        """
        Return each segment of *epoch* with its order. The first order has all packs of the epoch.
        Each later order has the packs that the previous segment did not consume, aligned again.
        """
        first, *later = self._segments(epoch)
        found = [(first, self._whole_order(epoch, first))]
        for segment in later:
            before, order = found[-1]
            left = _drop_consumed(order, before.pack_offset)
            degrees = self.pack_degrees(epoch, segment.max_degree)
            packs = left[aligned_positions(degrees[left], segment.world_size, segment.dataloader_drop_last)]
            found.append((segment, self._lay_out(packs, degrees, segment)))
        return found

    def _segments(self, epoch: int) -> tuple[EpochSegment, ...]:
        """
        Return the segments of *epoch*. The last segment belongs to this schedule's ranks, and
        continues the last segment of `start` or is new.
        """
        earlier = self.start.segments if epoch == self.start.epoch else ()
        mine = EpochSegment(self.world_size, self.dataloader_drop_last, 0, self.most_ranks)
        if earlier and attrs.evolve(earlier[-1], pack_offset=0) == mine:
            return earlier
        return (*earlier, mine)


def _drop_consumed(order: IntArray, num_consumed: int) -> IntArray:
    """
    Return the packs of *order* that are not in its first *num_consumed* entries, each pack once.
    """
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first[first >= num_consumed])]


@attrs.frozen
class ResumeState:
    """
    Progress, and facts of the plan and the run, that a checkpoint stores. A resumed run is compared
    with these values.
    """

    plan: str
    """
    Checksum of the raw plan; if each epoch has its own plan, the digest of the plans' fingerprint.
    """

    data: str
    """Digest of the data set."""

    seed: int
    """Seed of the order of packs."""

    shuffle: bool

    tuner: str
    """Tuner of the run, such as `full` or `lora`; empty if unknown."""

    order_version: int
    """`ORDER_VERSION` of the run."""

    progress: Progress

    inputs: Mapping[str, Any] = attrs.field(factory=dict)
    """Inputs of the plan by name, used to report why a plan differs; empty if unknown."""

    identity: RunIdentity = NO_IDENTITY
    """Model, loss and settings of the run."""

    degree: int | None = None
    """Maximum number of ranks that share a pack of the plan; None if packs have no degrees."""

    @classmethod
    def from_schedule(cls, schedule: EpochSchedule, *, tuner: str = "", **facts: Any) -> Self:
        """
        Return the state of a run that has not trained yet.

        Args:
            schedule: Schedule of the run.
            tuner: Tuner of the run; empty if unknown.
            **facts: The fields `plan` and `data`, and optionally `inputs` and `identity`.
        """
        degree = None if schedule.degrees is None else int(schedule.pack_degrees(0).max())
        order: dict[str, Any] = {"seed": schedule.seed, "shuffle": schedule.shuffle, "degree": degree}
        return cls(tuner=tuner, order_version=ORDER_VERSION, progress=Progress(), **order, **facts)

    def differences(self, now: ResumeState) -> tuple[Difference, ...]:
        """
        Return how the current state *now* differs from this stored state, apart from progress.

        A degree counts as different only if it has become smaller. If the plans differ, the
        differing inputs of the plans are returned too.
        """
        names = ("plan", "data", "seed", "shuffle", "tuner", "order_version")
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in names]
        found = tuple(Difference(name, then, current) for name, then, current in pairs if then != current)
        found += self.identity.fixed.differences(now.identity.fixed)
        if self.degree and now.degree and now.degree < self.degree:
            found += (Difference(SHARED_BY, self.degree, now.degree),)
        if self.plan == now.plan or not (self.inputs and now.inputs):
            return found
        return (*found, *Fingerprint(self.inputs).differences(Fingerprint(now.inputs)))
