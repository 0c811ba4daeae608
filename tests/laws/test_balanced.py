"""Packs of equal work: under the limit, few more than are needed, and even."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from benchmarks.distributions import made_mix
from benchmarks.work import expected_imbalance, floor_of
from packplan.core.errors import ArgumentError
from packplan.core.packers import pack
from packplan.core.plan import build_raw_plan
from tests.strategies import packable


@given(packable(min_size=1), st.data())
def test_works_of_every_kind_are_packed_under_the_limit(case, data):
    """Each sample once, no pack too full, at most one in two hundred more than `auto`."""
    lengths, capacity = case
    works = data.draw(st.lists(st.sampled_from([0, 1, 2, 1e9]), min_size=len(lengths), max_size=len(lengths)))

    packs = pack(lengths, capacity=capacity, algorithm="balanced", works=works)

    fewest, few = (len(pack(lengths, capacity=capacity, algorithm=name)) for name in ("certified", "auto"))
    event(f"more than one pack: {len(packs) > 1}")
    assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
    assert packs.loads(np.array(lengths)).max() <= capacity
    assert fewest <= len(packs) <= few + few // 200


@pytest.mark.parametrize(
    ("capacity", "eight", "many", "above"),
    [(4096, 1.01, 1.02, 0.007), (8192, 1.005, 1.01, 0.0015), (16384, 1.005, 1.01, 0.0015)],
)
def test_random_steps_of_balanced_packs_are_even(capacity, eight, many, above):
    """Ranks of one pack each have nearly equal work, but for samples heavier than a pack."""
    samples = made_mix(12_000, seed=10)
    samples = samples.take(np.flatnonzero(samples.tokens < capacity))
    packs = pack(samples.tokens, capacity=capacity, algorithm="balanced", works=samples.works)
    fit = pack(samples.tokens, capacity=capacity, algorithm="best_fit_decreasing")

    even, uneven = (one.loads(samples.works) for one in (packs, fit))

    assert packs.loads(samples.tokens).max() <= capacity
    assert len(packs) <= 1.005 * len(fit)
    for ranks, most in ((8, eight), (64, many)):
        floor = expected_imbalance(floor_of(samples.works, num_packs=len(packs)), world_size=ranks)
        reached, before = (expected_imbalance(works, world_size=ranks) for works in (even, uneven))
        assert expected_imbalance(even[packs.sizes() > 1], world_size=ranks) < most
        assert floor <= reached + 1e-9 < floor + above < before


@given(packable(min_size=1), st.data(), st.integers(1, 2**16), st.sampled_from([np.int64, np.float64]))
def test_the_unit_of_work_changes_nothing(case, data, factor, dtype):
    """FLOPs or seconds, in lists or arrays, whole or not: packs are the same."""
    lengths, capacity = case
    works = data.draw(st.lists(st.integers(0, 1000), min_size=len(lengths), max_size=len(lengths)))
    options = {"capacity": capacity, "algorithm": "balanced"}

    packs = pack(lengths, works=works, **options)

    assert packs == pack(np.array(lengths), works=np.array(works, dtype=dtype) * factor, **options)


@pytest.mark.parametrize(
    "lengths",
    [
        # Best fit is levelled; the packs of `auto` are, too; they say that few more are allowed.
        [10, 17, 17, 11, 26, 9, 6, 24, 22, 8, 23, 26, 10, 1, 21],
        [2, 4, 20, 25, 1, 17, 6, 25, 5, 12, 21, 6, 13, 16, 7, 17, 17, 22],
        [7, 27, 16, 26, 11, 1, 12, 19, 10, 28],
    ],
)
def test_what_exchanges_do_not_make_fit_is_still_packed(lengths):
    """As few packs as the certified ones, which leave no room here."""
    packs = pack(lengths, capacity=40, algorithm="balanced", works=range(len(lengths)))

    assert len(pack(lengths, capacity=40, algorithm="certified")) == len(packs)
    assert packs.loads(np.array(lengths)).max() <= 40


@pytest.mark.parametrize(
    ("works", "message"),
    [
        ([1.0], r"works and samples differ in number \(1 and 3\)"),
        ([1.0, 2.0, -1.0], "work 2 is -1.0, but the work of samples"),
        ([[1.0, 2.0, 3.0]], "works and samples differ in number"),
    ],
)
def test_works_that_are_none_are_refused(works, message):
    """One finite number for each sample, from 0; also where long samples are set aside."""
    with pytest.raises(ArgumentError, match=message):
        pack([5, 5, 5], capacity=10, algorithm="balanced", works=works)
    with pytest.raises(ArgumentError, match=message):
        build_raw_plan([5, 5, 12], packing_length=10, algorithm="balanced", works=works)


def test_a_plan_sets_long_samples_aside_with_their_works():
    """The works of the others go with their lengths."""
    lengths, works = [12, 6, 2, 5, 3, 4, 4], [99, 6, 2, 5, 3, 4, 4]
    plan = build_raw_plan(lengths, packing_length=8 + 1, algorithm="balanced", works=works)

    assert (0,) == plan.single_long
    assert [[0], [1, 2], [3, 4], [5, 6]] == plan.packs.tolist()
