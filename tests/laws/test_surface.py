"""Laws of `core.surface`: a plan of lengths, its table, and the steps of its schedules."""

from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st

import packplan as pp
from packplan.core.errors import ArgumentError
from packplan.core.schedule import EpochSchedule
from tests.strategies import raw_lengths


@st.composite
def schedules(draw) -> EpochSchedule:
    """Schedules of up to 12 packs, over part of an epoch, several, or a number of steps."""
    world_size = draw(st.integers(1, 4))
    num_packs = draw(st.integers(world_size, 12))
    return EpochSchedule(
        num_packs=num_packs,
        world_size=world_size,
        dataloader_drop_last=draw(st.booleans()),
        gradient_accumulation_steps=draw(st.integers(1, 4)),
        num_train_epochs=draw(st.sampled_from([0.5, 1, 2, 2.7])),
        max_steps=draw(st.sampled_from([-1, 1, 5])),
        seed=draw(st.integers(0, 9)),
        works=draw(st.none() | st.just(np.arange(1, num_packs + 1))),
    )


@given(raw_lengths())
def test_no_sample_is_lost_by_default(case):
    """Every sample is in exactly one pack, whatever its length and however empty its pack."""
    lengths, packing_length = case
    plan = pp.plan(lengths, packing_length)

    assert dict.fromkeys(range(len(lengths)), 1) == Counter(index for pack in plan.packs for index in pack)
    assert (plan.raw, plan.checksum) == (
        pp.build_raw_plan(lengths, packing_length=packing_length, algorithm="auto"),
        pp.plan_checksum(plan.packs),
    )


@given(schedules())
def test_the_steps_of_the_ranks_are_the_batches_of_the_epochs(schedule):
    """In order, cut into windows of the accumulation, up to the last step of training."""
    steps = [list(schedule.steps(rank=rank)) for rank in range(schedule.world_size)]
    event(f"ends within an epoch: {bool(schedule.total_steps % schedule.steps_per_epoch)}")

    for rank, mine in enumerate(steps):
        assert list(range(1, schedule.total_steps + 1)) == [step.number for step in mine]
        for epoch in {step.epoch for step in mine}:
            trained = [list(batch) for step in mine if step.epoch == epoch for batch in step.batches]
            assert trained == schedule.batches(epoch, rank=rank)[: len(trained)]
        assert all(len(step.batches) <= schedule.gradient_accumulation_steps for step in mine)
        whole = [step for step in mine if step.epoch < mine[-1].epoch]
        assert len(whole) == schedule.steps_per_epoch * mine[-1].epoch


@given(schedules(), st.data())
def test_what_follows_any_number_of_batches_is_the_rest_of_the_epoch(schedule, data):
    """Also in the middle of a step, and after two interruptions; whole steps give `at`."""
    epoch = data.draw(st.integers(0, 2))
    whole = schedule.num_remaining_batches(epoch)
    first = data.draw(st.integers(0, whole))
    start = schedule.progress_after(epoch, first)
    resumed = attrs.evolve(schedule, start=start, works=None)
    unassigned = attrs.evolve(schedule, works=None)
    event(f"within a step: {bool(first % schedule.gradient_accumulation_steps)}")

    if first == whole:
        assert (epoch + 1, 0, ()) == (start.epoch, start.epoch_step, start.segments)
        return
    assert unassigned.batches(epoch, rank=0)[first:] == resumed.batches(epoch, rank=0)
    second = data.draw(st.integers(0, whole - first))
    assert schedule.progress_after(epoch, first + second).segments == resumed.progress_after(epoch, second).segments
    if not first % schedule.gradient_accumulation_steps:
        assert start == schedule.progress_at(start.step)
    later = epoch + 1
    assert schedule.progress_after(later, 0).step == schedule.progress_after(epoch, whole).step
    assert schedule.progress_after(later, 0).epoch == later


def test_steps_and_ranks_that_do_not_match_are_value_errors():
    with pytest.raises(ValueError, match="packs_per_step"):
        pp.plan([5], 10).schedule(world_size=2, packs_per_step=3)
    with pytest.raises(ValueError, match="rank"):
        list(pp.plan([5], 10).schedule().steps(rank=1))


def test_a_packing_length_in_the_place_of_a_policy_is_explained():
    """As people write it who know other packers."""
    with pytest.raises(TypeError, match="packing_length=80"):
        pp.build_raw_plan([1, 2], 80)


@given(raw_lengths(), st.booleans())
def test_a_table_has_the_figures_and_a_page_draws_the_packs(case, skips):
    """The page holds the table's values, and one bar for each drawn sample and pack."""
    lengths, packing_length = case
    try:
        plan = pp.plan(lengths, packing_length, allow_single_long=not skips)
    except ArgumentError:
        reject()
    table = plan.show()
    event(f"skipped: {bool(plan.raw.skipped_long)}, long: {bool(plan.raw.single_long)}")

    text, page = repr(table), table._repr_html_()

    assert f"{len(lengths):,}" in text
    assert plan.checksum[:12] in text
    fewest = len(plan.packs) + len(plan.raw.dropped_packs) == plan.raw.lower_bound
    assert (f"{len(plan.packs):,} (no plan has fewer)" in text) == fewest
    assert all(value in page for _, value in table.rows)
    assert ("skipped" in text) == bool(plan.raw.skipped_long)
    assert page.count("<rect") == sum(1 + len(pack) for pack in plan.packs[:24])
    assert f"{len(plan.packs):,} pack" in repr(plan)


@example(lengths=[60, 35, 60, 20, 60, 10])
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=30))
def test_no_option_of_planning_is_ignored(lengths):
    """Samples that are too long and packs that are dropped are refused if an option says so."""
    limit = max(lengths) - 1
    assume(limit >= 1)
    with pytest.raises(pp.ArgumentError, match=r"a pack holds .* \(packing_length\)"):
        pp.plan(lengths, limit, refuse_longer=True)

    try:
        found = pp.plan(lengths, 100, min_fill_ratio="0.9", max_dropped_share=1)
    except ArgumentError:  # no pack is as full
        reject()
    if len(found.raw.dropped_packs) > 1:
        event("packs are dropped")
        assert f"{len(found.raw.dropped_packs)} more are dropped" in repr(found.show())
        with pytest.raises(pp.ArgumentError):
            pp.plan(lengths, 100, min_fill_ratio="0.9", max_dropped_share=0)
