"""Packers and redraws: fast ones equal slow ones, quality has its bounds; see every_sample_once."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from benchmarks.distributions import DISTRIBUTIONS, made_mix, trace
from benchmarks.work import expected_imbalance, floor_of
from packplan.core.bounds import lower_bound
from packplan.core.errors import ArgumentError
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packers.drawing import redraw
from packplan.core.packs import plan_checksum
from packplan.core.plan import build_raw_plan
from packplan.core.policy import PlanPolicy
from packplan.core.work.model import WorkModel
from tests import references
from tests.strategies import packable, packable_arrays, raw_lengths

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)

MORE = 200
"""Packs for each further one that a draw, or a levelled packing, may have."""

DRAWING = [name for name, one in ALGORITHMS.items() if not one.keeps_order]

seeds, epochs = st.integers(0, 2**64 - 1), st.integers(0, 1000)


def redrawn(lengths, capacity, algorithm="constant_volume", seed=0, epoch=0, **works):
    lengths = np.array(lengths, dtype=np.int64)
    return redraw(lengths, capacity=capacity, algorithm=algorithm, seed=seed, epoch=epoch, **works)


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


@given(case=packable_arrays(), seed=st.integers(0, 9), epoch=epochs)
def test_no_packer_needs_more_packs_than_it_may(case, seed, epoch):
    """
    None fewer than `certified`, whose bound is no less than the tokens' share; `auto` no more than
    a quick one; levelled and drawn packs at most one in two hundred more.
    """
    lengths, capacity = case
    packs = {name: pack(lengths, capacity=capacity, algorithm=name, seed=seed) for name in ALGORITHMS}
    num = {name: len(one) for name, one in packs.items()}
    bound = lower_bound(lengths, capacity=capacity)

    event(f"gap: {num['certified'] - bound}, above the tokens' share: {bound > -(-sum(lengths) // capacity)}")
    event(f"fewer: {num['constant_volume'] - num['auto']}")
    assert -(-sum(lengths) // capacity) <= bound <= num["certified"] == min(num.values())
    assert num["auto"] <= min(num[name] for name, one in ALGORITHMS.items() if one.counts_lengths)
    assert packs["auto"] == packs["constant_volume"] or num["auto"] < num["constant_volume"]
    works = np.random.default_rng(seed).choice([0, 1, 2, 1e9], len(lengths))
    assert len(pack(lengths, capacity=capacity, algorithm="balanced", works=works)) <= num["auto"] + num["auto"] // MORE
    for name in DRAWING:
        assert len(redrawn(lengths, capacity, name, seed, epoch)) <= num[name] + num[name] // MORE


def normal(num):
    return np.random.default_rng(3).normal(1135, 220, num).astype(int)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("lengths", "capacity", "expected", "more"),
    [
        (trace("detcap"), 8192, 429, 450), (normal(9000), 4096, 2494, 2586), (trace("sft")[:9000], 2048, 545, 547),
        (normal(400) * 977 + 1, 4_000_000, 116, 116), (normal(60_000), 3500, 19472, 20260),
        (np.repeat(trace("detcap"), 30), 8192, 12867, 13484),
    ],
    ids=["detcap-8192", "normal-4096", "sft-2048", "too many tokens for a search", "packs that repeat",
         "packs of many samples that repeat"],
)  # fmt: skip
def test_auto_closes_the_gap_of_constant_volume(lengths, capacity, expected, more):
    """Packs of `auto` and of `constant_volume`; the same on every machine."""
    found = [len(pack(lengths, capacity=capacity, algorithm=name)) for name in ("auto", "constant_volume")]

    assert [expected, more] == found


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num"),
    [
        ("many-3000", 70_706), ("many-3500", 70_706), ("conversations-4096", 19_366), ("conversations-3000", 19_366),
        ("detcap-5000", 2311), ("vlm-4096", 100_000), ("tiles-3072", 100_000), ("tiles-8192", 100_000),
    ],
)  # fmt: skip
def test_auto_is_within_a_thousandth_of_the_bound_or_one_pack(name, num):
    """
    The bound is the quick one. Few packs may be one above it. Constant volume needs more than
    `auto`, or no more than the bound.
    """
    lengths, capacity = DISTRIBUTIONS[name].lengths(num, seed=0), DISTRIBUTIONS[name].capacity

    found, quick = (len(pack(lengths, capacity=capacity, algorithm=one)) for one in ("auto", "constant_volume"))

    bound = lower_bound(lengths, capacity=capacity, known=found, effort=10_000_000 if num < 10_000 else 0)
    assert found - bound <= max(1, bound // 1000)
    assert found < quick - quick // 1000 or quick == found == bound


@example(case=([], 4), minimum=1, multiple=3)
@example(case=([], 4), minimum=2, multiple=1)
@example(case=([3, 2, 1, 1, 1, 1, 1], 10), minimum=4, multiple=1)  # a half is the fullest
@given(case=packable_arrays(), minimum=st.integers(1, 90), multiple=st.integers(1, 5))
def test_a_wanted_number_of_packs_is_reached_by_splitting(case, minimum, multiple):
    """One more halves the fullest of several samples; there are no more than are wanted."""
    lengths, capacity = case
    options = {"min_bin_count": minimum, "bin_count_multiple": multiple}
    before = pack(lengths, capacity=capacity)
    wanted = -(-max(len(before), minimum if minimum > 1 else 0) // multiple) * multiple
    if wanted > len(lengths):
        with pytest.raises(ArgumentError) as raised:
            pack(lengths, capacity=capacity, **options)
        assert {"num_samples": len(lengths), "num_packs": wanted} == raised.value.details
        return
    event(f"packs are split: {wanted > len(before)}")
    found = pack(lengths, capacity=capacity, **options).tolist()

    assert wanted == len(found)
    if wanted > len(before):
        fewer = pack(lengths, capacity=capacity, min_bin_count=wanted - 1).tolist()
        (whole,), (one, other) = ([own for own in a if own not in b] for a, b in ((fewer, found), (found, fewer)))
        loads, halves = ([sum(lengths[i] for i in own) for own in packs] for packs in (fewer, (one, other)))
        assert sum(halves) == max(load for load, own in zip(loads, fewer, strict=True) if len(own) > 1)
        assert whole == sorted(one + other)
        assert abs(halves[0] - halves[1]) <= max(lengths[i] for i in whole)


GOLDEN = {
    "auto": ("a114447e0b1937fb", "8dfc4f4799a3"), "balanced": ("3ec12f0d2b3f03d9", "9f79fb74d1b5"),
    "constant_volume": ("a114447e0b1937fb", "54636f670373"), "certified": ("a114447e0b1937fb", "d75f02dccbfc"),
    "best_fit_decreasing": ("bcdf5e2a461f32c8", "d75f02dccbfc"),
    "first_fit_decreasing": ("bcdf5e2a461f32c8", "fbcfa2fed051"),
    "modified_first_fit_decreasing": ("bcdf5e2a461f32c8", "d739e6522d88"),
    "first_fit_shuffle": ("c2ea5bc2075f3fd1", "5ff7510091c6"), "concatenative": ("1d516d4a4800d7a9", None),
}  # fmt: skip
"""Algorithm -> digests of its packs and of a redraw."""


def chat(num_samples):
    """Return lengths of real chats below 4,096 tokens."""
    recorded = trace("chat")
    return np.random.default_rng(1).choice(recorded[recorded < 4096], num_samples).astype(np.int64)


@algorithms
def test_golden_packs(algorithm):
    """A change of the packs must be meant, and changes the algorithm's version."""
    lengths = np.arange(1, 2001) * 7919 % 1009 // 3 + 1

    packs = pack(lengths, capacity=1000, algorithm=algorithm, seed=7)
    drawn = redrawn(chat(3000), 4096, algorithm, seed=3, epoch=2) if algorithm in DRAWING else None

    found = plan_checksum(packs)[:16], drawn and plan_checksum(drawn)[:12]
    assert GOLDEN.get(algorithm) == found, "new, or meant? raise its version, then write it here"


@pytest.mark.parametrize(
    ("name", "num_samples", "expected"),
    [("chat-2048", 50, "be43427ce91b"), ("chat-2048", 1000, "326b1e25074e"), ("detcap-8192", 1000, "512ce159f5cf")],
)
def test_golden_draws_of_several_stages(name, num_samples, expected):
    """While groups of packs leave too many packs, more samples are packed by themselves."""
    lengths, capacity = DISTRIBUTIONS[name].lengths(num_samples, seed=0), DISTRIBUTIONS[name].capacity

    drawn = redrawn(lengths, capacity, "best_fit_decreasing")

    assert expected == plan_checksum(drawn)[:12], "meant? raise REDRAW_VERSION in core/packers/drawing.py"


def test_packs_of_a_searching_algorithm_are_kept_where_its_first_stage_needs_more():
    """Best fit needs 5 % more packs of these, so samples of equal length change places."""
    lengths = DISTRIBUTIONS["detcap-8192"].lengths(400, seed=0)
    own = pack(lengths, capacity=8192, algorithm="certified")
    assert len(pack(lengths, capacity=8192, algorithm="best_fit_decreasing")) > len(own) + len(own) // MORE

    found = redrawn(lengths, 8192, "certified")

    assert own != found
    assert sorted(sorted(lengths[p].tolist()) for p in own) == sorted(sorted(lengths[p].tolist()) for p in found)


def test_balanced_draws_level_the_works_that_are_given():
    """Over several groups of packs, the works are as even as in the algorithm's own packing."""
    lengths = chat(4000)
    works = WorkModel(per_position=5, per_pair=3).sample_flops(lengths)

    def unevenness(packs):
        sums = packs.sums(works)
        return sums.std() / sums.mean()

    with patch.multiple("packplan.core.packers.balanced", _GROUP_SAMPLES=1000, _GROUP_PACKS=100):
        own = pack(lengths, capacity=4096, algorithm="balanced", works=works)
        found = redrawn(lengths, 4096, "balanced", epoch=1, works=works)

    assert len(own) == len(found)
    assert own != found
    assert unevenness(found) < 1.5 * unevenness(own)


@given(case=raw_lengths(), epoch=epochs, seed=seeds)
def test_an_epoch_changes_a_plan_only_if_it_is_replanned(case, epoch, seed):
    """The packs of a replanned one are drawn before the fill filter."""
    lengths, packing_length = case
    policy = PlanPolicy(packing_length=packing_length, seed=seed)
    short = [n for n in lengths if n < packing_length]

    plan = build_raw_plan(lengths, policy, epoch=epoch)
    drawn = build_raw_plan(lengths, policy, epoch=epoch, replanned=True)

    assert build_raw_plan(lengths, policy) == plan
    assert len(redrawn(short, packing_length, seed=seed, epoch=epoch)) == len(drawn.packs) - len(plan.single_long)
    assert plan.single_long == drawn.single_long


def test_what_a_packer_cannot_keep_is_refused():
    """Works that change nothing; epochs that would all pack alike."""
    with pytest.raises(ValueError, match="works do not change the packs of constant_volume"):
        redrawn([3, 4], 9, works=[1, 2])
    with pytest.raises(ValueError, match="concatenative keeps the order"):
        PlanPolicy(packing_length=8, algorithm="concatenative", replanned=True)


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
        [2, 4, 20, 25, 1, 17, 6, 25, 5, 12, 21, 6, 13, 16, 7, 17, 17, 22], [7, 27, 16, 26, 11, 1, 12, 19, 10, 28],
        [13, 2, 2, 24, 18, 10, 23, 1, 7, 22, 21, 17],
    ],
)  # fmt: skip
def test_what_exchanges_do_not_make_fit_is_still_packed(lengths):
    """As few packs as the certified ones, which leave no room here."""
    packs = pack(lengths, capacity=40, algorithm="balanced", works=range(len(lengths)))

    assert len(pack(lengths, capacity=40, algorithm="certified")) == len(packs)
    assert packs.loads(np.array(lengths)).max() <= 40


@pytest.mark.parametrize("works", [[1.0], [1.0, 2.0, -1.0], [[1.0, 2.0, 3.0]]])
def test_works_that_are_none_are_refused(works):
    """One finite number for each sample, from 0; also where long samples are set aside."""
    with pytest.raises(ArgumentError, match="work"):
        pack([5, 5, 5], capacity=10, algorithm="balanced", works=works)
    with pytest.raises(ArgumentError, match="work"):
        build_raw_plan([5, 5, 12], packing_length=10, algorithm="balanced", works=works)


def test_a_plan_sets_long_samples_aside_with_their_works():
    """The works of the others go with their lengths."""
    lengths, works = [12, 6, 2, 5, 3, 4, 4], [99, 6, 2, 5, 3, 4, 4]
    plan = build_raw_plan(lengths, packing_length=8 + 1, algorithm="balanced", works=works)

    assert (0,) == plan.single_long
    assert [[0], [1, 2], [3, 4], [5, 6]] == plan.packs.tolist()
