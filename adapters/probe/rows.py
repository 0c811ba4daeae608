"""A packed row of a probe, and a model's results for it: packed, and for each sample alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.models import Gradients, add_gradients, difference_norms
from packplan.core.equality import ProbeResult, loss_difference

_SEED = 7
"""Seed of the tokens."""

_ENOUGH = 8
"""Tokens of a sample, of which half is no accident."""


@attrs.frozen(eq=False)
class ProbeRow:
    """Samples of random tokens, one after the other."""

    ids: torch.Tensor
    """Token ids; int64 of shape (1, tokens)."""

    lengths: tuple[int, ...]

    rows_of_positions: int
    """Rows that the model takes: 1, or 4 with those of images."""

    @classmethod
    def draw(cls, model: Any, lengths: Sequence[int], *, ids: Sequence[int]) -> ProbeRow:
        """
        Draw a row for a model.

        Args:
            model: Model of transformers.
            lengths: Tokens of each sample.
            ids: Token ids to draw from.
        """
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.tensor(ids)[torch.randint(len(ids), (1, sum(lengths)), generator=generator)]
        sees = any(hasattr(module, "get_rope_index") for module in model.modules())
        return cls(drawn.to(next(model.parameters()).device), tuple(lengths), 4 if sees else 1)

    @property
    def spans(self) -> list[slice]:
        """Place of each sample."""
        return [slice(*span) for span in pairwise(accumulate(self.lengths, initial=0))]

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the row as training gives it to the model: positions that restart, and no mask."""
        positions = torch.cat([torch.arange(length, device=self.ids.device) for length in self.lengths])[None]
        if self.rows_of_positions > 1:
            positions = positions.expand(self.rows_of_positions, 1, -1)
        return {"input_ids": self.ids, "position_ids": positions}

    def alone(self, number: int) -> dict[str, torch.Tensor]:
        """Return one sample, with nothing that a packed row needs."""
        ids = self.ids[:, self.spans[number]]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@attrs.frozen(eq=False)
class Alone:
    """Results of a row's samples alone, under the model's native attention."""

    logits: list[torch.Tensor]
    losses: list[float]
    gradients: Gradients
    norms: float
    """Sum of the norms of each sample's gradients."""


def losses_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each token by those before it."""
    return F.cross_entropy(logits[:-1].float(), ids[1:])


def measure_alone(model: Any, row: ProbeRow, *, with_gradients: bool = True) -> Alone:
    """
    Compute each sample alone, the last one first.

    So a state that a layer keeps from call to call differs from one that it keeps along the row.

    Args:
        model: Model in evaluation mode, under its native attention.
        row: Row with the samples.
        with_gradients: Compute the gradients of the weights too.
    """
    logits, losses, norms = [], [], 0.0
    total: Gradients = {}
    for number, span in reversed(list(enumerate(row.spans))):
        with torch.set_grad_enabled(with_gradients):
            one = model(**row.alone(number), use_cache=False).logits[0]
            loss = losses_of(one, row.ids[0, span])
        if with_gradients:
            norms += add_gradients(total, _weight_gradients(model, loss))
        logits.append(one.detach().float())
        losses.append(float(loss.detach()))
    return Alone(logits[::-1], losses[::-1], total, norms)


def measure_packed(
    model: Any, row: ProbeRow, alone: Alone, *, with_gradients: bool = True, typical: bool = False
) -> ProbeResult:
    """
    Compare a packed row with its samples alone, and see whether gradients pass between them.

    Args:
        model: Model in evaluation mode, set to pack.
        row: Row with the samples.
        alone: Results of the samples alone.
        with_gradients: Compare the gradients of the weights too.
        typical: Compare each sample's typical token, not the worst, and no losses.
    """
    embedded: list[torch.Tensor] = []

    def collect(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        """Collect the embeddings, as leaves that gradients reach."""
        embedded.append(output)
        return output if output.requires_grad else output.requires_grad_()

    with model.get_input_embeddings().register_forward_hook(collect):
        logits = model(**row.packed(), use_cache=False).logits[0]
    isolation = _isolation(logits, embedded[0], row)
    scale = max(float(one.abs().max()) for one in alone.logits)
    different = max(
        _of_tokens((logits[span].detach().float() - one).abs().amax(-1), typical=typical)
        for span, one in zip(row.spans, alone.logits, strict=True)
    )
    losses = [losses_of(logits[span], row.ids[0, span]) for span in row.spans]
    # A loss is the difference of a log-sum-exp and a logit, and rounds as they do.
    different_loss = max(
        loss_difference(float(loss.detach()), expected, terms=scale)
        for loss, expected in zip(losses, alone.losses, strict=True)
    )
    gradients = 0.0
    if with_gradients:
        found = _weight_gradients(model, torch.stack(losses).sum())
        gradients = math.hypot(*difference_norms(found, alone.gradients).values()) / (alone.norms or 1.0)
    losses_differ = 0.0 if typical else _number(different_loss)
    return ProbeResult(isolation, _number(different / (scale or 1.0)), losses_differ, _number(gradients))


def _isolation(logits: torch.Tensor, embedded: torch.Tensor, row: ProbeRow) -> float:
    """
    Return the largest gradient of a sample's logits with respect to another sample's embeddings,
    over the largest of its own; infinite if the probe is blind: no gradient reaches the sample
    itself.
    """
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(11)).to(logits)
    worst = 0.0
    for span in row.spans:
        (reached,) = torch.autograd.grad((logits[span] * weights[span]).sum(), embedded, retain_graph=True)
        sizes = reached[0].abs().amax(-1)
        own = float(sizes[span].min()) if span.stop - span.start == 1 else float(sizes[span].max())
        others = max(_largest(sizes[: span.start]), _largest(sizes[span.stop :]))
        if not own > 0 or not math.isfinite(own) or not math.isfinite(others):
            return math.inf
        worst = max(worst, others / own)
    return worst


def _weight_gradients(model: Any, loss: torch.Tensor) -> Gradients:
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    found = torch.autograd.grad(loss, [one for _, one in named], allow_unused=True)
    return {name: one for (name, _), one in zip(named, found, strict=True) if one is not None}


def _of_tokens(different: torch.Tensor, *, typical: bool) -> float:
    """Return the difference of a sample's worst token, or of its typical one if it has enough."""
    if not bool(different.isfinite().all()):
        return math.inf
    if typical:
        return float(different.median()) if len(different) >= _ENOUGH else 0.0
    return float(different.max())


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.inf
