"""Costs of a loss on packed logits: what `python -m app.bench loss` runs, which loads torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from packplan.adapters.policy_loss import ClippedPolicyLoss
from packplan.adapters.sequence_loss import FusedLoss, PackedLoss, normalisers
from packplan.core.context_parallel import PackedLayout

Loss = Callable[[torch.Tensor], tuple[torch.Tensor, Mapping[str, Any]]]


@attrs.frozen
class LossCost:
    """One vocabulary: the same loss both ways, forward and backward."""

    vocabulary: int
    num_sequences: int
    length: int
    loop_ms: float
    """One sequence after the other, of `torch.split`; median."""

    fused_ms: float
    """All of the row at once; median."""

    ratio: float
    """How many times faster; median of the ratios of neighbouring runs."""

    loop_kept_bytes: int
    """What the forward pass keeps for the backward pass, beside the logits."""

    fused_kept_bytes: int

    loss_difference: float
    """
    How far the two losses are apart, over the mean absolute advantage: losses of tokens have both
    signs, and cancel.
    """

    gradient_difference: float
    """How far the logits' gradients are apart, over their norm."""


def plain_policy_loss(
    logits: torch.Tensor,
    data: Mapping[str, Any],
    *,
    num_sequences: float,  # noqa: ARG001  # every loss is given both
    num_tokens: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    Return the clipped policy loss of a batch as it is commonly written, knowing nothing of packing;
    token mean.

    Args:
        logits: Padded rows; shape (rows, length, vocabulary).

        data: Fields of the batch: `input_ids`, `token_mask`, `advantages`, `old_log_probabilities`.

        num_sequences: Sequences of the whole batch; of no use here.

        num_tokens: Answer tokens of the whole batch.
    """
    mask, advantages = data["token_mask"][:, 1:], data["advantages"][:, None]
    every = torch.log_softmax(logits[:, :-1].float(), -1)
    log_probabilities = every.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    ratios = (log_probabilities - data["old_log_probabilities"][:, 1:]).exp()
    losses = torch.maximum(-ratios * advantages, -ratios.clamp(0.8, 1.2) * advantages)
    return (losses * mask).sum() / num_tokens, {"ratio": (ratios.detach() * mask).sum() / num_tokens}


def measure_loss(vocabulary: int, *, num_sequences: int, length: int, repeat: int, seed: int = 0) -> LossCost:
    """
    Measure both ways in turn, on float32 logits of a full row.

    Args:
        vocabulary: Entries of a row of logits.

        num_sequences: Sequences in the row.

        length: Tokens of each.

        repeat: Pairs of runs that count; one before them warms up.

        seed: Of logits and data.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, length)
    data = {
        "input_ids": torch.randint(0, vocabulary, shape, generator=generator),
        "token_mask": torch.ones(shape),
        "advantages": torch.randn(num_sequences, generator=generator),
        "old_log_probabilities": -torch.rand(shape, generator=generator) - torch.tensor(float(vocabulary)).log(),
    }
    logits = torch.randn(1, num_sequences * length, vocabulary, generator=generator).requires_grad_()
    valid_sequences, valid_tokens = normalisers(data["token_mask"])
    given: dict[str, Any] = {
        "data": data,
        "layout": PackedLayout.of([length] * num_sequences),
        "num_sequences": valid_sequences,
        "num_tokens": valid_tokens,
    }
    ways: tuple[Loss, Loss] = (
        partial(PackedLoss(plain_policy_loss), **given),
        partial(FusedLoss(ClippedPolicyLoss()), **given),
    )
    (loop, loop_gradient, loop_bytes), (fused, fused_gradient, fused_bytes) = (_once(way, logits) for way in ways)
    difference = float((fused_gradient - loop_gradient).norm() / loop_gradient.norm())
    del loop_gradient, fused_gradient
    pairs = [tuple(_seconds(way, logits) for way in ways) for _ in range(repeat + 1)][1:]
    return LossCost(
        vocabulary=vocabulary,
        num_sequences=num_sequences,
        length=length,
        loop_ms=1000 * statistics.median(slow for slow, _ in pairs),
        fused_ms=1000 * statistics.median(fast for _, fast in pairs),
        ratio=statistics.median(slow / fast for slow, fast in pairs),
        loop_kept_bytes=loop_bytes,
        fused_kept_bytes=fused_bytes,
        loss_difference=abs(fused - loop) / float(data["advantages"].abs().mean()),
        gradient_difference=difference,
    )


def _once(way: Loss, logits: torch.Tensor) -> tuple[float, torch.Tensor, int]:
    """
    Return the loss, the logits' gradient, and the bytes that are kept between forward and backward.
    """
    kept: dict[int, int] = {logits.untyped_storage().data_ptr(): 0}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = way(logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient, sum(kept.values())


def _seconds(way: Loss, logits: torch.Tensor) -> float:
    start = time.perf_counter()
    loss, _ = way(logits)
    torch.autograd.grad(loss, logits)
    return time.perf_counter() - start
