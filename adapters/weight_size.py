"""
Whether trained weights are worth saving, by their size.

A step with a learning rate of 1e30 leaves weights that are finite and hold nothing of the model.
The loss of another forward pass would not show it: norms divide by what overflowed, and the loss of
a model that knows nothing is finite. The root mean square of the trained weights shows it, for one
pass over them before a save. Where it is a thousand times what it was before the first step, a
thousandth of the weights is what the model was. A run that learns stays far below that: a step of
AdamW moves a weight by about the learning rate, and runs from random weights end with a few times
the size that they began with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_RUINED = 1000.0
"""Weights of so many times their size before the first step are ruined."""

_LEAST = 0.01
"""
Size that weights count as before the first step, at least: those of adapters and biases may begin
at 0.
"""


@torch.no_grad()
def mean_size(weights: Iterable[torch.Tensor], *, sharded: bool = False) -> float:
    """
    Return the root mean square of those weights that are trained; nan or inf where one of them is
    no finite number.

    Args:
        weights: Of the model, or this rank's part of them.
        sharded: Sum over all ranks, which all call this.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for weight in weights:
        if weight.requires_grad:
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            norm = torch.linalg.vector_norm(part, dtype=torch.float64).cpu()
            sums += torch.stack([norm**2, torch.tensor(part.numel(), dtype=torch.float64)])
    if sharded:
        dist.all_reduce(sums)
    squares, number = sums.tolist()
    return math.sqrt(squares / max(1.0, number))


def is_ruined(size: float, *, before: float) -> bool:
    """
    Return whether weights of this mean size hold nothing of what they were.

    Args:
        size: Root mean square of the trained weights now.
        before: The same before the first step.

    >>> [is_ruined(size, before=0.02) for size in (0.5, 1e30, float("nan"))]
    [False, True, True]
    """
    return not size <= _RUINED * max(before, _LEAST)
