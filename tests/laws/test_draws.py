"""Draws of answers depend on seed, step, prompt, generation and position, and on nothing else."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.rl import assign_prompts, draw_keys

numbers = st.integers(0, 2**63 - 1)

GOLDEN = [[15304873005091984411, 7790104309783628986, 960311309288673700, 10626531733250262630, 11063429669819875055]]
"""Keys of the first five tokens of an answer."""


@given(
    seed=numbers,
    step=numbers,
    rows=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6),
    num=st.integers(1, 9),
    data=st.data(),
)
def test_a_key_is_the_same_in_any_company(seed, step, rows, num, data):
    """In another order of answers, among others, or as the beginning of a longer answer."""
    prompts, generations = zip(*rows, strict=True)
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=6))

    all_keys = draw_keys(seed=seed, step=step, prompts=prompts, generations=generations, num=num)
    some = draw_keys(
        seed=seed,
        step=step,
        prompts=[prompts[row] for row in chosen],
        generations=[generations[row] for row in chosen],
        num=num + 3,
    )

    assert (len(rows), num) == all_keys.shape
    assert all_keys[chosen].tolist() == some[:, :num].tolist()


def test_keys_differ_in_each_of_their_inputs():
    """No two of a grid are equal; the numbers are those that Philox gave in numpy 2.4."""
    found = [
        draw_keys(seed=seed, step=step, prompts=[0, 0, 1, 1], generations=[0, 1, 0, 1], num=5)
        for seed, step in itertools.product(range(3), repeat=2)
    ]

    assert 3 * 3 * 4 * 5 == np.unique(found).size
    assert GOLDEN == draw_keys(seed=1, step=2, prompts=[3], generations=[4], num=5).tolist()


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.integers(1, 8))
def test_prompts_are_dealt_in_turn_longest_first(lengths, shards):
    """
    Each is dealt once; a worker has one more than another at most, and none of its prompts is
    shorter than the next one of any worker.
    """
    event(f"a worker without prompts: {len(lengths) < shards}")

    dealt = assign_prompts(lengths, shards=shards)
    parts = [[lengths[place] for place in part] for part in np.array_split(dealt, shards)]

    assert list(range(len(lengths))) == sorted(dealt.tolist())
    turns = [length for turn in itertools.zip_longest(*parts) for length in turn if length is not None]
    assert sorted(lengths, reverse=True) == turns
