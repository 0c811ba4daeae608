"""Inspection: places of samples, and the steps of their packs."""

import attrs
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.inspection import find_sample, scheduled_steps, summarise, summarise_schedule
from tests.laws.test_summary import plans, schedules


@given(plans())
def test_every_sample_has_its_place(of):
    """A sample is in a pack, dropped or skipped; one beyond the data has no place."""
    plan, lengths = of
    for sample in range(len(lengths)):
        place = find_sample(plan, sample)
        packs = plan.dropped_packs if place.kind == "dropped" else plan.packs

        assert (place.kind == "skipped") == (sample in plan.skipped_long)
        assert (place.kind == "long") == (sample in plan.single_long)
        assert (place.kind == "dropped") == any(sample in pack for pack in plan.dropped_packs)
        assert (place.pack is None) == (place.kind == "skipped")
        if place.pack is not None:
            assert packs[place.pack] == list(place.pack_members)
            assert sample in place.pack_members
    assert ("absent", None, ()) == attrs.astuple(find_sample(plan, len(lengths)))


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

    assert summarise(plan, lengths, packed=packed) == summarise(moved, among, packed=packed)
    figures = [summarise_schedule(*of, schedule, packed=packed) for of in ((plan, lengths), (moved, among))]
    assert figures[0] == figures[1]
    assert [find_sample(moved, index).kind for index in indices] == [
        find_sample(plan, i).kind for i in range(len(lengths))
    ]
    assert all(find_sample(moved, record).kind == "absent" for record in np.flatnonzero(among == 0).tolist())
