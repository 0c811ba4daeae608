"""Alignment gives every rank the same number of packs, and says what it repeated or dropped."""

from __future__ import annotations

import re

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.errors import PlanTooShortError
from packplan.core.plan import build_raw_plan, one_sample_packs
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
    """
    A prefix remains, the longest that the ranks divide; nothing left is an error with both numbers.
    """
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

    with pytest.raises(PlanTooShortError, match=r"3 packs .* 8 ranks .*dataloader_drop_last: false.* 3 ranks at most"):
        align_plan(plan, world_size=8, dataloader_drop_last=True)


@pytest.mark.parametrize(
    ("num", "world_size", "batch_size", "what", "ways"),
    [
        (1, 4, 1, "1 pack cannot feed 4 ranks",
         ["use 1 rank at most", "when packing, lower template.max_length to get more packs"]),
        (7, 2, 4, "7 samples cannot feed 2 ranks with a batch of 4 each",
         ["lower training.per_device_train_batch_size to 3", "use 1 rank at most"]),
        (3, 1, 4, "3 samples cannot feed 1 rank with a batch of 4 each",
         ["lower training.per_device_train_batch_size to 3"]),
        (3, 4, 4, "3 samples cannot feed 4 ranks with a batch of 4 each", []),
    ],
)  # fmt: skip
def test_what_is_too_short_says_each_way_out(num, world_size, batch_size, what, ways):
    """And every way that it names with a number is one: one more would be refused."""
    plan = one_sample_packs([5] * num, packing_length=5)
    options = {"world_size": world_size, "batch_size": batch_size}
    said = f"{what} while the remainder is dropped: " + ", or ".join(
        ["set training.dataloader_drop_last: false", *ways]
    )

    with pytest.raises(PlanTooShortError) as caught:
        align_plan(plan, **options, dataloader_drop_last=True)

    assert said == str(caught.value)
    align_plan(plan, **options, dataloader_drop_last=False)
    for key, pattern in (("batch_size", r"batch_size to (\d+)"), ("world_size", r"use (\d+) rank")):
        for most in map(int, re.findall(pattern, said)):
            align_plan(plan, **options | {key: most}, dataloader_drop_last=True)
            with pytest.raises(PlanTooShortError):
                align_plan(plan, **options | {key: most + 1}, dataloader_drop_last=True)
