"""Advantages of answers over the other answers to the same prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6
"""Term added to the deviation. Answers of equal reward then have advantage 0."""


def group_advantages(rewards: NDArray[np.float64], *, group_size: int, scale: bool = True) -> NDArray[np.float64]:
    """
    Return the distance of each reward from the mean of its group, over the group's standard
    deviation.

    These are the group-relative advantages of GRPO (Shao et al., "DeepSeekMath", 2024).

    Args:
        rewards: Rewards of all answers, those to one prompt next to each other; shape (num_groups *
            group_size,).
        group_size: Answers to each prompt.
        scale: Whether distances are divided by the deviation; Dr. GRPO leaves them as they are
            (Liu et al., "Understanding R1-Zero-Like Training", 2025).

    >>> group_advantages(np.array([0.0, 2.0, 5.0, 5.0]), group_size=2).round(3).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    groups = rewards.reshape(-1, group_size)
    distances: NDArray[np.float64] = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        distances = distances / (groups.std(axis=1, keepdims=True) + EPSILON)
    return distances.ravel()
