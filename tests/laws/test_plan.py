"""
A raw plan accounts for every sample, obeys its policies, and depends on nothing but its arguments.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from packplan.core import packers
from packplan.core.errors import ArgumentError, PlanError, ranging
from packplan.core.plan import (
    build_raw_plan,
    one_sample_packs,
    plan_from_arrays,
    plan_to_arrays,
    refuse_dropped,
    refuse_longer,
)
from packplan.core.policy import PlanPolicy
from tests.strategies import raw_lengths

ratios = st.decimals(0, 1, places=2).map(str)


def planned(lengths, packing_length, **fields):
    """Return the plan, or None if no pack remains."""
    try:
        return build_raw_plan(lengths, packing_length=packing_length, **fields)
    except PlanError:
        return None


@given(case=raw_lengths(), ratio=ratios, drop=st.booleans(), allow=st.booleans())
def test_every_sample_is_trained_dropped_or_skipped_and_counted(case, ratio, drop, allow):
    """Once each, in exactly one of the three; tokens add up."""
    lengths, packing_length = case
    plan = planned(lengths, packing_length, min_fill_ratio=ratio, drop_last=drop, allow_single_long=allow)
    assume(plan is not None)
    event(f"something dropped: {len(plan.dropped_packs) > 0}, skipped: {bool(plan.skipped_long)}")

    places = Counter(plan.packs.indices.tolist())
    places.update(plan.dropped_packs.indices.tolist())
    places.update(plan.skipped_long)

    assert Counter(range(len(lengths))) == places
    assert sum(lengths) == plan.num_tokens == plan.planned_tokens + plan.dropped_tokens + plan.skipped_tokens
    assert plan.planned_tokens == sum(lengths[i] for i in plan.packs.indices.tolist())
    assert len(lengths) == plan.num_samples
    assert 0 < plan.fill <= 1
    assert plan.lower_bound <= len(plan.packs) + len(plan.dropped_packs)


@given(case=raw_lengths(), ratio=ratios, drop=st.booleans(), allow=st.booleans())
def test_policies_are_obeyed(case, ratio, drop, allow):
    """
    Long samples alone or nowhere; no shared pack over its budget; underfilled packs gone, whatever
    their place.
    """
    lengths, packing_length = case
    plan = planned(lengths, packing_length, min_fill_ratio=ratio, drop_last=drop, allow_single_long=allow)
    assume(plan is not None)
    long = [index for index, length in enumerate(lengths) if length >= packing_length]

    assert (long if allow else []) == list(plan.single_long)
    assert ([] if allow else long) == list(plan.skipped_long)
    for pack in plan.packs:
        load = sum(lengths[index] for index in pack)
        if pack[0] in long:
            assert 1 == len(pack)
        else:
            assert load <= packing_length
            assert not drop or Fraction(load, packing_length) >= Fraction(ratio)
    for pack in plan.dropped_packs:
        assert drop
        assert Fraction(sum(lengths[index] for index in pack), packing_length) < Fraction(ratio)


@given(case=raw_lengths(), drop=st.booleans())
def test_packs_are_in_canonical_order(case, drop):
    """Indices ascend in a pack; packs ascend by their first index."""
    lengths, packing_length = case
    plan = planned(lengths, packing_length, drop_last=drop)
    assume(plan is not None)

    assert plan.packs.tolist() == sorted(sorted(pack) for pack in plan.packs)


@given(case=raw_lengths())
def test_lists_and_arrays_of_any_integer_type_plan_alike(case):
    """A plan depends on the values of the lengths alone."""
    lengths, packing_length = case
    plans = [
        build_raw_plan(kind(lengths), packing_length=packing_length, drop_last=False)
        for kind in (list, tuple, lambda n: np.array(n, dtype=np.int32), lambda n: np.array(n, dtype=np.uint16))
    ]

    assert all(plans[0] == plan for plan in plans[1:])


@given(case=raw_lengths(), drop=st.booleans())
def test_a_plan_survives_being_taken_apart(case, drop):
    """`plan_from_arrays` undoes `plan_to_arrays`."""
    lengths, packing_length = case
    plan = planned(lengths, packing_length, drop_last=drop)
    assume(plan is not None)

    assert plan == plan_from_arrays(plan_to_arrays(plan))


@given(case=raw_lengths(), allow=st.booleans())
def test_without_packing_each_sample_is_alone(case, allow):
    """In the order of the data; long ones kept or skipped."""
    lengths, packing_length = case
    kept = [[i] for i, length in enumerate(lengths) if allow or length < packing_length]
    if not kept:
        with pytest.raises(PlanError):
            one_sample_packs(lengths, packing_length=packing_length, allow_single_long=allow)
        return

    plan = one_sample_packs(lengths, packing_length=packing_length, allow_single_long=allow)

    assert kept == plan.packs.tolist()
    assert plan.num_tokens == plan.planned_tokens + plan.skipped_tokens
    assert len(lengths) == plan.planned_samples + len(plan.skipped_long)


@pytest.mark.parametrize("ratio", [0.55, "0.55", Decimal("0.55")])
def test_a_pack_at_exactly_the_ratio_stays(ratio):
    """55 of 100 at 0.55 is kept, 54 goes, though 0.55 is no binary fraction."""
    plan = build_raw_plan([55, 54, 90, 90], packing_length=100, min_fill_ratio=ratio)

    assert [[0], [2], [3]] == plan.packs.tolist()
    assert [[1]] == plan.dropped_packs.tolist()


@pytest.mark.parametrize(
    ("lengths", "fields", "expected"),
    [
        ([80, 81, 20, 20, 20, 20], {}, [[0], [1], [2, 3, 4, 5]]),
        ([80, 81, 20, 20, 20, 20], {"allow_single_long": False}, [[2, 3, 4, 5]]),
        ([60, 20, 50, 30, 40, 40], {"min_fill_ratio": "0.65"}, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_worked_cases(lengths, fields, expected):
    """As the specification works them out, at a budget of 80."""
    assert expected == build_raw_plan(lengths, packing_length=80, **fields).packs.tolist()


@given(case=raw_lengths(), ratio=ratios, share=ratios)
def test_a_plan_that_drops_more_than_its_share_is_refused(case, ratio, share):
    """
    With several packs alone; a share that is exactly reached is allowed, and the one that the
    message names suffices.
    """
    lengths, packing_length = case
    plan = planned(lengths, packing_length, min_fill_ratio=ratio)
    assume(plan is not None)
    dropped = [lengths[index] for pack in plan.dropped_packs for index in pack]
    policy = PlanPolicy(packing_length=packing_length, min_fill_ratio=ratio, max_dropped_share=share)
    too_many = len(plan.dropped_packs) > 1 and Fraction(sum(dropped), sum(lengths)) > Fraction(share)
    event(f"packs dropped: {min(len(plan.dropped_packs), 2)}, refused: {too_many}")
    if not too_many:
        assert refuse_dropped(plan, lengths, policy) is None
        return

    with pytest.raises(PlanError) as raised:
        refuse_dropped(plan, lengths, policy)

    error = raised.value
    assert ("dropped_tokens", len(dropped)) == (error.kind, error.details["num_dropped"])
    assert f"(of {ranging(min(dropped), max(dropped), 'token')})" in str(error)
    assert refuse_dropped(plan, lengths, attrs.evolve(policy, max_dropped_share=error.details["enough"])) is None


def allowing(share) -> PlanPolicy:
    return PlanPolicy(packing_length=100, max_dropped_share=share)


def test_samples_of_one_length_that_find_no_partner_are_not_dropped_silently():
    """
    46 samples of 58 % of the packing length, 12 of which short ones complete: most of the tokens
    would go.
    """
    lengths = [580] * 46 + [400] * 12
    plan = build_raw_plan(lengths, packing_length=1000)

    with pytest.raises(PlanError, match=r"34 of 58 samples \(of 580 tokens\).*their 34 packs.*62\.64% of"):
        refuse_dropped(plan, lengths, allowing("0.01"))
    assert refuse_dropped(plan, lengths, allowing(1)) is None


def test_a_share_that_is_exactly_reached_is_allowed():
    """Compared as the decimal it is: 120 of 480 tokens are 0.25."""
    lengths = [60, 60, 90, 90, 90, 90]
    plan = build_raw_plan(lengths, packing_length=100)

    assert refuse_dropped(plan, lengths, allowing(0.25)) is None
    with pytest.raises(PlanError):
        refuse_dropped(plan, lengths, allowing("0.2499"))


def test_a_single_pack_may_be_dropped_whatever_its_share():
    """The last pack of a small data set; a second one is too many."""
    one, two = [95, 30], [95, 60, 60]

    plan = build_raw_plan(one, packing_length=100)
    assert (1, Fraction(30, 125)) == (len(plan.dropped_packs), plan.dropped_share)
    assert refuse_dropped(plan, one, allowing(0)) is None
    with pytest.raises(PlanError, match="2 of 3 samples"):
        refuse_dropped(build_raw_plan(two, packing_length=100), two, allowing("0.01"))


@given(case=raw_lengths())
def test_longer_samples_are_refused_where_that_is_asked_for(case):
    """The first is named, all are counted; a sample of exactly the limit is fine."""
    lengths, limit = case
    policy = PlanPolicy(packing_length=limit, refuse_longer=True)
    assert refuse_longer(lengths, PlanPolicy(packing_length=limit)) is None
    over = [index for index, length in enumerate(lengths) if length > limit]
    event(f"some too long: {bool(over)}")
    if not over:
        assert refuse_longer(lengths, policy) is None
        return

    with pytest.raises(PlanError, match=f"{len(over)} of {len(lengths)} sample") as raised:
        refuse_longer([*lengths, 0], policy)

    error = raised.value
    assert ("too_long", over[0], max(lengths)) == (error.kind, error.details["index"], error.details["longest"])


def test_no_pack_left_is_an_error_that_says_why():
    """Empty data, only long samples, or only underfilled packs."""
    with pytest.raises(PlanError, match="0 samples") as raised:
        build_raw_plan([], packing_length=10)
    assert "empty" == raised.value.kind
    with pytest.raises(PlanError, match="2 samples have 10 tokens or more") as raised:
        build_raw_plan([10, 11], packing_length=10, allow_single_long=False)
    assert "all_skipped" == raised.value.kind
    with pytest.raises(PlanError, match="1 sample has 10 tokens or more") as raised:
        one_sample_packs([10], packing_length=10, allow_single_long=False)
    assert "all_skipped" == raised.value.kind
    with pytest.raises(PlanError, match=r"1 pack \(samples of 1 token\) is filled below") as raised:
        build_raw_plan([1], packing_length=10)
    assert "all_dropped" == raised.value.kind


@given(st.lists(st.integers(51, 64), min_size=1), st.sampled_from(["0.65", "1"]))
def test_an_empty_plan_names_the_lengths_and_a_ratio_that_leaves_a_pack(lengths, ratio):
    """
    As the error of a plan that drops much; the ratio that is named suffices, and a higher one does
    not.
    """
    with pytest.raises(PlanError) as it:
        build_raw_plan(lengths, packing_length=100, min_fill_ratio=ratio)

    error = it.value
    assert (len(lengths), 0) == (error.details["num_dropped_packs"], error.details["num_skipped"])
    assert f"(samples of {ranging(min(lengths), max(lengths), 'token')})" in str(error)
    named = error.details["fullest"]
    assert build_raw_plan(lengths, packing_length=100, min_fill_ratio=named).packs
    with pytest.raises(PlanError):
        build_raw_plan(lengths, packing_length=100, min_fill_ratio=Decimal(str(named)) + Decimal("0.01"))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, float("nan"), "7", 2**63])
def test_a_length_that_is_no_positive_whole_number_is_named(value):
    """With its index and value in a list; in an array too."""
    with pytest.raises(ArgumentError) as raised:
        build_raw_plan([5, value, 5], packing_length=10)
    assert 1 == raised.value.details["index"]
    with pytest.raises(ArgumentError):
        build_raw_plan(np.array([value, value]), packing_length=10)


@given(st.integers(0, 2**32 - 1))
def test_the_seed_reaches_the_algorithm_that_draws(seed):
    """The packs are those of `pack` with that seed."""
    lengths = list(range(1, 40))

    plan = build_raw_plan(lengths, packing_length=60, algorithm="first_fit_shuffle", seed=seed, drop_last=False)

    assert packers.pack(lengths, capacity=60, algorithm="first_fit_shuffle", seed=seed) == plan.packs


@pytest.mark.parametrize("shape", [(2, 2), ()])
def test_lengths_of_another_shape_are_refused(shape):
    """They are one-dimensional."""
    with pytest.raises(ArgumentError, match="one-dimensional"):
        build_raw_plan(np.ones(shape, dtype=int), packing_length=10)


@pytest.mark.parametrize(("name", "value"), [("packing_length", 0), ("packing_length", 1.5), ("packing_length", True)])
def test_a_packing_length_below_one_is_refused(name, value):
    """Whole and positive."""
    with pytest.raises(ValueError, match=name):
        build_raw_plan([1], **{name: value})


@pytest.mark.parametrize("ratio", ["-0.1", 1.1, "NaN", "Infinity"])
def test_a_ratio_outside_zero_to_one_is_refused(ratio):
    """It is a share."""
    with pytest.raises((ValueError, OverflowError)):
        build_raw_plan([1], packing_length=2, min_fill_ratio=ratio)
