"""
Layers that carry a state along a row (linear attention, Mamba, convolutions over time), run sample
by sample.
"""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from packplan.adapters.attention.rows import PackedRow, computing, row_of_layers

_BOUNDARIES = ("cu_seq", "max_length", "max_seq", "seq_idx")
"""Beginnings of the names of arguments that tell fast kernels where a row's samples begin."""


def split_states(model: torch.nn.Module, classes: Collection[str]) -> None:
    """
    Let the layers of some classes run sample by sample within packed rows; see `follow_rows`.

    Args:
        model: Has them.
        classes: Names of the layers' classes.
    """
    for module in model.modules():
        if type(module).__name__ in classes:
            module.forward = _by_samples(module.forward)


def _by_samples(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that splits what has the row's tokens, and joins what comes out."""

    @wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        row = row_of_layers()
        if row is None or len(row.lengths) == 1:
            return plain(*arguments, **options)
        options = {name: value for name, value in options.items() if not name.startswith(_BOUNDARIES)}
        samples = zip(_split(arguments, row), _split(options, row), strict=True)
        with computing(None):  # each part is a row of one sample
            return _join_outputs([plain(*part, **named) for part, named in samples], row)

    return forward


def _split(value: Any, row: PackedRow) -> list[Any]:
    """
    Return each sample's part of a tensor whose first or second axis is the row's; others as they
    are.
    """
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == row.tokens:
        return list(torch.split(value, list(row.lengths), 1))
    if isinstance(value, torch.Tensor) and value.dim() >= 1 and value.shape[0] == row.tokens:
        return list(torch.split(value, list(row.lengths), 0))
    if type(value) in (tuple, list) and value:
        return [type(value)(items) for items in zip(*(_split(item, row) for item in value), strict=True)]
    if type(value) is dict:
        split = {name: _split(item, row) for name, item in value.items()}
        return [{name: items[number] for name, items in split.items()} for number in range(len(row.lengths))]
    return [value] * len(row.lengths)


def _join_outputs(outputs: list[Any], row: PackedRow) -> Any:
    """Join the outputs of a row's samples along the axis that has each sample's tokens."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        for axis in (1, 0):
            if all(
                one.dim() > axis and one.shape[axis] == length for one, length in zip(outputs, row.lengths, strict=True)
            ):
                return torch.cat(outputs, axis)
        return outputs[-1]
    if type(first) in (tuple, list):
        return type(first)(_join_outputs(list(items), row) for items in zip(*outputs, strict=True))
    return first
