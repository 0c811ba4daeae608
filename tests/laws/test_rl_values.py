"""Rewards are shares from 0 to 1, and advantages compare the answers to one prompt."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.rl import REWARDS, Sampling, group_advantages

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

    rewards = np.array(groups, dtype=np.float64).ravel()
    found = group_advantages(rewards, group_size=size).reshape(-1, size)
    distances = group_advantages(rewards, group_size=size, scale=False).reshape(-1, size)

    assert np.allclose(distances, rewards.reshape(-1, size) - rewards.reshape(-1, size).mean(axis=1, keepdims=True))

    for rewards, advantages in zip(groups, found, strict=True):
        spread = statistics.pstdev(rewards)
        expected = [(reward - statistics.fmean(rewards)) / spread if spread else 0.0 for reward in rewards]
        assert expected == pytest.approx(advantages.tolist(), abs=1e-4)


@given(st.lists(st.integers(1, 90), max_size=30), st.integers(1, 5), st.integers(1, 64), st.integers(1, 2000))
def test_prompts_are_answered_in_batches_of_few_tokens(lengths, completions, max_new_tokens, max_tokens):
    """
    Each prompt once, the longest first. A batch of several keeps the limit, and no next prompt
    would have fit.
    """
    sampling = Sampling(completions, keep=1, max_new_tokens=max_new_tokens, temperature=1.0)

    batches = list(sampling.batches(lengths, max_tokens=max_tokens))

    positions = [position for batch in batches for position in batch]
    assert list(range(len(lengths))) == sorted(positions)
    assert sorted(lengths, reverse=True) == [lengths[position] for position in positions]
    event(f"several batches: {len(batches) > 1}")
    for number, batch in enumerate(batches):
        of_prompt = completions * (lengths[batch[0]] + max_new_tokens)
        assert len(batch) == 1 or len(batch) * of_prompt <= max_tokens
        assert number == len(batches) - 1 or (len(batch) + 1) * of_prompt > max_tokens
