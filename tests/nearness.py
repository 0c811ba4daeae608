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
    """Return how far tensors are apart by norm; *scale* is that of terms that cancel."""
    zero = torch.zeros(())
    names = found.keys() | expected.keys()
    difference = norm({name: found.get(name, zero).double() - expected.get(name, zero).double() for name in names})
    return difference / (norm(expected) if scale is None else scale)


def assert_near(found: torch.Tensor | float, expected: torch.Tensor | float, *, scale: float) -> None:
    """Hold float32 sums against exact ones, on the *scale* of their absolute terms."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    assert found.shape == expected.shape
    distance = float((found - expected).norm())
    assert distance <= FLOAT32 * scale, f"{distance:.2g} apart, where the terms add up to {scale:.2g}"
