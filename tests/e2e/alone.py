"""The reference of packed training: transformers' own forward pass, one sample at a time."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from transformers import TrainerCallback

from packplan.adapters.attention import using_native_attention
from tests.nearness import norm

POWERS = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}


def token_weights(encoded: dict[str, Any]) -> torch.Tensor:
    """Return what each supervised token of a sample weighs by itself; float64."""
    labels = torch.tensor(encoded["labels"])[1:]
    weights = torch.tensor(encoded.get("loss_scale", [1] * len(encoded["labels"])), dtype=torch.float64)[1:]
    return weights[labels != -100]


def token_losses(model: Any, encoded: dict[str, Any]) -> torch.Tensor:
    """Return the loss of each supervised token of a sample, in float64, with gradients."""
    inputs = {"input_ids": torch.tensor(encoded["input_ids"])[None]}
    for key in ("pixel_values", "image_grid_thw"):
        if encoded.get(key) is not None:
            inputs[key] = torch.as_tensor(encoded[key]).clone()
    if encoded.get("mm_token_type_ids") is not None:
        inputs["mm_token_type_ids"] = torch.as_tensor(encoded["mm_token_type_ids"]).clone().view(1, -1)
    labels = torch.tensor(encoded["labels"])[1:]
    with using_native_attention(model):
        rows = torch.log_softmax(model(**inputs).logits[0, :-1].double(), -1)[labels != -100]
    return -rows.gather(-1, labels[labels != -100][:, None])[:, 0]


@attrs.frozen(eq=False)
class Step:
    """Expected loss and gradients of a step over several samples."""

    loss: float
    """0 where no token is supervised."""

    gradients: dict[str, torch.Tensor]

    scale: float
    """Sum of the norms of the gradients of the samples, which may cancel."""


def step_alone(model: Any, samples: list[dict[str, Any]], reduction: str = "token") -> Step:
    """Compute a step sample by sample; *reduction* weighs samples by a key of `POWERS`."""
    sums = [float(token_weights(encoded).sum()) for encoded in samples]
    each = [own ** POWERS[reduction] if own else 0.0 for own in sums]
    total = sum(weight * own for weight, own in zip(each, sums, strict=True)) or 1.0
    loss, scale, gradients = 0.0, 0.0, {}
    for encoded, weight in zip(samples, each, strict=True):
        if weight:
            model.zero_grad()
            share = weight * (token_losses(model, encoded) * token_weights(encoded)).sum() / total
            share.backward()
            own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            loss, scale = loss + float(share.detach()), scale + norm(own)
            gradients |= {name: gradients.get(name, 0) + gradient for name, gradient in own.items()}
    model.zero_grad()
    return Step(loss, gradients, scale)


def silence(setattr_: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let records whose first message is `silent` have no supervised token."""
    from packplan.adapters.samples import encoder
    from packplan.adapters.samples.encoder import SwiftEncoder
    from packplan.adapters.samples.measurer import SwiftMeasurer

    # Counting texts would not see it.
    setattr_(SwiftMeasurer, "_piece_counter", None)
    # ms-swift would learn from it.
    setattr_(encoder, "find_difference", lambda *_, **__: "")
    encode = SwiftEncoder.apply_template

    def without_labels(samples: Any, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        encoded = encode(samples, index, sample)
        if sample["messages"][0]["content"] == "silent":
            encoded["labels"] = [-100] * len(encoded["labels"])
        return encoded

    setattr_(SwiftEncoder, "apply_template", without_labels)


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        """Copy what the optimizer is about to see."""
        plain = getattr(model, "module", model)
        self.steps.append({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})
