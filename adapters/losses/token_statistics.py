"""
Log-probabilities of tokens and entropies of their distributions, computed from logits.

Forward and backward passes convert the logits to float32 in blocks of positions. So the gradient is
the only array of the logits' size that is allocated.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

NO_TARGET = -1
"""Target of a position that predicts no token."""

_LEAST = -1e9
"""
Lower limit of log-probabilities that are multiplied by probabilities. The limit is finite, so that
its product with probability 0 is 0, not NaN.
"""

_CPU_BLOCK, _DEVICE_BLOCK = 1 << 18, 1 << 26
"""
Largest number of float32 logits in a block of several positions. 1 MiB fits into a CPU core's
cache; 256 MiB keep a GPU busy.
"""


def token_statistics(
    logits: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the log-probability of each target, and the entropy at each position.

    Args:
        logits: Logits of any floating-point type; shape (num_positions, vocabulary). If ranks share
            a row, these are the logits of this rank's part.
        targets: Token to predict at each position, or `NO_TARGET`; shape (num_positions,).
        with_entropy: Whether to compute entropies, which are differentiable too.

    Returns:
        Log-probabilities and entropies, in nats; float32 of shape (num_positions,), 0 at positions
        without a target. If entropies are not computed, their tensor is empty.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        logits, targets, with_entropy
    )
    return found


class _TokenStatistics(torch.autograd.Function):
    """Autograd function of `token_statistics`, which processes positions in blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        with_entropy: bool,  # noqa: FBT001  # `apply` has no keywords
    ) -> tuple[torch.Tensor, torch.Tensor]:
        has_target = targets != NO_TARGET
        picked = targets.clamp(min=0)[:, None]
        found = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty(len(targets) if with_entropy else 0, dtype=torch.float32, device=logits.device)
        for block in _position_blocks(logits):
            every = torch.log_softmax(logits[block], -1, dtype=torch.float32)
            found[block] = every.gather(1, picked[block])[:, 0]
            if with_entropy:
                entropy[block] = -torch.linalg.vecdot(every.exp(), every.clamp_(min=_LEAST))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, picked, has_target, entropy)
        return found.masked_fill_(~has_target, 0), entropy.masked_fill(~has_target, 0) if with_entropy else entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, entropy_grad: torch.Tensor | None) -> tuple[Any, None, None]:
        logits, picked, has_target, entropy = ctx.saved_tensors
        scale = (torch.zeros_like(entropy) if gradient is None else gradient * has_target)[:, None]
        bonus = None if entropy_grad is None else (entropy_grad * has_target)[:, None]
        found = torch.empty_like(logits)
        for block in _position_blocks(logits):
            if bonus is None:
                shares, factors = torch.softmax(logits[block], -1, dtype=torch.float32), -scale[block]
            else:
                # The gradient of the entropy H is -p (log p + H).
                every = torch.log_softmax(logits[block], -1, dtype=torch.float32).clamp_(min=_LEAST)
                shares = every.exp()
                factors = every.add_(entropy[block, None]).mul_(-bonus[block]).sub_(scale[block])
            found[block] = shares.mul_(factors).scatter_add_(1, picked[block], scale[block])
        return found, None, None


def _position_blocks(logits: torch.Tensor) -> list[slice]:
    size = max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]
