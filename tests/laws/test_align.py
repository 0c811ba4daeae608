"""Alignment gives every rank the same number of packs, and says what it repeated or dropped."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.errors import ArgumentError
from packplan.core.plan import build_raw_plan
from tests.strategies import raw_plans

world_sizes = st.integers(1, 40)


@given(plan=raw_plans(), world_size=world_sizes)
def test_padding_keeps_every_pack_and_fills_every_rank(plan, world_size):
    """All packs stay, in order; ranks are even; the filler comes from the front, cyclically."""
    num_packs = len(plan.packs)
    event(f"more filler than packs: {-num_packs % world_size > num_packs}")

    aligned = align_plan(plan, world_size=world_size, dataloader_drop_last=False)

    assert 0 == len(aligned.packs) % world_size
    assert plan.packs == aligned.packs[:num_packs]
    assert aligned.pad_needed == len(aligned.packs) - num_packs < world_size
    assert tuple(k % num_packs for k in range(aligned.pad_needed)) == aligned.repeated
    assert [plan.packs[k] for k in aligned.repeated] == aligned.packs[num_packs:].tolist()
    assert (0, num_packs) == (aligned.num_dropped, aligned.num_raw_packs)
    assert 0 == len(aligned.packs) % world_size


@given(plan=raw_plans(), world_size=world_sizes)
def test_dropping_cuts_the_tail_alone(plan, world_size):
    """The longest prefix that the ranks divide remains; if it is empty, that is an error."""
    num_packs = len(plan.packs)
    if num_packs < world_size:
        with pytest.raises(ArgumentError) as raised:
            align_plan(plan, world_size=world_size, dataloader_drop_last=True)
        assert {"num_packs": num_packs, "world_size": world_size, "batch_size": 1} == raised.value.details
        return

    aligned = align_plan(plan, world_size=world_size, dataloader_drop_last=True)

    assert plan.packs[: num_packs // world_size * world_size] == aligned.packs
    assert num_packs % world_size == aligned.num_dropped
    assert () == aligned.repeated


@pytest.mark.parametrize(
    ("num", "world_size", "batch_size", "fact"),
    [
        (1, 4, 1, "1 pack cannot feed 4 ranks while the remainder is dropped"),
        (7, 2, 4, "7 samples cannot feed 2 ranks with a batch of 4 each while the remainder is dropped"),
        (3, 1, 4, "3 samples cannot feed 1 rank with a batch of 4 each while the remainder is dropped"),
    ],
)
def test_too_few_packs_are_an_error_with_the_numbers(num, world_size, batch_size, fact):
    """Packs, or samples where batches have several; keeping the remainder is a way out."""
    plan = build_raw_plan([5] * num, packing_length=5, packing=False)
    options = {"world_size": world_size, "batch_size": batch_size}

    with pytest.raises(ArgumentError) as caught:
        align_plan(plan, **options, dataloader_drop_last=True)

    assert ("too_short", fact) == (caught.value.kind, str(caught.value))
    align_plan(plan, **options, dataloader_drop_last=False)
