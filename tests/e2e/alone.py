"""The reference that packed training is held against: transformers' own forward pass and attention, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers  # isort: skip

import torch
from transformers import TrainerCallback

from adapters.attention import native_attention

POWERS = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}


def token_losses(model: Any, encoded: dict[str, Any]) -> torch.Tensor:
    """Return the loss of each supervised token of a sample; float64, with gradients. The model is not to checkpoint layers."""
    inputs = {"input_ids": torch.tensor(encoded["input_ids"])[None]}
    for key in ("pixel_values", "image_grid_thw"):
        if encoded.get(key) is not None:
            inputs[key] = torch.as_tensor(encoded[key]).clone()
    if encoded.get("mm_token_type_ids") is not None:
        inputs["mm_token_type_ids"] = torch.as_tensor(encoded["mm_token_type_ids"]).clone().view(1, -1)
    labels = torch.tensor(encoded["labels"])[1:]
    with native_attention(model):
        rows = torch.log_softmax(model(**inputs).logits[0, :-1].double(), -1)[labels != -100]
    return -rows.gather(-1, labels[labels != -100][:, None])[:, 0]


def weighted_mean(model: Any, samples: list[dict[str, Any]], reduction: str = "token") -> torch.Tensor:
    """Return the loss of several samples; with gradients, and 0 where no token is supervised."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for encoded in samples:
        losses = token_losses(model, encoded)
        if losses.numel():
            each = losses.numel() ** POWERS[reduction]
            total, weight = total + each * losses.sum(), weight + each * losses.numel()
    return total / max(weight, 1)


def silence(setattr_: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let records whose first message is `silent` have no supervised token, when they are measured and later."""
    from adapters.swift_samples import SwiftSamples

    encode = SwiftSamples._encode

    def without_labels(samples: Any, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        encoded = encode(samples, index, sample)
        if sample["messages"][0]["content"] == "silent":
            encoded["labels"] = [-100] * len(encoded["labels"])
        return encoded

    setattr_(SwiftSamples, "_encode", without_labels)


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        """Copy what the optimizer is about to see."""
        plain = getattr(model, "module", model)
        self.steps.append({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients over the norm of the expected one."""
    names = found.keys() | expected.keys()
    zero = torch.zeros(())
    difference = sum((found.get(n, zero).double() - expected.get(n, zero).double()).square().sum() for n in names)
    return float((difference / sum(g.double().square().sum() for g in expected.values())).sqrt())
