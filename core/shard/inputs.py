"""
Arguments that all ways of sharding share, checked.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import Literal, Self, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import IntArray, Lengths, as_lengths, checked_works, rounded_up, squares, whole_number
from packplan.core.work import WorkModel


def checked_groups(groups: Lengths, batches: Sequence[range]) -> IntArray:
    """
    Return the group of each sequence, numbered from 0.

    Args:
        groups: Label of each sequence, a whole number.
        batches: Sequences of each global batch.

    Raises:
        ArgumentError: Labels are not one whole number for each sequence, or a group has sequences
            in several global batches.
    """
    labels, num = np.asarray(groups), batches[-1].stop
    if labels.shape != (num,) or labels.dtype.kind not in "iu":
        fact = f"groups are labels of shape {labels.shape} and type {labels.dtype}, but the batch has {num:,} sequences"
        raise ArgumentError("batch", f"{fact}: give a whole number for each")
    names, numbers = np.unique(labels, return_inverse=True)
    batch_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    last = np.zeros(names.size, dtype=np.int64)
    np.maximum.at(last, numbers, batch_of)
    if (split := np.flatnonzero(last[numbers] != batch_of)).size:
        name, first = labels[split[0]], batch_of[split[0]]
        fact = f"group {name} has sequences in global batches {first:,} and {last[numbers[split[0]]]:,}"
        raise ArgumentError("batch", f"{fact}: order the batch by group, and end global batches with groups")
    return numbers


def assign_groups(groups: IntArray, values: IntArray, shards: int) -> list[IntArray]:
    """
    Return the sequences of each worker: groups in descending order, each to the least loaded.

    Args:
        groups: Group of each sequence, >= 0.
        values: Work of each sequence, in whole units.
        shards: Workers.
    """
    sums = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    np.add.at(sums, groups, values)
    workers = np.zeros_like(sums)
    heap = list(range(shards))  # load and worker in one number
    for group in np.argsort(-sums, kind="stable").tolist():
        workers[group] = heap[0] % shards
        heapreplace(heap, heap[0] + int(sums[group]) * shards)
    return [np.flatnonzero(workers[groups] == worker) for worker in range(shards)]


OF_TOKENS = frozenset(
    {
        "advantages", "attention_mask", "engine_log_probabilities", "input_ids", "labels", "log_probabilities",
        "loss_mask", "old_log_probabilities", "old_values", "position_ids", "reference_log_probabilities", "returns",
        "token_mask", "values",
    }
)  # fmt: skip
"""Names of fields in which a dimension as long as the tokens are wide is that of the tokens."""


def sequence_dims(
    shapes: Mapping[str, Sequence[int]], *, input_key: str, declared: Mapping[str, int | None]
) -> dict[str, int | None]:
    """
    Return the dimension of each field that runs along the sequence, None for fields of sequences.

    A field without a dimension as long as the tokens has none. One that has such a dimension may
    have it by chance, so it is declared unless its name says it (`OF_TOKENS`).

    Args:
        shapes: Shape of each tensor of a batch, which begins with the number of sequences.
        input_key: Field of the tokens, of shape (batch, width).
        declared: Dimension by field, None for one of sequences.

    Raises:
        ArgumentError: A declared dimension is not as long as the tokens are wide, or one has to be
            declared.

    >>> sequence_dims({"ids": (2, 8), "labels": (2, 8), "x": (2, 3)}, input_key="ids", declared={})
    {'ids': 1, 'labels': 1, 'x': None}
    """
    width = shapes[input_key][1]
    declared = {input_key: 1, **declared}
    for name, dim in declared.items():
        shape = shapes.get(name, ())
        if (dim is not None or name == input_key) and dim not in _fitting(shape, width):
            message = f"dimension {dim} of {name} is not as long as {input_key} are wide, {width:,} (sequence_dims)"
            raise ArgumentError("batch", message)
    found = dict[str, int | None]()
    for name, shape in shapes.items():
        fitting = _fitting(shape, width)
        if name not in declared and fitting and (name not in OF_TOKENS or len(fitting) > 1):
            message = (
                f"dimension {fitting[-1]} of {name} is as long as {input_key} are wide, {width:,}, but nothing says "
                f"whether by chance: set sequence_dims={{'{name}': {fitting[-1]}}}, or None if it is"
            )
            raise ArgumentError("batch", message)
        found[name] = declared.get(name, next(iter(fitting), None))
    return found


def _fitting(shape: Sequence[int], width: int) -> list[int]:
    """Return the dimensions that are as long as the tokens are wide."""
    return [dim for dim in range(1, len(shape)) if shape[dim] == width]


FloatArray = NDArray[np.floating | np.integer]

Work = WorkModel | Sequence[float] | FloatArray
"""Work of a model, or the work of each sequence in any unit."""

BatchSize = int | Sequence[int] | NDArray[np.integer]
"""Sequences of every global batch, or of each."""

WhenLong = Literal["error", "alone"]
"""Whether a sequence over the budget is an error or a microbatch of its own."""

WhenShort = Literal["fill", "error"]
"""Whether too few sequences are filled up with weight 0 or an error."""


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """
    Require that an option is one of its values.

    Args:
        name: Name of the option.
        value: Value that was given.
        choices: Values that it may have.

    Raises:
        ArgumentError: It has another one.
    """
    if value not in choices:
        message = f"{name} is {value!r}, but has to be one of {', '.join(choices)}"
        raise ArgumentError("batch", message)


def padded_lengths(
    lengths: Lengths, multiple: int, capacity: int | None = None, when_long: WhenLong = "error"
) -> tuple[IntArray, IntArray]:
    """
    Return lengths, and lengths rounded up.

    Args:
        lengths: Tokens of each sequence, >= 1.
        multiple: Divisor of rounded lengths.
        capacity: Positions of a microbatch; None for no limit.
        when_long: Whether a sequence over the capacity is an ArgumentError.
    """
    require_choice("when_long", when_long, get_args(WhenLong))
    array = as_lengths(lengths)
    padded = rounded_up(array, multiple)
    if capacity is not None and when_long == "error" and array.size and int(padded.max()) > capacity:
        over = np.flatnonzero(padded > capacity)
        index, widest = int(over[0]), int(padded.max())
        length, width = int(array[index]), int(padded[index])
        rounded = f", {width:,} when padded," if width != length else ""
        others = f"; {over.size:,} sequences are too wide, the widest {widest:,}" if over.size > 1 else ""
        fact = (
            f"sequence {index} has {counted(length, 'token')}{rounded} but a microbatch holds {capacity:,} "
            f"(max_tokens_per_microbatch){others}"
        )
        raise ArgumentError("over_budget", fact, {"index": index, "num_over": over.size, "widest": widest})
    return array, padded


@attrs.frozen(eq=False)
class SequenceWorks:
    """Work of sequences: that of the rows they are in, and that of each sequence beside it."""

    of_rows: Callable[[IntArray], NDArray[np.float64]]
    """Work of rows of one sequence each, from their widths."""

    own: NDArray[np.float64]
    """Work of each sequence that no padding changes; shape (num_sequences,)."""

    @classmethod
    def from_arguments(cls, work: Work | None, media_work: Sequence[float] | FloatArray | None, num: int) -> Self:
        """
        Return the works of sequences.

        Args:
            work: Work of the model or of each sequence; None counts squares of widths.
            media_work: Work of each sequence's images and videos; None for none.
            num: Sequences.

        Raises:
            ArgumentError: Numbers are not one for each sequence, or negative.
        """
        own = np.zeros(num) if media_work is None else checked_works(media_work, num, of="media")
        if work is None:
            return cls(squares, own)
        if isinstance(work, WorkModel):
            return cls(work.sample_flops, own)
        return cls(lambda widths: np.zeros(widths.shape), own + checked_works(work, num, of="sequences"))


def global_batches(num: int, batch_size: BatchSize) -> list[range]:
    """
    Return the sequences of each global batch.

    Args:
        num: Sequences of the batch.
        batch_size: Sequences of every global batch, the last one perhaps fewer; or of each.

    Raises:
        ArgumentError: There is no sequence, or the sizes of the global batches add up to others.
    """
    if not num:
        raise ArgumentError("batch", "the batch has no sequence, so there is nothing to cut")
    if isinstance(batch_size, (Sequence, np.ndarray)):
        ends = list(accumulate(whole_number("batch_size", size) for size in batch_size))
        if not ends or ends[-1] != num:
            sizes, sequences = ends[-1] if ends else 0, counted(num, "sequence")
            raise ArgumentError("batch", f"batch_size adds up to {sizes:,}, but the batch has {sequences}")
        return [range(start, end) for start, end in pairwise([0, *ends])]
    size = whole_number("batch_size", batch_size)
    return [range(start, min(start + size, num)) for start in range(0, num, size)]


def filled(costs: IntArray, wanted: int, when_short: WhenShort) -> IntArray:
    """
    Return the sequences of a global batch, filled with the shortest; shape (>= wanted,).

    Args:
        costs: Positions of each sequence.
        wanted: Fewest slots.
        when_short: Whether to fill or raise if there are fewer sequences.

    Raises:
        ArgumentError: There are fewer, and *when_short* is `error`.
    """
    short = max(0, wanted - costs.size)
    require_choice("when_short", when_short, get_args(WhenShort))
    if short and when_short == "error":
        fact = (
            f"{counted(costs.size, 'sequence')} cannot give {counted(wanted, 'microbatch')} or workers one each: "
            "fill up with weight 0 (when_short='fill')"
        )
        raise ArgumentError("batch", fact, {"num": costs.size, "wanted": wanted})
    return np.concatenate([np.arange(costs.size), np.full(short, costs.argmin())])
