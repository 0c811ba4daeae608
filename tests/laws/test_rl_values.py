"""Rewards are shares from 0 to 1, and advantages compare the answers to one prompt."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.rl import (
    REWARDS,
    Sampling,
    batch_advantages,
    generalised_advantages,
    group_advantages,
    standardised,
)

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


@given(st.lists(st.integers(0, 9), min_size=2, max_size=12))
def test_an_answer_may_be_left_out_of_its_own_baseline(rewards):
    """The mean is that of the other answers; of a batch, it is that of all."""
    rewards = np.array(rewards, dtype=np.float64)

    found = group_advantages(rewards, group_size=rewards.size, scale=False, leave_one_out=True)
    others = [(rewards.sum() - own) / (rewards.size - 1) for own in rewards]
    assert np.allclose(rewards - others, found)
    assert np.allclose(rewards - rewards.mean(), batch_advantages(rewards, scale=False))
    assert np.allclose(group_advantages(rewards, group_size=rewards.size), batch_advantages(rewards))


@st.composite
def valued_answers(draw):
    """Rewards, values of every token, and which tokens each answer has, behind a prompt."""
    ends = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4))
    width = max(map(sum, ends)) + draw(st.integers(0, 2))
    numbers = st.floats(-3, 3, width=16)
    values = np.array([[draw(numbers) for _ in range(width)] for _ in ends])
    mask = np.array([[start <= t < start + length for t in range(width)] for start, length in ends])
    return np.array([draw(numbers) for _ in ends]), values, mask


@given(valued_answers(), st.floats(0, 1), st.floats(0, 1))
def test_advantages_of_tokens_are_sums_of_later_errors(answers, discount, decay):
    """Each is what the rest of its answer gave beyond its values (GAE), by the definition."""
    rewards, values, mask = answers
    event(f"an answer without a token: {not mask.any(axis=1).all()}")

    found, returns = generalised_advantages(rewards, values, mask, discount=discount, trace_decay=decay)

    expected = np.zeros_like(values)
    for row, reward in enumerate(rewards):
        tokens = np.flatnonzero(mask[row]).tolist()
        after = [*(values[row, token] for token in tokens[1:]), 0.0][: len(tokens)]
        gains = [reward * (token == tokens[-1]) for token in tokens]
        errors = [gain + discount * v - values[row, t] for gain, v, t in zip(gains, after, tokens, strict=True)]
        for place, token in enumerate(tokens):
            expected[row, token] = sum((discount * decay) ** k * error for k, error in enumerate(errors[place:]))
    assert np.allclose(expected, found)
    assert np.allclose(expected + values * mask, returns)


@given(valued_answers())
def test_standardised_advantages_have_mean_0_and_deviation_1(answers):
    """Over the tokens of answers; others stay 0."""
    _, values, mask = answers
    found = standardised(values * mask, mask)

    assert not found[~mask].any()
    if mask.any():
        assert abs(found[mask].mean()) < 1e-9
        assert values[mask].std() < 1e-3 or found[mask].std() == pytest.approx(1, abs=1e-2)


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
