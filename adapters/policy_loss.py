"""Policy losses on tokens, by their name in `grpo.loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import attrs
import torch
from attrs.validators import ge, gt, in_, optional

from packplan.adapters.sequence_loss import Normalisation, TokenLoss
from packplan.core.config import GrpoConfig


@attrs.frozen
class PolicyLoss:
    """
    Policy-gradient loss on the ratio of new to old probabilities, with a penalty for the distance
    to a reference model.

    Reads `advantages` of sequences or tokens, `old_log_probabilities` of tokens, and of tokens, if
    asked for, `reference_log_probabilities`, `engine_log_probabilities`, `old_values` and
    `returns`.
    """

    clip_low: float = attrs.field(default=0.2, validator=ge(0))
    """Distance below 1 up to which the ratio of probabilities counts."""

    clip_high: float = attrs.field(default=0.2, validator=ge(0))
    """Distance above 1 up to which it counts: higher in DAPO (Yu et al. 2025), "clip-higher"."""

    kl_weight: float = attrs.field(default=0.0, validator=ge(0))
    """Weight of the penalty (Shao et al. 2024, "DeepSeekMath"); 0 needs no reference."""

    normalisation: Normalisation = attrs.field(default="token", validator=in_(("token", "sequence", "constant")))
    """See `TokenLoss`; GRPO as published uses `sequence`, DAPO `token`, Dr. GRPO `constant`."""

    divisor: float = attrs.field(default=1.0, validator=gt(0))
    """See `TokenLoss`."""

    surrogate: str = attrs.field(default="clipped")
    """Name in `SURROGATES`."""

    dual_clip: float | None = attrs.field(default=None, validator=optional(gt(1)))
    """
    Largest loss of an unfavourable token, in units of its advantage; None sets no limit (Ye et al.
    2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning").
    """

    on_policy: bool = False
    """Whether the ratio is 1 by definition, with the gradient of the log-probability."""

    kl_estimator: Literal["k1", "k2", "k3"] = attrs.field(default="k3", validator=in_(("k1", "k2", "k3")))
    """Estimator of the divergence, by its name in Schulman 2020, "Approximating KL Divergence"."""

    kl_input_clamp: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Largest size of the logarithm of a ratio that the estimator reads."""

    kl_output_clamp: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Largest size of a token's estimate."""

    kl_sampling: bool = False
    """
    Whether the penalty's gradient has the term of the sampling too, so that its mean is the
    gradient of the divergence (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
    estimation for RL").
    """

    entropy_weight: float = attrs.field(default=0.0, validator=ge(0))
    """Weight of the entropy, which the loss rewards (Williams and Peng 1991); 0 only reports it."""

    correction: Literal["none", "truncated", "icepop"] = attrs.field(
        default="none", validator=in_(("none", "truncated", "icepop"))
    )
    """
    Correction of a token by its ratio of the policy's old probability to that of the engine which
    drew it. `truncated` multiplies by the ratio, up to a limit (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"). `icepop` multiplies too, and leaves out
    tokens whose ratio is beyond either limit (Ling Team 2025, "Every Step Evolves").
    """

    correction_max: float = attrs.field(default=2.0, validator=gt(0))
    """Largest ratio of the correction."""

    correction_min: float = attrs.field(default=0.5, validator=ge(0))
    """Smallest ratio of `icepop`."""

    value_weight: float = attrs.field(default=0.0, validator=ge(0))
    """Weight of the squared error of a value head (Schulman et al. 2017); 0 without one."""

    value_clip: float | None = attrs.field(default=None, validator=optional(gt(0)))
    """Distance from its old value up to which a new one lowers the error; None sets no limit."""

    @classmethod
    def from_config(cls, grpo: GrpoConfig) -> PolicyLoss:
        """Return the loss of a run."""
        return cls(
            grpo.ratio_clip_min,
            grpo.ratio_clip_max,
            grpo.kl_coefficient,
            grpo.normalisation,
            divisor=grpo.max_new_tokens,
            surrogate=grpo.loss,
            dual_clip=grpo.ratio_clip_c,
            on_policy=grpo.force_on_policy_ratio,
            kl_estimator=grpo.kl_estimator,
            kl_input_clamp=grpo.kl_input_clamp_value,
            kl_output_clamp=grpo.kl_output_clamp_value,
            kl_sampling=grpo.kl_sampling_gradient,
            entropy_weight=grpo.entropy_coefficient,
            correction=grpo.importance_correction,
            correction_max=grpo.importance_max,
            correction_min=grpo.importance_min,
            value_weight=grpo.value_coefficient if grpo.baseline == "value" else 0.0,
            value_clip=grpo.value_clip,
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that the loss reads."""
        asked = {
            "reference_log_probabilities": self.kl_weight,
            "engine_log_probabilities": self.correction != "none",
            "sequence_log_ratio": self.surrogate == "gspo",
            **dict.fromkeys(("values", "old_values", "returns"), self.value_weight),
        }
        return ("advantages", "old_log_probabilities", "entropy", *(name for name, needed in asked.items() if needed))

    def __call__(
        self, log_probabilities: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token, and metrics of the ratios; see `TokenLoss`."""
        old = log_probabilities.detach() if self.on_policy else fields["old_log_probabilities"]
        if self.surrogate == "gspo":
            # The sequence's ratio, whose gradient is that of each token (GSPO-token). Where all
            # tokens of a sequence weigh the same, the sum is the gradient of the sequence's ratio.
            ratios = (fields["sequence_log_ratio"] + log_probabilities - log_probabilities.detach()).exp()
        else:
            ratios = (log_probabilities - old).exp()
        losses, clipped = SURROGATES[self.surrogate](self, log_probabilities, ratios, fields["advantages"])
        metrics = {"ratio": ratios, "ratio_min": ratios, "ratio_max": ratios, "clipped": clipped.float()}
        if self.correction != "none":
            weights = self._corrections(fields["old_log_probabilities"] - fields["engine_log_probabilities"])
            losses, metrics["correction"] = losses * weights, weights
        losses, metrics["entropy"] = losses - self.entropy_weight * fields["entropy"], fields["entropy"]
        if self.value_weight:
            errors = self._value_errors(fields)
            losses, metrics["value_error"] = losses + self.value_weight * errors, errors
        if self.kl_weight:
            divergence = self._divergence(fields["reference_log_probabilities"] - log_probabilities)
            losses = losses + self.kl_weight * divergence
            if self.kl_sampling:
                sampled = log_probabilities - log_probabilities.detach()
                losses = losses + self.kl_weight * divergence * sampled  # `sampled` is 0, and has a gradient
            metrics["reference_kl"] = divergence
        return losses, metrics

    def _corrections(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """Return the factor of each token, of the policy's old probability over the engine's."""
        ratios = log_ratios.exp()
        if self.correction == "truncated":
            return ratios.clamp(max=self.correction_max)
        return ratios.masked_fill((ratios < self.correction_min) | (ratios > self.correction_max), 0)

    def _value_errors(self, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return half the squared error of each token's value, the larger one if it is clipped."""
        errors = (fields["values"] - fields["returns"]).square()
        if self.value_clip is not None:
            old = fields["old_values"]
            limited = old + (fields["values"] - old).clamp(-self.value_clip, self.value_clip)
            errors = torch.maximum(errors, (limited - fields["returns"]).square())
        return errors / 2

    def _divergence(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Return the estimate of each token, of the reference's probability over the policy's."""
        if self.kl_input_clamp is not None:
            log_ratio = log_ratio.clamp(-self.kl_input_clamp, self.kl_input_clamp)
        match self.kl_estimator:
            case "k1":
                divergence = -log_ratio
            case "k2":
                divergence = log_ratio.square() / 2
            case "k3":
                # Unbiased estimator of low variance, never negative.
                divergence = torch.expm1(log_ratio) - log_ratio
        if self.kl_output_clamp is not None:
            divergence = divergence.clamp(-self.kl_output_clamp, self.kl_output_clamp)
        return divergence


Surrogate = Callable[[PolicyLoss, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""
Function of the settings, the tokens' log-probabilities, ratios and advantages: the tokens' losses,
and whether a limit changed each.
"""


def _clipped(
    settings: PolicyLoss, _: torch.Tensor, ratios: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the clipped surrogate objective, negated (Schulman et al. 2017, "Proximal Policy
    Optimization Algorithms", equation 7), with two separate limits.
    """
    limited = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain, bounded = -ratios * advantages, -limited * advantages
    losses = torch.maximum(plain, bounded)
    changed = bounded > plain
    if settings.dual_clip is not None:
        most = torch.where(advantages < 0, -settings.dual_clip * advantages, torch.inf)
        changed = changed | (losses > most)
        losses = torch.minimum(losses, most)
    return losses, changed


def _cispo(
    settings: PolicyLoss, log_probabilities: torch.Tensor, ratios: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return log-probabilities weighted by advantages and by clipped ratios, which have no gradient,
    so that no token is left out (MiniMax 2025, "MiniMax-M1", equation 4).
    """
    weights = ratios.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weights * advantages * log_probabilities, weights != ratios.detach()


def _reinforce(
    _: PolicyLoss, log_probabilities: torch.Tensor, ratios: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return log-probabilities weighted by advantages (Williams 1992, "Simple Statistical
    Gradient-Following Algorithms for Connectionist Reinforcement Learning").
    """
    return -advantages * log_probabilities, torch.zeros_like(ratios, dtype=torch.bool)


SURROGATES: Mapping[str, Surrogate] = MappingProxyType(
    {"clipped": _clipped, "gspo": _clipped, "cispo": _cispo, "reinforce": _reinforce}
)
"""
Name in `grpo.loss` -> its function. `gspo` clips the ratio of a whole sequence, the geometric mean
of its tokens' (Zheng et al. 2025, "Group Sequence Policy Optimization", equation 5).
"""


LOSSES: Mapping[str, Callable[[GrpoConfig], TokenLoss]] = MappingProxyType(
    dict.fromkeys(SURROGATES, PolicyLoss.from_config)
)
"""
Name in `grpo.loss` -> function that builds the loss from a run's settings.

A loss of your own is named `module:function`.
"""
