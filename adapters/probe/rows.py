"""A packed row of a probe, and a model's results for it: packed, and for each sample alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name

from packplan.adapters.models import Gradients, add_gradients, difference_norms, weight_gradients
from packplan.adapters.proof import difference_of, logit_reaches, watching
from packplan.core.equality import ProbeResult, loss_difference

_SEED = 7
"""Seed of the tokens."""


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

    @property
    def places(self) -> list[tuple[int, slice]]:
        """Row and tokens of each sample; the row is 0."""
        return [(0, span) for span in self.spans]

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
            norms += add_gradients(total, weight_gradients(model, loss))
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
    inputs = row.packed()
    with watching(model, inputs, (1, sum(row.lengths))) as watched:
        logits = model(**inputs, use_cache=False).logits[0]
    isolation = max(reach.isolation for reach in logit_reaches(watched, logits, row.places))
    scale = max(float(one.abs().max()) for one in alone.logits)
    different = max(
        difference_of((logits[span].detach().float() - one).abs().amax(-1), typical=typical)
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
        found = weight_gradients(model, torch.stack(losses).sum())
        gradients = math.hypot(*difference_norms(found, alone.gradients).values()) / (alone.norms or 1.0)
    losses_differ = 0.0 if typical else _number(different_loss)
    return ProbeResult(isolation, _number(different / (scale or 1.0)), losses_differ, _number(gradients))


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.inf
