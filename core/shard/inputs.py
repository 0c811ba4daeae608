"""
Checks and conversions of the arguments that all sharding functions have in common, and the work of
sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import IntArray, Lengths, as_lengths, as_whole_number, as_works, round_up_lengths, squares
from packplan.core.work.model import WorkModel

TOKEN_FIELDS = frozenset(
    {
        "advantages", "attention_mask", "input_ids", "labels", "log_probabilities", "loss_mask",
        "old_log_probabilities", "position_ids", "reference_log_probabilities", "token_mask", "values",
    }
)  # fmt: skip
"""
Names of fields with one value for each token. In these fields, the dimension that is as long as the
input's width runs along the tokens.
"""


def sequence_dims(
    shapes: Mapping[str, Sequence[int]], *, input_key: str, declared: Mapping[str, int | None]
) -> dict[str, int | None]:
    """
    Return, for each field, the dimension that runs along the tokens; None for a field without such
    a dimension.

    A dimension may be as long as the input's width by chance. A field with a dimension of this size
    therefore has to be declared, unless the field is in `TOKEN_FIELDS` and has only one.

    Args:
        shapes: Name of each tensor in the batch -> its shape. The first dimension of each tensor is
            the number of sequences.
        input_key: Name of the field of input tokens, of shape (num_sequences, width).
        declared: Field -> its dimension along the tokens; None for a field with one value for each
            sequence.

    Raises:
        ArgumentError: A declared dimension is not as long as the input's width, or a dimension has
            to be declared.

    >>> sequence_dims({"ids": (2, 8), "labels": (2, 8), "x": (2, 3)}, input_key="ids", declared={})
    {'ids': 1, 'labels': 1, 'x': None}
    """
    width = shapes[input_key][1]
    declared = {input_key: 1, **declared}
    for name, dim in declared.items():
        shape = shapes.get(name, ())
        if (dim is not None or name == input_key) and dim not in _matching_dims(shape, width):
            message = f"sequence_dims has {dim} for {name}, but needs a dimension of {input_key}'s width, {width:,}"
            raise ArgumentError("batch", message)
    found = dict[str, int | None]()
    for name, shape in shapes.items():
        fitting = _matching_dims(shape, width)
        if name not in declared and fitting and (name not in TOKEN_FIELDS or len(fitting) > 1):
            message = (
                f"dimension {fitting[-1]} of {name} is {width:,}, like the width of {input_key}, which may be "
                f"chance: set sequence_dims={{'{name}': {fitting[-1]}}}, or {{'{name}': None}} if it is chance"
            )
            raise ArgumentError("batch", message)
        found[name] = declared.get(name, next(iter(fitting), None))
    return found


def _matching_dims(shape: Sequence[int], width: int) -> list[int]:
    """Return the dimensions of *shape*, except the first, that have the size *width*."""
    return [dim for dim in range(1, len(shape)) if shape[dim] == width]


FloatArray = NDArray[np.floating | np.integer]

Work = WorkModel | Sequence[float] | FloatArray
"""Work model of a model, or the work of each sequence in any unit."""

WhenLong = Literal["error", "alone"]
"""Whether a sequence longer than the token limit is an error or a microbatch by itself."""


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """
    Raise an error if the value of an option is not one of its choices.

    Args:
        name: Name of the option.
        value: Value of the option.
        choices: Allowed values.

    Raises:
        ArgumentError: The value is not one of *choices*.
    """
    if value not in choices:
        raise ArgumentError("batch", f"{name} is {value!r}, but has to be one of {', '.join(choices)}")


def lengths_and_padded(
    lengths: Lengths, multiple: int, capacity: int | None = None, when_long: WhenLong = "error", *, name: str
) -> tuple[IntArray, IntArray]:
    """
    Return the lengths as an array, and the lengths rounded up to *multiple*.

    Args:
        lengths: Number of tokens of each sequence, >= 1.
        multiple: Each length is rounded up to a multiple of this number.
        capacity: Maximum number of positions in a microbatch; None sets no limit.
        when_long: `error` raises an ArgumentError if a padded sequence exceeds the capacity;
            `alone` accepts such a sequence.
        name: Name of the argument *multiple* in errors.
    """
    multiple = as_whole_number(name, multiple)
    require_choice("when_long", when_long, get_args(WhenLong))
    array = as_lengths(lengths)
    padded = round_up_lengths(array, multiple)
    if capacity is not None and when_long == "error" and array.size and int(padded.max()) > capacity:
        over = np.flatnonzero(padded > capacity)
        index, widest = int(over[0]), int(padded.max())
        length, width = int(array[index]), int(padded[index])
        rounded = f", {width:,} when padded," if width != length else ""
        others = f"; {over.size:,} sequences are too wide, the widest {widest:,}" if over.size > 1 else ""
        fact = (
            f"sequence {index} has {counted(length, 'token')}{rounded} but a microbatch holds at most {capacity:,} "
            f"(max_tokens_per_microbatch){others}"
        )
        raise ArgumentError("over_budget", fact, {"index": index, "num_over": over.size, "widest": widest})
    return array, padded


@attrs.frozen(eq=False)
class SequenceWorks:
    """
    Work of sequences in two parts: one that depends on the padded width, and one that does not.
    """

    row_works: Callable[[IntArray], NDArray[np.float64]]
    """Function that returns the work of rows of one sequence each, given their widths."""

    fixed: NDArray[np.float64]
    """Part of each sequence's work that padding does not change; shape (num_sequences,)."""

    @classmethod
    def from_arguments(cls, work: Work | None, num: int) -> Self:
        """
        Return the work of *num* sequences. If *work* is None, the work of a row is its squared
        width.
        """
        if work is None or isinstance(work, WorkModel):
            return cls(squares if work is None else work.sample_flops, np.zeros(num))
        return cls(lambda widths: np.zeros(widths.shape), as_works(work, num, items="sequences"))


def global_batches(num: int, batch_size: int) -> list[range]:
    """
    Return the sequence indices of each global batch; the last batch may have fewer sequences.

    Raises:
        ArgumentError: There is no sequence, or *batch_size* is not a whole number from 1.
    """
    if not num:
        raise ArgumentError("batch", "the batch has no sequence, so there is nothing to divide")
    size = as_whole_number("batch_size", batch_size)
    return [range(start, min(start + size, num)) for start in range(0, num, size)]


def slot_sequences(costs: IntArray, least: int) -> IntArray:
    """
    Return the sequence in each slot of a global batch. The shortest sequence fills extra slots.

    Args:
        costs: Number of positions of each sequence.
        least: Minimum number of slots. If there are more sequences, each has one slot.
    """
    return np.concatenate([np.arange(costs.size), np.full(max(0, least - costs.size), costs.argmin())])
