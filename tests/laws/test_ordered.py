"""Ordered packs keep every sample within its displacement, and their bound is one."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given, reject
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.bounds import find_bound
from packplan.core.errors import PlanError
from packplan.core.inspection import plan_faults
from packplan.core.packers import pack
from packplan.core.packs import Packs, by_first_index, concatenate
from packplan.core.plan import build_raw_plan
from packplan.core.policy import PlanPolicy
from packplan.core.schedule import EpochSchedule
from tests import references
from tests.strategies import packable, raw_lengths


def moved(packs):
    """The furthest that a sample is from its place, counted sample by sample."""
    order = [index for members in packs for index in members]
    return max((abs(position - sorted(order).index(index)) for position, index in enumerate(order)), default=0)


@example(case=([20, 11, 30], 60), most=1)  # the second sample has to come next, and has no room by one
@given(case=packable(max_size=120), most=st.integers(0, 40))
def test_no_sample_moves_further_than_it_may(case, most):
    """Each is in one pack that holds it; packs read one after the other keep the order so far."""
    lengths, capacity = case

    packs = pack(lengths, capacity=capacity, algorithm="ordered", max_displacement=most)

    event(f"moved as far as allowed: {moved(packs) == most}")
    assert moved(packs) <= most
    assert packs.displacements().max(initial=0) == moved(packs)
    assert list(range(len(lengths))) == sorted(packs.indices.tolist())
    assert all(sum(lengths[i] for i in members) <= capacity for members in packs)
    assert packs.tolist() == sorted(sorted(members) for members in packs)


@given(case=packable(), more=st.integers(0, 9))
def test_the_ends_are_next_fit_and_the_unconstrained_algorithm(case, more):
    """At 0, and from the number of samples on."""
    lengths, capacity = case

    def found(most):
        return pack(lengths, capacity=capacity, algorithm="ordered", max_displacement=most)

    assert references.next_fit(lengths, capacity) == found(0)
    assert pack(lengths, capacity=capacity, algorithm="constant_volume") == found(len(lengths) + more)


@given(case=packable(), most=st.integers(1, 40), factor=st.integers(2, 2**50), rest=st.integers(0, 8))
def test_only_proportions_decide(case, most, factor, rest):
    """Lengths and capacity may be scaled, and given as an array; of 64 bits or near them."""
    lengths, capacity = case
    more = min(rest, factor - 1)

    scaled = np.array(lengths, dtype=np.uint64) * np.uint64(factor)

    assert pack(lengths, capacity=capacity, algorithm="ordered", max_displacement=most) == pack(
        scaled, capacity=capacity * factor + more, algorithm="ordered", max_displacement=most
    )


@pytest.mark.parametrize("most", [1, 7, 1_500])
@pytest.mark.untraced
def test_many_samples_stay_in_order_in_fewer_packs(most):
    """Beyond the window as well. Each displacement gives fewer packs than next fit."""
    lengths = np.random.default_rng(2).integers(1, 900, 4_000)

    packs = pack(lengths, capacity=1_000, algorithm="ordered", max_displacement=most)

    assert np.array_equal(np.arange(4_000), np.sort(packs.indices))
    assert packs.displacements().max() <= most
    assert packs.loads(lengths).max() <= 1_000
    assert len(packs) < len(pack(lengths, capacity=1_000, algorithm="concatenative"))


@given(case=raw_lengths(), most=st.integers(0, 12), drops=st.booleans(), allow=st.booleans())
def test_trained_samples_keep_their_order_too(case, most, drops, allow):
    """
    Long samples have places as others have. What is dropped or skipped moves no other further.
    """
    lengths, packing_length = case
    policy = PlanPolicy(
        packing_length=packing_length, algorithm="ordered", max_displacement=most, min_fill_ratio="0.7",
        drop_last=drops, allow_single_long=allow,
    )  # fmt: skip
    try:
        plan = build_raw_plan(lengths, policy)
    except PlanError:
        reject()
    event(f"long: {bool(plan.single_long)}, dropped: {bool(plan.dropped_packs)}")

    assert moved(plan.packs) <= most
    assert moved(by_first_index(concatenate([plan.packs, plan.dropped_packs]))) <= most
    ratio = policy.min_fill_ratio if drops else None
    assert [] == list(plan_faults(plan, lengths, min_fill_ratio=ratio, max_displacement=most))


def test_how_far_a_sample_moves_counts_early_and_late():
    """Places are numbers of the samples in packs; indices may have gaps."""
    assert [0, 1, 1, 2] == Packs.from_lists([[0, 4, 5], [2]]).displacements().tolist()
    assert [] == Packs.from_lists([]).displacements().tolist()


def test_a_plan_that_moves_a_sample_too_far_is_found_out():
    """By the sample that moved furthest."""
    lengths = [60, 60, 60, 20, 20]
    plan = build_raw_plan(lengths, packing_length=80)

    assert [[0, 3], [1, 4], [2]] == plan.packs.tolist()
    assert ["sample 3 is 2 from its place, over max_displacement 1"] == list(
        plan_faults(plan, lengths, max_displacement=1)
    )
    assert [] == list(plan_faults(plan, lengths, max_displacement=2))


@example(case=([1] * 11, 6), most=1)
@example(case=([6] * 5 + [4] * 5, 11), most=2)  # two packs have samples on both sides of the middle
@given(case=packable(min_size=1, max_size=10), most=st.integers(0, 3))
def test_no_packing_in_order_is_below_the_bound(case, most):
    """Against exhaustive search; the algorithm is not below it either."""
    lengths, capacity = case
    fewest = references.fewest_in_order(lengths, capacity, most)

    quick = find_bound(lengths, capacity=capacity, effort=0, max_displacement=most)
    bound = find_bound(lengths, capacity=capacity, max_displacement=most)

    event(f"higher than that of all packings: {bound.kind == 'order'}, at once: {quick.packs == fewest}")
    assert find_bound(lengths, capacity=capacity, effort=0).packs <= quick.packs <= fewest == bound.packs
    assert most or quick.packs == fewest
    assert find_bound(lengths, capacity=capacity) == find_bound(lengths, capacity=capacity, max_displacement=10**18)
    assert fewest <= len(pack(lengths, capacity=capacity, algorithm="ordered", max_displacement=most))


def test_samples_that_are_far_apart_share_no_pack():
    """Long samples first, short ones last: in order they hardly meet, and the bound knows."""
    lengths = [90] * 500 + [10] * 500

    plan = build_raw_plan(lengths, packing_length=100, algorithm="ordered", max_displacement=20, drop_last=False)
    free = build_raw_plan(lengths, packing_length=100, algorithm="ordered", max_displacement=1_000)

    assert (500, "reached", 500) == (free.lower_bound, free.bound_kind, len(free.packs))
    assert "order" == plan.bound_kind
    assert 525 < plan.lower_bound <= len(plan.packs) < 551
    quick, full = (find_bound(lengths, capacity=100, effort=effort, max_displacement=1) for effort in (0, 1))
    assert 545 < quick.packs < full.packs == 550


@given(case=raw_lengths(), most=st.integers(0, 9), ranks=st.integers(1, 4), accumulation=st.integers(1, 3))
def test_training_without_shuffle_reads_the_packs_in_order(case, most, ranks, accumulation):
    """
    Microbatch by microbatch, on any number of ranks; works move packs between the ranks of a step
    alone. So each sample is trained in the step of a position at most that far from its place.
    """
    lengths, packing_length = case
    plan = build_raw_plan(
        lengths, packing_length=packing_length, algorithm="ordered", max_displacement=most, drop_last=False
    )
    schedule = EpochSchedule.from_plan(
        align_plan(plan, world_size=ranks), gradient_accumulation_steps=accumulation, num_train_epochs=1, shuffle=False
    )

    steps = [list(schedule.steps(rank=rank)) for rank in range(ranks)]
    read = [mine.batches[number][0] for turn in zip(*steps, strict=True)
            for number in range(len(turn[0].batches)) for mine in turn]  # fmt: skip
    num = len(plan.packs)

    assert list(range(num)) + [position % num for position in range(num, len(read))] == read
    assert moved(plan.packs[read[at]] for at in range(num)) <= most
    assert steps_of(schedule) == steps_of(attrs.evolve(schedule, works=plan.packs.loads(np.array(lengths))))


@given(num=st.integers(4, 40), ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)), share=st.floats(0, 1))
def test_a_resume_reads_on_in_order(num, ranks, share):
    """On another number of ranks too; packs that repeat to fill ranks are read again at the end."""
    before, after = (align_plan(build_raw_plan([7] * num, packing_length=7), world_size=size) for size in ranks)
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "shuffle": False}
    schedule = EpochSchedule.from_plan(before, **options)
    progress = schedule.at(int(share * (schedule.steps_per_epoch - 1)))
    event(f"within the epoch: {bool(progress.step)}")

    resumed = EpochSchedule.from_plan(after, start=progress, **options)

    read = [*resumed.consumed(0).tolist(), *resumed.order(0).tolist()]
    assert list(range(num)) == list(dict.fromkeys(read)) == read[:num]


def steps_of(schedule):
    """Packs that all ranks train in each step."""
    ranks = [schedule.steps(rank=rank) for rank in range(schedule.world_size)]
    return [
        sorted(pack for mine in step for batch in mine.batches for pack in batch) for step in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_displacement": -1}, "at least 0"), ({"max_displacement": 1.5}, "at least 0"),
     ({"max_displacement": True}, "at least 0"),
     ({"max_displacement": 1, "algorithm": "certified"}, "certified keeps no order: take algorithm='ordered'")],
)  # fmt: skip
def test_a_displacement_that_cannot_be_kept_is_refused(options, message):
    """By a packing, and by a policy."""
    options = {"algorithm": "ordered", **options}

    with pytest.raises(ValueError, match=f"max_displacement is .*{message}"):
        pack([1], capacity=4, **options)
    with pytest.raises(ValueError, match=f"max_displacement is .*{message}"):
        PlanPolicy(packing_length=4, **options)
