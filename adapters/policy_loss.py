"""Policy losses on tokens, by their name in `grpo.loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import attrs
import torch
from attrs.validators import ge, in_

from packplan.adapters.sequence_loss import TokenLoss
from packplan.core.config import GrpoConfig


@attrs.frozen
class ClippedPolicyLoss:
    """
    Clipped surrogate objective, negated, with a penalty for the distance to a reference model.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7, with two separate
    limits. The penalty, and advantages of whole answers, follow Shao et al. 2024, "DeepSeekMath"
    (GRPO), equations 3 and 4.

    Reads `advantages` of sequences or tokens, `old_log_probabilities` of tokens and, with a
    penalty, `reference_log_probabilities` of tokens.
    """

    clip_low: float = attrs.field(default=0.2, validator=ge(0))
    """Distance below 1 up to which the ratio of probabilities counts."""

    clip_high: float = attrs.field(default=0.2, validator=ge(0))
    """Distance above 1 up to which the ratio of probabilities counts."""

    kl_weight: float = attrs.field(default=0.0, validator=ge(0))
    """Weight of the penalty; 0 needs no reference."""

    normalisation: Literal["token", "sequence"] = attrs.field(default="token", validator=in_(("token", "sequence")))
    """See `TokenLoss`; GRPO as published uses `sequence`."""

    @classmethod
    def from_config(cls, grpo: GrpoConfig) -> ClippedPolicyLoss:
        """Return the loss of a run."""
        return cls(grpo.ratio_clip_min, grpo.ratio_clip_max, grpo.kl_coefficient, grpo.normalisation)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that the loss reads."""
        reference = ("reference_log_probabilities",) if self.kl_weight else ()
        return ("advantages", "old_log_probabilities", *reference)

    def __call__(
        self, log_probabilities: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token, and metrics of the ratios; see `TokenLoss`."""
        advantages = fields["advantages"]
        ratios = (log_probabilities - fields["old_log_probabilities"]).exp()
        limited = ratios.clamp(1 - self.clip_low, 1 + self.clip_high)
        plain, clipped = -ratios * advantages, -limited * advantages
        losses = torch.maximum(plain, clipped)
        metrics = {"ratio": ratios, "ratio_min": ratios, "ratio_max": ratios, "clipped": (clipped > plain).float()}
        if self.kl_weight:
            log_ratio = fields["reference_log_probabilities"] - log_probabilities
            # Unbiased estimator of low variance, never negative.
            divergence = torch.expm1(log_ratio) - log_ratio
            losses = losses + self.kl_weight * divergence
            metrics["reference_kl"] = divergence
        return losses, metrics


LOSSES: Mapping[str, Callable[[GrpoConfig], TokenLoss]] = MappingProxyType({"clipped": ClippedPolicyLoss.from_config})
"""
Name in `grpo.loss` -> function that builds the loss from a run's settings.

A loss of your own is named `module:function`.
"""
