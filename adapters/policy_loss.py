"""Policy losses on tokens, by the name that `grpo.loss` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch

from packplan.adapters.sequence_loss import TokenLoss
from packplan.core.config import GrpoConfig


def _from_zero(_: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if not value >= 0:
        message = f"{attribute.name} is {value!r}, but has to be at least 0"
        raise ValueError(message)


@attrs.frozen
class ClippedPolicyLoss:
    """
    The clipped surrogate objective, negated, with a penalty for leaving a reference.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7, with the two limits
    apart; the penalty, and advantages of whole answers, as in Shao et al. 2024, "DeepSeekMath"
    (GRPO), equations 3 and 4.

    Reads `advantages`, of sequences or of tokens, `old_log_probabilities` and, where there is a
    penalty, `reference_log_probabilities`, of tokens.
    """

    clip_low: float = attrs.field(default=0.2, validator=_from_zero)
    """How far below 1 the ratio of probabilities still counts."""

    clip_high: float = attrs.field(default=0.2, validator=_from_zero)
    """How far above 1 the ratio of probabilities still counts."""

    kl_weight: float = attrs.field(default=0.0, validator=_from_zero)
    """Weight of the penalty for leaving the reference; 0 needs none."""

    normalisation: Literal["token", "sequence"] = attrs.field(
        default="token", validator=attrs.validators.in_(("token", "sequence"))
    )
    """See `TokenLoss`; GRPO as published takes sequences."""

    @classmethod
    def from_config(cls, grpo: GrpoConfig) -> ClippedPolicyLoss:
        """Return the loss of a run."""
        return cls(grpo.ratio_clip_min, grpo.ratio_clip_max, grpo.kl_coefficient, grpo.normalisation)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that are read."""
        reference = ("reference_log_probabilities",) if self.kl_weight else ()
        return ("advantages", "old_log_probabilities", *reference)

    def __call__(
        self, log_probabilities: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return each token's loss, and what became of the ratios; see `TokenLoss`."""
        advantages = fields["advantages"]
        ratios = (log_probabilities - fields["old_log_probabilities"]).exp()
        limited = ratios.clamp(1 - self.clip_low, 1 + self.clip_high)
        plain, clipped = -ratios * advantages, -limited * advantages
        losses = torch.maximum(plain, clipped)
        metrics = {"ratio": ratios, "ratio_min": ratios, "ratio_max": ratios, "clipped": (clipped > plain).float()}
        if self.kl_weight:
            away = fields["reference_log_probabilities"] - log_probabilities
            # Unbiased, of low variance, never negative.
            divergence = torch.expm1(away) - away
            losses = losses + self.kl_weight * divergence
            metrics["reference_kl"] = divergence
        return losses, metrics


LOSSES: Mapping[str, Callable[[GrpoConfig], TokenLoss]] = MappingProxyType({"clipped": ClippedPolicyLoss.from_config})
"""
What `grpo.loss` may name, beside a loss of your own (`module:function`): each opens its loss with a
run's settings.
"""
