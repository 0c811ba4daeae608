"""Every packer places each sample once, within the capacity; the default packs as the installed library does."""

from __future__ import annotations

import binpacking
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from core.bounds import lower_bound
from core.packers import ALGORITHMS, pack
from tests.strategies import packable

algorithms = pytest.mark.parametrize("algorithm", list(ALGORITHMS))


@algorithms
@given(case=packable())
def test_each_sample_is_in_one_pack_and_no_pack_is_too_full(algorithm, case):
    """All indices, each once; loads within capacity; indices and packs in canonical order."""
    lengths, capacity = case

    packs = pack(lengths, capacity=capacity, algorithm=algorithm)

    assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in packs)
    assert packs.tolist() == sorted(sorted(members) for members in packs)


@algorithms
@given(case=packable(min_size=1))
def test_no_packing_is_below_the_lower_bound(algorithm, case):
    """The bound L2 is one, and at least the tokens over the capacity."""
    lengths, capacity = case

    bound = lower_bound(lengths, capacity=capacity)

    event(f"bound above the tokens' share: {bound > -(-sum(lengths) // capacity)}")
    assert -(-sum(lengths) // capacity) <= bound <= len(pack(lengths, capacity=capacity, algorithm=algorithm))


@algorithms
@given(case=packable(), factor=st.integers(2, 9))
def test_scaling_lengths_and_capacity_changes_nothing(algorithm, case, factor):
    """Only proportions matter."""
    lengths, capacity = case

    scaled = pack([n * factor for n in lengths], capacity=capacity * factor, algorithm=algorithm)

    assert pack(lengths, capacity=capacity, algorithm=algorithm) == scaled


@given(case=packable(min_size=1, max_size=120))
def test_constant_volume_packs_as_the_library_does(case):
    """The same packs as `binpacking.to_constant_volume` with `weight_pos`, ties included."""
    lengths, capacity = case

    bins = binpacking.to_constant_volume(list(enumerate(lengths)), capacity, weight_pos=1)

    event(f"ties: {len(set(lengths)) < len(lengths)}")
    expected = sorted(sorted(index for index, _ in members) for members in bins)
    assert expected == pack(lengths, capacity=capacity, algorithm="constant_volume").tolist()


def test_constant_volume_packs_as_the_library_does_on_many_shapes():
    """2,000 data sets of four kinds of lengths, more than one example search reaches."""
    rng = np.random.default_rng(0)
    for number in range(2000):
        capacity = int(rng.integers(1, 400))
        size = int(rng.integers(1, 40))
        kind = number % 4
        high = [capacity, max(1, capacity // 2), max(1, capacity // 5), min(capacity, 4)][kind]
        lengths = rng.integers(1, high + 1, size).tolist()
        bins = binpacking.to_constant_volume(list(enumerate(lengths)), capacity, weight_pos=1)
        expected = sorted(sorted(index for index, _ in members) for members in bins)
        assert expected == pack(lengths, capacity=capacity).tolist(), (lengths, capacity)


@given(case=packable(max_size=8))
def test_the_lower_bound_never_exceeds_the_best_packing(case):
    """Against exhaustive search, on small cases."""
    lengths, capacity = case

    assert lower_bound(lengths, capacity=capacity) <= _best(lengths, capacity)


def _best(lengths, capacity, loads=()):
    if not lengths:
        return len(loads)
    head, rest = lengths[0], lengths[1:]
    return min(
        _best(rest, capacity, (*loads[:position], sum(loads[position : position + 1]) + head, *loads[position + 1 :]))
        for position in range(len(loads) + 1)
        if sum(loads[position : position + 1]) + head <= capacity
    )
