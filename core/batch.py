"""
Arithmetic of an optimizer step: ranks that share rows, gradient accumulation, and a partial last
step.
"""

import attrs
import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, as_whole_number

IGNORED_LABEL = -100
"""Label of tokens that the losses of torch and transformers ignore."""


def count_row_groups(num_ranks: int, row_ranks: int) -> int:
    """
    Return the number of groups of ranks that share a packed row. A plan counts each group as one
    rank.

    Group g consists of *row_ranks* ranks, starting at rank g * *row_ranks*.

    Args:
        num_ranks: Number of all ranks.
        row_ranks: Number of neighbouring ranks that share each row; has to divide *num_ranks*.

    Raises:
        ArgumentError: *row_ranks* does not divide *num_ranks*.

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

    The degree is the smallest power of two for which each rank has at most *packing_length* of the
    pack's tokens.

    Args:
        tokens: Number of tokens of each pack, >= 1.
        packing_length: Maximum number of tokens in a pack of several samples, >= 1.
        max_degree: Maximum number of ranks that share a pack, a power of two. Packs that need more
            ranks are shared by *max_degree* ranks.

    >>> pack_degrees(np.array([7, 8, 9, 16, 33]), 8, max_degree=4).tolist()
    [1, 1, 2, 2, 4]
    """
    limits = packing_length * 2 ** np.arange(MOST_RANKS.bit_length())
    return np.minimum(2 ** np.searchsorted(limits, tokens), max_degree)


def largest_degree(num_ranks: int, asked: int | None = None) -> int:
    """
    Return the maximum degree of a pack: *asked* if it is valid, or the largest possible degree.

    Args:
        num_ranks: Number of all ranks, >= 1.
        asked: Requested maximum degree. None means the largest power of two that divides
            *num_ranks*.

    Raises:
        ArgumentError: *asked* is not a power of two that divides *num_ranks*.

    >>> largest_degree(12), largest_degree(12, 2)
    (4, 2)
    """
    most = num_ranks & -num_ranks
    if asked is None:
        return most
    if as_whole_number("max_degree", asked, most=MOST_RANKS) & (asked - 1) or asked > most:
        fact = f"at most {counted(asked, 'rank')} may share a pack, but {asked} is not a power of two that divides"
        raise ArgumentError("degree", f"{fact} the {counted(num_ranks, 'rank')}", {"largest": most})
    return asked


@attrs.frozen
class Accumulation:
    """Gradient accumulation, and the effective batch size that results from it."""

    gradient_accumulation_steps: int

    effective_batch_size: int
    """
    Number of packs in one optimizer step over all ranks; without packing, the number of samples.
    """


def resolve_accumulation(
    *,
    effective_batch_size: int | None,
    per_device_train_batch_size: int,
    gradient_accumulation_steps: int | None,
    world_size: int,
    forced_batch_size: int = 1,
) -> Accumulation:
    """
    Return the gradient accumulation that keeps the effective batch size if training uses another
    per-device batch size than configured.

    Args:
        effective_batch_size: Number of packs in an optimizer step over all ranks. None means the
            per-device batch size times the accumulation steps times the number of ranks.
        per_device_train_batch_size: Number of packs or samples in a forward pass, as configured; >=
            1.
        gradient_accumulation_steps: Number of batches of one rank in a step, as configured; None
            means 1.
        world_size: Number of data-parallel ranks, >= 1.
        forced_batch_size: Per-device batch size that training actually uses, >= 1; 1 with packing.

    Raises:
        ArgumentError: The effective batch size is not divisible by *world_size* times
            *forced_batch_size*.

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
    """The last optimizer step of an epoch, if it has fewer batches than the other steps."""

    per_rank_batches: int
    gradient_accumulation_steps: int

    @property
    def remainder(self) -> int:
        """Number of each rank's batches in the epoch's last step."""
        return self.per_rank_batches % self.gradient_accumulation_steps

    @property
    def even_accumulation(self) -> int | None:
        """
        Nearest accumulation that divides the number of a rank's batches in an epoch; None if there
        is none.

        Only values between half and twice the configured accumulation are considered.
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
    Return the partial last step of an epoch, or None if all steps have the same number of batches.

    >>> partial_window(per_rank_batches=7, gradient_accumulation_steps=4).remainder
    3
    """
    window = PartialWindow(
        as_whole_number("per_rank_batches", per_rank_batches),
        as_whole_number("gradient_accumulation_steps", gradient_accumulation_steps),
    )
    return window if window.remainder else None
