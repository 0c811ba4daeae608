"""The dimension of a field that runs along its sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packplan.core.errors import ArgumentError

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
