"""Rewards of answers, advantages, and what is drawn from the policy."""

from __future__ import annotations

from packplan.core.rl.advantages import batch_advantages, generalised_advantages, group_advantages, standardised
from packplan.core.rl.completions import Completion
from packplan.core.rl.draws import draw_keys
from packplan.core.rl.rewards import REWARDS, Reward
from packplan.core.rl.sampling import Sampling, assign_prompts

__all__ = [
    "REWARDS",
    "Completion",
    "Reward",
    "Sampling",
    "assign_prompts",
    "batch_advantages",
    "draw_keys",
    "generalised_advantages",
    "group_advantages",
    "standardised",
]
