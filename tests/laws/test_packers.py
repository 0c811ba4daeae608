"""Every packer places each sample once, within the capacity; fast packers equal slow ones."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from benchmarks.distributions import trace
from packplan.core.bounds import lower_bound
from packplan.core.checksum import plan_checksum
from packplan.core.errors import ArgumentError
from packplan.core.packers import ALGORITHMS, pack
from tests import references
from tests.strategies import packable, packable_arrays

algorithms = pytest.mark.parametrize("algorithm", list(ALGORITHMS))


@algorithms
@given(case=packable())
def test_each_sample_is_in_one_pack_and_no_pack_is_too_full(algorithm, case):
    """In canonical order. The lower bound is no less than by tokens, and below no packing."""
    lengths, capacity = case

    packs = pack(lengths, capacity=capacity, algorithm=algorithm)
    bound = lower_bound(lengths, capacity=capacity)

    assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in packs)
    assert packs.tolist() == sorted(sorted(members) for members in packs)
    event(f"bound above the tokens' share: {bound > -(-sum(lengths) // capacity)}")
    assert -(-sum(lengths) // capacity) <= bound <= len(packs)


@pytest.mark.parametrize("algorithm", [name for name, one in ALGORITHMS.items() if "works" not in one.takes])
@given(case=packable(), factor=st.integers(2, 9), rest=st.integers(0, 8))
def test_scaling_lengths_and_capacity_changes_nothing(algorithm, case, factor, rest):
    """Only proportions matter, and capacity that no multiple fills is of no use."""
    lengths, capacity = case
    more = min(rest, factor - 1) if algorithm not in ("modified_first_fit_decreasing", "auto") else 0

    scaled = pack([n * factor for n in lengths], capacity=capacity * factor + more, algorithm=algorithm)

    assert pack(lengths, capacity=capacity, algorithm=algorithm) == scaled


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if hasattr(references, name)])
# Two bins have room for two small samples, which are three.
@example(case=([35, 35, 11, 11, 11], 60), seed=0)
# The longest small sample does not fit beside the shortest, and the next one does.
@example(case=([310, 199, 150, 149, 101], 600), seed=0)
@given(case=packable(max_size=90), seed=st.integers(0, 2**64 - 1))
def test_fast_packers_pack_as_slow_ones_do(algorithm, case, seed):
    """The packs of the item-by-item algorithm or of the library that it names, ties included."""
    lengths, capacity = case
    event(f"ties: {len(set(lengths)) < len(lengths)}")

    expected = getattr(references, algorithm)(lengths, capacity, *[seed] * ("seed" in ALGORITHMS[algorithm].takes))

    assert expected == pack(lengths, capacity=capacity, algorithm=algorithm, seed=seed).tolist()


@algorithms
@example(case=([2, 3, 4], 5), block=1)
@given(case=packable(), block=st.integers(1, 9))
@settings(max_examples=40)
def test_the_size_of_blocks_changes_nothing(algorithm, case, block):
    """Samples are sorted in blocks; plans of more samples than a block are plans like any other."""
    lengths, capacity = case
    expected = pack(lengths, capacity=capacity, algorithm=algorithm)

    with (
        patch("packplan.core.packs.BLOCK", block),
        patch("packplan.core.length_counts.BLOCK", block),
        patch("packplan.core.packers.in_order.BLOCK", block),
    ):
        assert expected == pack(lengths, capacity=capacity, algorithm=algorithm)


@given(case=packable_arrays(), seed=st.integers(0, 9))
def test_certified_is_never_above_another_and_auto_never_above_a_quick_one(case, seed):
    """And `auto` takes the packs of constant volume unless there are fewer."""
    lengths, capacity = case
    packs = {name: pack(lengths, capacity=capacity, algorithm=name, seed=seed) for name in ALGORITHMS}
    num = {name: len(one) for name, one in packs.items()}

    event(f"gap: {num['certified'] - lower_bound(lengths, capacity=capacity)}")
    event(f"fewer: {num['constant_volume'] - num['auto']}")
    assert num["certified"] == min(num.values())
    assert num["auto"] <= min(num[name] for name, one in ALGORITHMS.items() if one.counts_lengths)
    assert packs["auto"] == packs["constant_volume"] or num["auto"] < num["constant_volume"]


def normal(num):
    return np.random.default_rng(3).normal(1135, 220, num).astype(int)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("lengths", "capacity", "expected", "more"),
    [
        (trace("detcap"), 8192, 429, 450), (trace("detcap"), 4096, 1037, 1042), (normal(9000), 4096, 2494, 2586),
        (normal(9000), 3000, 3571, 3662), (trace("sft")[:9000], 2048, 545, 547),
        (normal(400) * 977 + 1, 4_000_000, 116, 116),
    ],
    ids=["detcap-8192", "detcap-4096", "normal-4096", "normal-3000", "sft-2048", "too many tokens for a search"],
)  # fmt: skip
def test_auto_closes_the_gap_of_constant_volume(lengths, capacity, expected, more):
    """Packs of `auto` and of `constant_volume`; the same on every machine."""
    found = [len(pack(lengths, capacity=capacity, algorithm=name)) for name in ("auto", "constant_volume")]

    assert [expected, more] == found


@example(case=([], 4), minimum=1, multiple=3)
@example(case=([], 4), minimum=2, multiple=1)
@given(case=packable(), minimum=st.integers(1, 12), multiple=st.integers(1, 5))
def test_a_wanted_number_of_packs_is_reached_by_splitting(case, minimum, multiple):
    """Every pack is a part of one that was, none is empty, and no more are made."""
    lengths, capacity = case
    options = {"min_bin_count": minimum, "bin_count_multiple": multiple}
    before = pack(lengths, capacity=capacity)
    wanted = -(-max(len(before), minimum if minimum > 1 else 0) // multiple) * multiple
    if wanted > len(lengths):
        with pytest.raises(ArgumentError) as raised:
            pack(lengths, capacity=capacity, **options)
        assert {"num_samples": len(lengths), "num_packs": wanted} == raised.value.details
        return
    found = pack(lengths, capacity=capacity, **options).tolist()

    assert wanted == len(found)
    assert found == sorted(sorted(members) for members in found)
    assert sorted(i for members in found for i in members) == list(range(len(lengths)))
    whole = {index: number for number, members in enumerate(before) for index in members}
    assert all(len({whole[index] for index in members}) == 1 for members in found)


GOLDEN = {
    "auto": "a114447e0b1937fb",
    "balanced": "3ec12f0d2b3f03d9",
    "constant_volume": "a114447e0b1937fb",
    "best_fit_decreasing": "bcdf5e2a461f32c8",
    "first_fit_decreasing": "bcdf5e2a461f32c8",
    "modified_first_fit_decreasing": "bcdf5e2a461f32c8",
    "concatenative": "1d516d4a4800d7a9",
    "first_fit_shuffle": "c2ea5bc2075f3fd1",
    "certified": "a114447e0b1937fb",
}


@algorithms
def test_golden_packs(algorithm):
    """A change of the packs must be meant, and changes the algorithm's version."""
    lengths = np.arange(1, 2001) * 7919 % 1009 // 3 + 1

    packs = pack(lengths, capacity=1000, algorithm=algorithm, seed=7)

    assert GOLDEN.get(algorithm) == plan_checksum(packs)[:16], "new, or meant? raise its version, then write it here"


def test_an_algorithm_that_does_not_exist_is_refused_with_all_that_do():
    with pytest.raises(ValueError, match="algorithm is 'magic', but has to be one of auto, constant_volume, "):
        pack([1], capacity=4, algorithm="magic")
