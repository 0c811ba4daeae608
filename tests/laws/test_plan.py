"""A raw plan accounts for every sample, obeys its policy, and depends on its arguments alone."""

from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given, reject
from hypothesis import strategies as st

from benchmarks.distributions import trace
from packplan.core import packers
from packplan.core.batch import pack_degrees
from packplan.core.errors import ArgumentError, token_range
from packplan.core.inspection import describe_training
from packplan.core.packers import ALGORITHMS
from packplan.core.plan import (
    build_raw_plan,
    plan_from_arrays,
    plan_to_arrays,
    refuse_dropped,
    refuse_longer,
    require_supervised,
    unsupervised_samples,
)
from packplan.core.policy import PlanPolicy
from packplan.core.schedule import EpochSchedule
from tests.strategies import raw_lengths

CAPTIONS = trace("detcap")[:104].tolist()

ratios = st.decimals(0, 1, places=2).map(str)


def planned(lengths, packing_length, **fields):
    """Return the plan; another example is drawn if no pack remains."""
    try:
        return build_raw_plan(lengths, packing_length=packing_length, **fields)
    except ArgumentError:
        reject()


forms = st.sampled_from([str, float, Decimal])


@given(case=raw_lengths(), ratio=ratios, form=forms, drop=st.booleans(), allow=st.booleans(), packing=st.booleans())
@example(case=([55, 54, 90, 90], 100), ratio="0.55", form=float, drop=True, allow=True, packing=True)
def test_every_sample_is_planned_by_the_policy_dropped_or_skipped(case, ratio, form, drop, allow, packing):  # noqa: PLR0917
    """
    Long samples are alone or skipped, underfilled packs are dropped, compared exactly; tokens add
    up. Without packing all are alone.
    """
    lengths, packing_length = case
    options = {"min_fill_ratio": form(ratio), "drop_last": drop, "allow_single_long": allow, "packing": packing}
    plan = planned(lengths, packing_length, **options)
    long = [index for index, length in enumerate(lengths) if length >= packing_length]
    event(f"something dropped: {len(plan.dropped_packs) > 0}, skipped: {bool(plan.skipped_long)}")

    assert len(lengths) == plan.num_samples
    assert (long, []) == (list(plan.single_long), list(plan.skipped_long))[:: 1 if allow else -1]
    for pack in plan.packs:
        load = Fraction(sum(lengths[index] for index in pack), packing_length)
        assert len(pack) == 1 or (packing and pack[0] not in long)
        assert load >= Fraction(ratio) or not drop or not packing
    for pack in plan.dropped_packs:
        assert (drop, packing) == (True, True)
        assert Fraction(sum(lengths[index] for index in pack), packing_length) < Fraction(ratio)
    assert sum(lengths) == plan.num_tokens == plan.planned_tokens + plan.dropped_tokens + plan.skipped_tokens
    assert plan.planned_tokens == sum(lengths[i] for i in plan.packs.indices)
    assert plan.long_tokens == sum(lengths[i] for i in plan.single_long)
    assert 0 < plan.fill <= 1
    by_tokens = -(-(plan.planned_tokens + plan.dropped_tokens - plan.long_tokens) // packing_length)
    fewest = by_tokens + len(plan.single_long) if packing else len(plan.packs)
    assert fewest <= plan.lower_bound <= len(plan.packs) + len(plan.dropped_packs)
    assert plan == plan_from_arrays(plan_to_arrays(plan))


@given(case=raw_lengths(), data=st.data(), limit=st.integers(1, 6), algorithm=st.sampled_from([*ALGORITHMS]),
       replanned=st.booleans())  # fmt: skip
@example(case=([20, 20, 20, 20], 80), data=None, limit=2, algorithm="constant_volume", replanned=False)
def test_no_pack_of_several_samples_has_more_images_than_the_limit(case, data, limit, algorithm, replanned):
    """Whatever packs them; samples with more are alone, and a pack full of images is kept."""
    lengths, packing_length = case
    images = [1] * len(lengths) if data is None else [data.draw(st.integers(0, 9)) for _ in lengths]
    fields = {"algorithm": algorithm, "replanned": replanned and not ALGORITHMS[algorithm].keeps_order}
    plan = planned(lengths, packing_length, images=images, max_images=limit, **fields)

    event(f"the limit decides: {plan.packs != planned(lengths, packing_length, **fields).packs}")
    assert sorted(plan.packs.indices) == [*range(len(lengths))]
    for pack in plan.packs:
        assert len(pack) == 1 or sum(images[index] for index in pack) <= limit
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= packing_length
    assert plan.lower_bound <= len(plan.packs)
    if data is None:
        assert plan == planned(lengths, packing_length, images=images, max_images=limit, min_fill_ratio="0.9")
    for none in (None, images[1:]):
        with pytest.raises(ValueError, match=r"images has \d+ counts, but max_images needs"):
            build_raw_plan(lengths, packing_length=packing_length, max_images=limit, images=none)


@example(case=([60, 60, 90, 90, 90, 90], 100), ratio="0.65", share="0.25")  # exactly reached: 120 of 480
@example(case=([60, 60, 90, 90, 90, 90], 100), ratio="0.65", share="0.2499")
@example(case=([95, 30], 100), ratio="0.65", share="0")  # a single pack may be dropped
@example(case=([95, 60, 60], 100), ratio="0.65", share="0.01")
@given(case=raw_lengths(), ratio=ratios, share=ratios)
def test_a_plan_that_drops_more_than_its_share_is_refused(case, ratio, share):
    """A share that is exactly reached is allowed, and so is the one that the error names."""
    lengths, packing_length = case
    plan = planned(lengths, packing_length, min_fill_ratio=ratio)
    dropped = [lengths[index] for pack in plan.dropped_packs for index in pack]
    policy = PlanPolicy(packing_length=packing_length, min_fill_ratio=ratio, max_dropped_share=share)
    assert Fraction(sum(dropped), sum(lengths)) == plan.dropped_share
    too_many = len(plan.dropped_packs) > 1 and plan.dropped_share > Fraction(share)
    event(f"packs dropped: {min(len(plan.dropped_packs), 2)}, refused: {too_many}")
    if not too_many:
        assert refuse_dropped(plan, lengths, policy) is None
        return

    with pytest.raises(ArgumentError) as raised:
        refuse_dropped(plan, lengths, policy)

    error = raised.value
    assert ("dropped_tokens", len(dropped)) == (error.kind, error.details["num_dropped"])
    assert f"(of {token_range(min(dropped), max(dropped))})" in str(error)
    assert refuse_dropped(plan, lengths, attrs.evolve(policy, max_dropped_share=error.details["enough"])) is None


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

    with pytest.raises(ArgumentError, match=f"{len(over)} of {len(lengths)} sample") as raised:
        refuse_longer([*lengths, 0], policy)

    error = raised.value
    assert ("too_long", over[0], max(lengths)) == (error.kind, error.details["index"], error.details["longest"])


@given(case=raw_lengths(), data=st.data())
def test_planned_samples_that_teach_nothing_are_counted_and_all_of_them_are_refused(case, data):
    """Those in no pack are no matter, nor is their number of tokens."""
    plan = planned(*case, min_fill_ratio="0.5", allow_single_long=False)
    most = data.draw(st.sampled_from([0, 1, 7]), label="most")
    supervised = data.draw(st.lists(st.integers(0, most), min_size=plan.num_samples, max_size=plan.num_samples))
    packed = sorted(index for pack in plan.packs for index in pack)
    nothing = [index for index in packed if not supervised[index]]
    event(f"without any: {'all' if nothing == packed else 'some' if nothing else 'none'}")

    assert nothing == unsupervised_samples(plan, supervised).tolist()
    if nothing != packed:
        assert require_supervised(plan, supervised) is None
        return
    with pytest.raises(ArgumentError, match=f"none of {len(packed)} planned sample") as raised:
        require_supervised(plan, supervised)
    assert ("unsupervised", packed[0]) == (raised.value.kind, raised.value.details["sample"])


@pytest.mark.parametrize(
    ("kind", "lengths", "options"),
    [
        ("empty", [], {}), ("all_skipped", [10, 11], {"allow_single_long": False}),
        ("all_skipped", [10], {"allow_single_long": False, "packing": False}),
        ("all_dropped", [1], {"min_fill_ratio": "0.65"}),
        ("all_dropped", [1, 10], {"min_fill_ratio": "0.65", "allow_single_long": False}),
    ],
)  # fmt: skip
def test_no_pack_left_is_an_error_that_says_why(kind, lengths, options):
    """Empty data, only long samples, or only underfilled packs."""
    with pytest.raises(ArgumentError) as raised:
        build_raw_plan(lengths, packing_length=10, **options)
    assert kind == raised.value.kind
    assert kind == "empty" or " is left to train on, since " in str(raised.value)


@given(st.lists(st.integers(51, 64), min_size=1), st.sampled_from(["0.65", "1"]))
def test_an_empty_plan_names_the_lengths_and_a_ratio_that_leaves_a_pack(lengths, ratio):
    """The named ratio leaves a pack, and a higher one does not."""
    with pytest.raises(ArgumentError) as it:
        build_raw_plan(lengths, packing_length=100, min_fill_ratio=ratio)

    error = it.value
    assert (len(lengths), 0) == (error.details["num_dropped_packs"], error.details["num_skipped"])
    assert f"(samples of {token_range(min(lengths), max(lengths))})" in str(error)
    named = error.details["fullest"]
    assert build_raw_plan(lengths, packing_length=100, min_fill_ratio=named).packs
    with pytest.raises(ArgumentError):
        build_raw_plan(lengths, packing_length=100, min_fill_ratio=Decimal(str(named)) + Decimal("0.01"))


def test_a_long_sample_is_packed_as_one_that_fills_a_pack():
    """By algorithms over counts, whose search then sees all packs. The seed reaches the others."""
    lengths = trace("chat")[:200]
    for name in (name for name, one in packers.ALGORITHMS.items() if one.counts_lengths):
        plan = build_raw_plan(lengths, packing_length=652, algorithm=name)
        assert packers.pack(lengths.clip(max=652), capacity=652, algorithm=name) == plan.packs
    drawing = {"algorithm": "first_fit_shuffle", "seed": 7}
    assert (
        packers.pack(lengths.clip(max=99), capacity=99, **drawing)
        == build_raw_plan(lengths, packing_length=99, **drawing).packs
    )


def test_a_long_sample_does_not_weaken_the_bound_of_the_others():
    """Lengths with a common divisor have a stronger bound than among one that lacks it."""
    short = [24, 24, 16, 12, 8, 8, 20, 12, 12, 8, 24, 12, 12]

    alone, beside = (build_raw_plan(lengths, packing_length=30, quick_bound=True) for lengths in (short, [*short, 30]))

    assert (8, 9) == (alone.lower_bound, beside.lower_bound)


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        ([34, 33, 33] * 3 + [66, 67] * 2, {}, 0), (CAPTIONS, {}, 20), ([*CAPTIONS, 9000], {}, 20),
        (CAPTIONS, {"min_fill_ratio": "0.9"}, 0), (CAPTIONS, {"algorithm": "concatenative"}, 0),
        (CAPTIONS, {"replanned": True}, 0), (CAPTIONS, {"algorithm": "auto"}, 0), (CAPTIONS[:6], {}, 0),
    ],
)  # fmt: skip
def test_a_plan_says_how_many_packs_auto_needs_where_it_saves_some(lengths, options, expected):
    """Fewer than are left: where packs are dropped, `auto` may need more for all samples."""
    plan = build_raw_plan(lengths, packing_length=8192, allow_single_long=False, **options)

    assert expected == plan.auto_packs
    assert 0 == build_raw_plan(lengths, packing_length=8192, quick_bound=True, **options).auto_packs


def test_the_start_of_a_run_says_who_shares_packs_and_whether_epochs_differ():
    """The most tokens of a rank are those of its share."""
    lengths = [4, 4, 17, 30]
    plan = build_raw_plan(lengths, packing_length=9)
    num, ranks = len(plan.packs), {"dataloader_drop_last": False, "gradient_accumulation_steps": 1}
    degrees = pack_degrees(plan.packs.loads(np.array(lengths)), 9, max_degree=4)

    shared = EpochSchedule(num_packs=num, world_size=4, num_train_epochs=1, degrees=degrees, **ranks)
    differing = EpochSchedule(num_packs=(num, num), world_size=1, num_train_epochs=2, **ranks)
    rows = [describe_training(plan, lengths, one) for one in (shared, differing)]

    assert rows[0]["shared"] == (
        "1 on 1 rank, 1 on 2 ranks, 1 on 4 ranks; 8 slots an epoch; no rank computes more than 9 tokens at once"
    )
    assert rows[1]["training"].startswith("6 steps in all, over 2 epochs, each with its own plan, on 1 rank;")
