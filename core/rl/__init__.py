"""Answers of a policy, their draws and rewards, and advantages among those to a prompt."""

from __future__ import annotations

from packplan.core.rl.advantages import group_advantages
from packplan.core.rl.completions import Completion
from packplan.core.rl.draws import draw_keys
from packplan.core.rl.rewards import REWARDS, Reward
from packplan.core.rl.sampling import Sampling, deal_prompts

__all__ = ["REWARDS", "Completion", "Reward", "Sampling", "deal_prompts", "draw_keys", "group_advantages"]
