"""Alignment gives every rank the same number of packs, and says what it repeated or dropped."""

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.errors import ArgumentError
from packplan.core.plan import build_raw_plan
from tests.strategies import plain_schedule


@given(num_packs=st.integers(1, 24), world_size=st.integers(1, 40), drop_last=st.booleans())
def test_the_end_is_filled_from_the_front_or_cut(num_packs, world_size, drop_last):
    """All packs and then the first ones, cyclically; or the longest prefix that ranks divide."""
    plan = build_raw_plan([7] * num_packs, packing_length=7)
    event(f"more filler than packs: {-num_packs % world_size > num_packs}")
    dropped = num_packs % world_size if drop_last else 0
    positions = [k % num_packs for k in range(num_packs - dropped + -(num_packs - dropped) % world_size)]
    if not positions:
        return

    aligned = align_plan(plan, world_size=world_size, dataloader_drop_last=drop_last)

    assert [plan.packs[k] for k in positions] == aligned.packs.tolist()
    assert positions[num_packs:] == list(aligned.repeated)
    assert (num_packs, dropped) == (aligned.num_raw_packs, aligned.num_dropped)


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 4), st.booleans())
@example(2, 3, 1, True)  # noqa: FBT003  # fewer packs than ranks
@example(3, 1, 4, True)  # noqa: FBT003  # less than a padded batch
@example(0, 1, 1, False)  # noqa: FBT003  # nothing to repeat
def test_ranks_without_a_batch_each_are_refused(num_packs, world_size, batch_size, drop_last):
    """By plans and schedules, with all numbers; otherwise each rank has a batch in each epoch."""
    options = {"dataloader_drop_last": drop_last, "batch_size": batch_size}
    event(f"dropped, and too few: {drop_last and num_packs < world_size * batch_size}")
    if num_packs >= (world_size * batch_size if drop_last else 1):
        schedule = plain_schedule(num_packs, world_size, **options, gradient_accumulation_steps=2)
        assert all(schedule.batches(epoch, rank=rank)[0] for epoch in range(2) for rank in range(world_size))
        return

    builders = [lambda: plain_schedule(num_packs, world_size, **options)]
    if num_packs:
        plan = build_raw_plan([5] * num_packs, packing_length=5, packing=False)
        builders.append(lambda: align_plan(plan, world_size=world_size, **options))
    for build in builders:
        with pytest.raises(ArgumentError) as caught:
            build()
        assert {"num_packs": num_packs, "world_size": world_size, "batch_size": batch_size} == caught.value.details
