"""Advantages of answers: over other answers, or over what a value head expects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6
"""Term added to the deviation. Answers of equal reward then have advantage 0."""


Floats = NDArray[np.float64]


def group_advantages(rewards: Floats, *, group_size: int, scale: bool = True, leave_one_out: bool = False) -> Floats:
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
        leave_one_out: Whether the mean is that of the other answers (RLOO: Ahmadian et al., "Back
            to Basics", 2024); at least two answers then.

    >>> group_advantages(np.array([0.0, 2.0, 5.0, 5.0]), group_size=2).round(3).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    groups = rewards.reshape(-1, group_size)
    distances: Floats = groups - groups.mean(axis=1, keepdims=True)
    if leave_one_out:
        distances = distances * group_size / (group_size - 1)
    if scale:
        distances = distances / (groups.std(axis=1, keepdims=True) + EPSILON)
    return distances.ravel()


def batch_advantages(rewards: Floats, *, scale: bool = True) -> Floats:
    """
    Return the distance of each reward from the mean of the batch, over the batch's deviation if
    *scale* (REINFORCE++: Hu, "REINFORCE++", 2025).

    >>> batch_advantages(np.array([0.0, 2.0, 0.0, 2.0])).round(3).tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    distances: Floats = rewards - rewards.mean()
    return distances / (rewards.std() + EPSILON) if scale else distances


def generalised_advantages(
    rewards: Floats, values: Floats, mask: NDArray[np.bool_], *, discount: float, trace_decay: float
) -> tuple[Floats, Floats]:
    """
    Return the advantage of each token over the value that was expected before it, and the return,
    which is their sum (Schulman et al., "High-Dimensional Continuous Control Using Generalized
    Advantage Estimation", 2016). An answer's reward comes with its last token.

    Args:
        rewards: Reward of each answer; shape (num_answers,).
        values: Expected return before each token; shape (num_answers, width).
        mask: Which tokens are of the answer, next to each other; same shape.
        discount: Discount factor of each token, from 0 to 1.
        trace_decay: Lambda of the estimator: 0 trusts the next value, 1 the reward alone.

    Returns:
        Advantages and returns of the same shape, 0 outside of the mask.

    >>> mask, values = np.array([[False, True, True]]), np.zeros((1, 3))
    >>> generalised_advantages(np.ones(1), values, mask, discount=1, trace_decay=1)[0].tolist()
    [[0.0, 1.0, 1.0]]
    """
    advantages = np.zeros_like(values)
    later, expected = np.zeros(len(rewards)), np.zeros(len(rewards))
    is_last = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
    for token in reversed(range(values.shape[1])):
        here = mask[:, token]
        gain = rewards * is_last[:, token] + discount * expected - values[:, token]
        later = np.where(here, gain + discount * trace_decay * later, later)
        expected = np.where(here, values[:, token], expected)
        advantages[:, token] = np.where(here, later, 0)
    return advantages, advantages + np.where(mask, values, 0)


def standardised(advantages: Floats, mask: NDArray[np.bool_]) -> Floats:
    """Return the advantages of the masked tokens less their mean, over their deviation."""
    held = advantages[mask]
    return np.where(mask, (advantages - held.mean()) / (held.std() + EPSILON), 0) if held.size else advantages
