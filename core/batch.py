"""Labels, ranks that share rows, accumulation of an effective batch size, and partial windows."""

import attrs
import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, as_whole_number

IGNORED_LABEL = -100
"""Label that the losses of torch and transformers ignore."""


def count_row_groups(num_ranks: int, row_ranks: int) -> int:
    """
    Return the number of groups of ranks that share a packed row; a group counts as one rank of a
    plan.

    Group g has *row_ranks* ranks, from g * *row_ranks* on.

    Args:
        num_ranks: All ranks.
        row_ranks: Neighbouring ranks that share each row; ArgumentError unless their number divides
            *num_ranks*.

    >>> count_row_groups(6, 2)
    3
    """
    if row_ranks < 1 or num_ranks % row_ranks:
        fact = f"{counted(num_ranks, 'rank')} cannot form groups of {row_ranks}: start a multiple of {row_ranks} ranks"
        raise ArgumentError("ranks", f"{fact}, or set sequence_parallel_size to 1")
    return num_ranks // row_ranks


def pack_degrees(tokens: IntArray, packing_length: int, max_degree: int = MOST_RANKS) -> IntArray:
    """
    Return the degree of each pack; int64, same shape as *tokens*.

    The degree is the smallest power of two of ranks that hold the pack's tokens with at most
    *packing_length* each.

    Args:
        tokens: Tokens of each pack, >= 1.
        packing_length: Tokens that a pack of several samples may hold, >= 1.
        max_degree: Most ranks that share a pack, a power of two. Packs that need more take this
            many.

    >>> pack_degrees(np.array([7, 8, 9, 16, 33]), 8, max_degree=4).tolist()
    [1, 1, 2, 2, 4]
    """
    limits = packing_length * 2 ** np.arange(MOST_RANKS.bit_length())
    return np.minimum(2 ** np.searchsorted(limits, tokens), max_degree)


def largest_degree(num_ranks: int, asked: int | None = None) -> int:
    """
    Return the largest number of ranks that may share a pack, if packs have degrees.

    Args:
        num_ranks: All ranks, >= 1.
        asked: Number that the caller asks for. None takes the largest power of two that divides
            *num_ranks*.

    Raises:
        ArgumentError: *asked* is not a power of two, or does not divide the ranks.

    >>> largest_degree(12), largest_degree(12, 2)
    (4, 2)
    """
    most = num_ranks & -num_ranks
    if asked is None:
        return most
    if as_whole_number("max_degree", asked, most=MOST_RANKS) & (asked - 1) or asked > most:
        fact = f"at most {counted(asked, 'rank')} may share a pack, but that is not a power of two that divides"
        raise ArgumentError("degree", f"{fact} the {counted(num_ranks, 'rank')}", {"largest": most})
    return asked


@attrs.frozen
class Accumulation:
    """Gradient accumulation, and the effective batch size that it gives."""

    gradient_accumulation_steps: int

    effective_batch_size: int
    """Packs of one optimizer step over all ranks, or samples without packing."""


def resolve_accumulation(
    *,
    effective_batch_size: int | None,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int | None,
    world_size: int,
    forced_batch_size: int = 1,
) -> Accumulation:
    """
    Return the accumulation that keeps the effective batch where packing sets the batch size to 1.

    Args:
        effective_batch_size: Packs of an optimizer step over all ranks. None takes the product of
            per-device batch size, accumulation and ranks.
        per_device_train_batch_size: Packs or samples in a forward pass, as configured; >= 1.
        gradient_accumulation_steps: Batches of a step on a rank, as configured; None means 1.
        world_size: Data-parallel learners, >= 1.
        forced_batch_size: Per-device batch size of training, >= 1; 1 when packing.

    Raises:
        ArgumentError: The batch is not divisible by the ranks.

    >>> batch = resolve_accumulation(effective_batch_size=32, per_device_train_batch_size=4,
    ...                              gradient_accumulation_steps=None, world_size=2)
    >>> batch.gradient_accumulation_steps
    16
    """
    world_size = as_whole_number("world_size", world_size, most=MOST_RANKS)
    per_device = as_whole_number("per_device_train_batch_size", per_device_train_batch_size)
    accumulation = as_whole_number("gradient_accumulation_steps", gradient_accumulation_steps or 1)
    unit = world_size * as_whole_number("forced_batch_size", forced_batch_size)
    requested = world_size * per_device * accumulation
    if effective_batch_size is not None:
        requested = as_whole_number("effective_batch_size", effective_batch_size)
    if requested % unit:
        below = requested // unit * unit
        nearest = f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
        each = counted(world_size, "rank") + (f" x {forced_batch_size:,} per device" if forced_batch_size > 1 else "")
        fact = f"effective_batch_size is {requested:,}, which is not divisible by {each}"
        raise ArgumentError("batch_size", fact, {"effective_batch_size": requested, "nearest": nearest})
    return Accumulation(requested // unit, requested)


@attrs.frozen
class PartialWindow:
    """Last optimizer step of an epoch that has fewer batches than the others."""

    per_rank_batches: int
    gradient_accumulation_steps: int

    @property
    def remainder(self) -> int:
        """Number of each rank's batches in the epoch's last step."""
        return self.per_rank_batches % self.gradient_accumulation_steps

    @property
    def even_accumulation(self) -> int | None:
        """
        Nearest accumulation that divides the epoch's batches; None if there is none.

        It is between half and twice the present accumulation.
        """
        steps = self.gradient_accumulation_steps
        near = (one for one in range(-(-steps // 2), 2 * steps + 1) if not self.per_rank_batches % one)
        return min(near, key=lambda one: abs(one - steps), default=None)

    def __str__(self) -> str:
        return (
            f"in the last step of each epoch, each rank trains {counted(self.remainder, 'batch')} instead of "
            f"{self.gradient_accumulation_steps:,}"
        )


def partial_window(*, per_rank_batches: int, gradient_accumulation_steps: int) -> PartialWindow | None:
    """
    Return the partial last step of an epoch, or None if all steps are whole.

    >>> partial_window(per_rank_batches=7, gradient_accumulation_steps=4).remainder
    3
    """
    window = PartialWindow(
        as_whole_number("per_rank_batches", per_rank_batches),
        as_whole_number("gradient_accumulation_steps", gradient_accumulation_steps),
    )
    return window if window.remainder else None
