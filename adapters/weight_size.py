"""
Check of trained weights before they are saved, by their root mean square.

A step with a learning rate of 1e30 leaves finite weights that hold nothing of the model. The loss
of another forward pass may be finite too, since norms divide by the overflow. The root mean square
of the trained weights shows the fault, for one pass over them. Weights a thousand times their size
before the first step are ruined: a thousandth of them is the old model. Normal runs stay far below.
A step of AdamW moves a weight by about the learning rate, and runs from random weights end at a few
times their first size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_MAX_GROWTH = 1000.0
"""Growth since before the first step from which weights count as ruined."""

_MIN_SIZE = 0.01
"""Smallest size before the first step, since adapters and biases may begin at 0."""


@torch.no_grad()
def mean_size(weights: Iterable[torch.Tensor], *, sharded: bool = False) -> float:
    """
    Return the root mean square of the trained weights; nan or inf if one of them is not finite.

    Args:
        weights: Weights of the model, or this rank's part of them.
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
    Return whether weights have lost their values, by their root mean square.

    Args:
        size: Root mean square of the trained weights now.
        before: Root mean square before the first step.

    >>> [is_ruined(size, before=0.02) for size in (0.5, 1e30, float("nan"))]
    [False, True, True]
    """
    return not size <= _MAX_GROWTH * max(before, _MIN_SIZE)
