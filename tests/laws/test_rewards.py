"""Rewards are shares from 0 to 1, and highest for the answer itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.rl import REWARDS

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
