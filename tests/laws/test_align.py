"""Alignment gives every rank the same number of packs, and says what it repeated or dropped."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from core.align import align_plan
from core.errors import PlanTooShortError
from core.plan import build_raw_plan
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
    assert aligned.per_rank * world_size == len(aligned.packs)


@given(plan=raw_plans(), world_size=world_sizes)
def test_dropping_cuts_the_tail_alone(plan, world_size):
    """A prefix remains, the longest that the ranks divide; nothing left is an error with both numbers."""
    num_packs = len(plan.packs)
    if num_packs < world_size:
        with pytest.raises(PlanTooShortError) as raised:
            align_plan(plan, world_size=world_size, dataloader_drop_last=True)
        assert (num_packs, world_size) == (raised.value.num_packs, raised.value.world_size)
        return

    aligned = align_plan(plan, world_size=world_size, dataloader_drop_last=True)

    assert plan.packs[: num_packs // world_size * world_size] == aligned.packs
    assert num_packs % world_size == aligned.num_dropped
    assert () == aligned.repeated


@pytest.mark.parametrize(
    ("num_packs", "world_size", "drop", "expected"),
    [
        (5, 4, False, [0, 1, 2, 3, 4, 0, 1, 2]),
        (5, 4, True, [0, 1, 2, 3]),
        (1, 4, False, [0, 0, 0, 0]),
        (3, 8, False, [0, 1, 2, 0, 1, 2, 0, 1]),
        (4, 2, False, [0, 1, 2, 3]),
        (3, 1, True, [0, 1, 2]),
    ],
)
def test_worked_cases(num_packs, world_size, drop, expected):
    """Packs of one sample, so that indices name packs."""
    plan = build_raw_plan([5] * num_packs, packing_length=5)

    aligned = align_plan(plan, world_size=world_size, dataloader_drop_last=drop)

    assert [[k] for k in expected] == aligned.packs.tolist()


def test_three_packs_cannot_be_dropped_to_eight_ranks():
    """The error names both numbers and the key."""
    plan = build_raw_plan([5] * 3, packing_length=5)

    with pytest.raises(PlanTooShortError, match=r"3 packs .* 8 ranks .*dataloader_drop_last: false"):
        align_plan(plan, world_size=8, dataloader_drop_last=True)
