"""Rewards are shares from 0 to 1, and advantages compare the answers to one prompt."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.rl import REWARDS, group_advantages

texts = st.text("ab c.\n", max_size=30)


@pytest.mark.parametrize("name", REWARDS)
@given(completion=texts, answer=texts)
def test_no_completion_beats_the_answer(name, completion, answer):
    """And both ways round it is the same."""
    reward = REWARDS[name]

    assert 0 <= reward(completion, answer) <= 1
    assert reward(answer, completion) == pytest.approx(reward(completion, answer))
    assert reward(completion, answer) <= max(reward(answer, answer), float(not answer.strip()))
    if answer.strip():
        assert 1 == reward(answer, answer)


@given(st.integers(2, 6), st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=5))
def test_answers_are_compared_with_those_to_their_prompt(size, groups):
    """Distance from the group's mean in standard deviations; nothing where all score the same."""
    groups = [group[:size] for group in groups]

    found = group_advantages(np.array(groups, dtype=np.float64).ravel(), group_size=size).reshape(-1, size)

    for rewards, advantages in zip(groups, found, strict=True):
        spread = statistics.pstdev(rewards)
        expected = [(reward - statistics.fmean(rewards)) / spread if spread else 0.0 for reward in rewards]
        assert expected == pytest.approx(advantages.tolist(), abs=1e-4)
