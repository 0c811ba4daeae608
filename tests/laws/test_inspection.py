"""Inspection: places of samples, and broken invariants."""

import attrs
import numpy as np
import pytest
from hypothesis import event, given, reject
from hypothesis import strategies as st

from packplan.core.errors import UserError
from packplan.core.inspection import place_of, plan_faults, scheduled_steps, summarise, summarise_schedule
from packplan.core.packs import Packs
from packplan.core.plan import build_raw_plan, one_sample_packs
from tests.laws.test_summary import plans, schedules


@given(plans())
def test_every_sample_has_its_place(of):
    """A sample is in a pack, dropped or skipped; one beyond the data has no place."""
    plan, lengths = of
    for sample in range(len(lengths)):
        place = place_of(plan, sample)
        packs = plan.dropped_packs if place.kind == "dropped" else plan.packs

        assert (place.kind == "skipped") == (sample in plan.skipped_long)
        assert (place.kind == "long") == (sample in plan.single_long)
        assert (place.kind == "dropped") == any(sample in pack for pack in plan.dropped_packs)
        assert (place.pack is None) == (place.kind == "skipped")
        if place.pack is not None:
            assert packs[place.pack] == list(place.pack_members)
            assert sample in place.pack_members
    with pytest.raises(IndexError, match="is no sample of the plan"):
        place_of(plan, len(lengths))


@given(schedules())
def test_every_turn_of_a_pack_is_one_that_a_rank_takes(drawn):
    """All turns of all packs are all batches of all ranks."""
    _, _, schedule, _ = drawn
    taken = sorted(
        (pack, number // schedule.gradient_accumulation_steps, rank)
        for rank in range(schedule.world_size)
        for number, batch in enumerate(schedule.batches(0, rank=rank))
        for pack in batch
    )

    found = sorted(
        (pack, turn.step, turn.rank) for pack in range(schedule.num_packs) for turn in scheduled_steps(schedule, pack)
    )
    assert taken == found


def test_a_pack_at_the_ratio_is_not_underfilled():
    """60 of 80 at 0.75: dropped, it breaks the law; kept, it does not."""
    lengths = [60, 60]
    plan = build_raw_plan(lengths, packing_length=80, min_fill_ratio="0.75")
    assert [] == list(plan_faults(plan, lengths, min_fill_ratio="0.75"))

    broken = attrs.evolve(plan, packs=packs([0]), dropped_packs=packs([1]))
    found = list(plan_faults(broken, lengths, min_fill_ratio="0.75"))
    assert "dropped pack 0 is not filled below 0.75, but was dropped" in found


@given(plans(), st.sampled_from(["0", "0.65", "0.9"]))
def test_plans_keep_their_laws(of, ratio):
    """Every policy is tried, and none."""
    lengths, packing_length = of[1], of[0].packing_length
    try:
        plan = build_raw_plan(lengths, packing_length=packing_length, min_fill_ratio=ratio)
    except UserError:
        reject()

    assert [] == list(plan_faults(plan, lengths, min_fill_ratio=ratio))
    alone = one_sample_packs(lengths, packing_length=packing_length)
    assert [] == list(plan_faults(alone, lengths, packed=False))


@given(schedules(), st.data())
def test_figures_are_those_of_the_samples_whatever_records_lie_between(drawn, data):
    """A record of length 0 is no sample: it moves the indices of others, and changes no figure."""
    plan, lengths, schedule, packed = drawn
    gaps = data.draw(st.lists(st.integers(1, 3), min_size=len(lengths), max_size=len(lengths)))
    indices = np.cumsum(gaps) - 1
    among = np.zeros(indices[-1] + data.draw(st.integers(1, 3)), np.int64)
    among[indices] = lengths
    moved = plan.with_indices(indices)
    event(f"records between: {len(among) > len(lengths)}, long: {bool(plan.single_long)}, packed: {packed}")

    assert list(plan_faults(plan, lengths, packed=packed)) == list(plan_faults(moved, among, packed=packed))
    assert summarise(plan, lengths, packed=packed) == summarise(moved, among, packed=packed)
    figures = [summarise_schedule(*of, schedule, packed=packed) for of in ((plan, lengths), (moved, among))]
    assert figures[0] == figures[1]
    assert [place_of(moved, index).kind for index in indices] == [place_of(plan, i).kind for i in range(len(lengths))]
    for record in np.flatnonzero(among == 0).tolist():
        with pytest.raises(IndexError, match=f"record {record} is no sample"):
            place_of(moved, record)


PLANNED = [60, 20, 50, 30, 40, 40, 90, 10, 85]

SOUND = build_raw_plan(PLANNED, packing_length=80, allow_single_long=False, min_fill_ratio="0.65")


def packs(*lists):
    return Packs.from_lists(list(lists))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packs": Packs(np.array([0, 2]), np.array([-1, 1]))}, "sample -1 is in the plan, but has no length"),
        ({"num_samples": 8}, "the plan is of 8 samples, but there are 9 lengths"),
        ({"packs": packs([0, 1], [2, 3], [4, 99])}, "sample 99 is in the plan, but has no length"),
        ({"packs": packs([0, 1], [2, 3])}, "2 samples are not in the plan exactly once: sample 4 is 0 times"),
        ({"packs": packs([0, 1], [1, 2, 3], [4, 5])}, "sample 1 is 2 times"),
        ({"packs": packs([0, 1], [3, 2], [4, 5])}, "the samples of pack 1 do not ascend"),
        ({"packs": packs([2, 3], [0, 1], [4, 5])}, "pack 1 starts before the one in front of it"),
        ({"packs": packs([0, 1, 2], [3], [4, 5])}, "pack 0 holds 130 tokens, over its budget of 80"),
        ({"packs": packs([0, 1], [2], [3], [4, 5])}, "pack 1 is filled below 0.65, but was kept"),
        ({"dropped_packs": packs([4, 5], [7]), "packs": packs([0, 1], [2, 3])}, "dropped pack 0 is not filled below"),
        ({"skipped_long": (6,)}, "1 sample is named as long, but 2 have 80 tokens or more"),
        ({"planned_tokens": 1}, "planned_tokens is 1, but the packs give 240"),
        ({"long_tokens": 5}, "long_tokens is 5, but the packs give 0"),
        ({"lower_bound": 7}, "lower_bound is 7, but the plan has 4 packs"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_a_law_is_found(changes, said):
    """By that law, with the first place where; what is sound is not named."""
    assert [] == list(plan_faults(SOUND, PLANNED, min_fill_ratio="0.65"))

    found = list(plan_faults(attrs.evolve(SOUND, **changes), PLANNED, min_fill_ratio="0.65"))

    assert any(said in fault for fault in found), found


def test_packs_of_other_samples_break_a_law_too():
    """One of length 0 is no sample; in padded batches each sample is alone."""
    assert "1 sample is not in the plan exactly once: sample 0 is 1 times" in plan_faults(SOUND, [0, *PLANNED[1:]])
    assert any("share no packs" in fault for fault in plan_faults(SOUND, PLANNED, packed=False))
