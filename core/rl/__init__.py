"""Rewards of answers, and advantages within the answers to one prompt."""

from __future__ import annotations

from packplan.core.rl.advantages import batch_advantages, generalised_advantages, group_advantages, standardised
from packplan.core.rl.rewards import REWARDS, Reward
from packplan.core.rl.sampling import Sampling

__all__ = [
    "REWARDS",
    "Reward",
    "Sampling",
    "batch_advantages",
    "generalised_advantages",
    "group_advantages",
    "standardised",
]
