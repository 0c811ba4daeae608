"""How near float sums have to be: on the scale of their terms (Higham 2002, section 4.2)."""

import math
from collections.abc import Mapping

import torch

FLOAT32 = 1e-5
"""Share of the terms' scale: some hundred roundings."""

Tensors = Mapping[str, torch.Tensor]


def norm(tensors: Tensors) -> float:
    """Return the Euclidean norm of all numbers together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def apart(found: Tensors, expected: Tensors, *, scale: float | None = None) -> float:
    """
    Return how far tensors are from the expected ones, by the norm of their difference; a missing
    one is 0.

    Args:
        found: Tensors by name.
        expected: What they are to be.
        scale: Of the terms that were summed: the sum of the norms of what each contributes. None
            takes the norm of *expected*, for what does not cancel.
    """
    zero = torch.zeros(())
    names = found.keys() | expected.keys()
    difference = norm({name: found.get(name, zero).double() - expected.get(name, zero).double() for name in names})
    return difference / (norm(expected) if scale is None else scale)


def assert_near(found: torch.Tensor | float, expected: torch.Tensor | float, *, scale: float) -> None:
    """
    Hold a float32 sum, or a tensor of sums, against the exact one.

    Args:
        found: What was computed.
        expected: What it is to be, of the same shape.
        scale: Sum of the absolute terms; where it is 0, nothing may differ.
    """
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    assert found.shape == expected.shape
    distance = float((found - expected).norm())
    assert distance <= FLOAT32 * scale, f"{distance:.2g} apart, where the terms add up to {scale:.2g}"
