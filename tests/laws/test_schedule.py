"""Order of training: every pack once an epoch, also when a run resumes on other ranks."""

import math
from collections import Counter
from fractions import Fraction
from itertools import chain

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.checksum import plan_checksum
from packplan.core.errors import ArgumentError, StaleError
from packplan.core.plan import build_raw_plan
from packplan.core.schedule import ORDER_VERSION, EpochSchedule, Progress, ResumeState
from tests.strategies import plain_schedule, raw_plans

ranks = st.integers(1, 5)


@st.composite
def schedules(draw) -> EpochSchedule:
    """Schedules from the beginning, with padded batches and with packs assigned by work."""
    world_size = draw(ranks)
    batch_size = draw(st.sampled_from([1, 1, 1, 2, 3]))
    drop_last = draw(st.booleans())
    num_packs = draw(st.integers(world_size * batch_size if drop_last else 1, 40))
    works = None
    if batch_size == 1 and draw(st.booleans()):
        works = np.array(draw(st.lists(st.integers(0, 9), min_size=num_packs, max_size=num_packs)))
    return EpochSchedule(
        num_packs=num_packs,
        world_size=world_size,
        dataloader_drop_last=drop_last,
        gradient_accumulation_steps=draw(st.integers(1, 4)),
        num_train_epochs=draw(st.sampled_from([1, 2, 3, 0.4, 1.5, 2.25])),
        batch_size=batch_size,
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
        works=works,
        sync_at=draw(st.sampled_from(["step", "microbatch"])),
    )


def trained(schedule: EpochSchedule) -> list[tuple[int, list[list[list[int]]]]]:
    """Run a schedule as a trainer does: each step's epoch, and each rank's batches."""
    steps = []
    begin = schedule.progress_at(schedule.start.step)
    for epoch in range(begin.epoch, schedule.num_epochs):
        batches = [schedule.batches(epoch, rank=rank) for rank in range(schedule.world_size)]
        assert len({len(mine) for mine in batches}) == 1, "ranks have different numbers of batches"
        size = schedule.gradient_accumulation_steps
        starts = range(0, len(batches[0]), size)
        steps += [(epoch, [mine[first : first + size] for mine in batches]) for first in starts]
    return steps[: max(0, schedule.total_steps - schedule.start.step)]


def packs_of(steps) -> list[int]:
    """Return all packs of some steps."""
    return [pack for _, ranks_batches in steps for mine in ranks_batches for batch in mine for pack in batch]


@given(st.integers(0, 12), ranks, st.integers(1, 4), st.booleans())
@example(2, 3, 1, True)  # noqa: FBT003  # fewer packs than ranks
@example(3, 1, 4, True)  # noqa: FBT003  # less than a padded batch
@example(1, 5, 4, False)  # noqa: FBT003  # repeated for every rank
@example(0, 1, 1, False)  # noqa: FBT003  # nothing to repeat
def test_a_schedule_gives_every_rank_a_batch_or_is_none(num_packs, world_size, batch_size, drop_last):
    """Without a batch for each rank, the error has all numbers."""
    event(f"dropped, and too few: {drop_last and num_packs < world_size * batch_size}")
    options = {"dataloader_drop_last": drop_last, "batch_size": batch_size, "num_train_epochs": 2}
    if num_packs < (world_size * batch_size if drop_last else 1):
        with pytest.raises(ArgumentError) as caught:
            plain_schedule(num_packs, world_size, **options)
        assert (num_packs, world_size, batch_size) == tuple(caught.value.details.values())
        return

    steps = trained(plain_schedule(num_packs, world_size, **options, gradient_accumulation_steps=2))

    assert {0, 1} == {epoch for epoch, _ in steps}
    assert all(mine and all(mine) for _, ranks_batches in steps for mine in ranks_batches)


@given(schedules())
def test_an_epoch_is_the_aligned_plan_in_another_order(schedule):
    """Whatever the ranks; the same again for the same seed; steps and epochs are as counted."""
    plan = build_raw_plan([5] * schedule.num_packs, packing_length=5)
    options = {"world_size": schedule.world_size, "dataloader_drop_last": schedule.dataloader_drop_last}
    aligned = Counter(chain.from_iterable(align_plan(plan, **options).packs))
    steps = trained(attrs.evolve(schedule, num_train_epochs=2))

    for epoch in range(2):
        seen = Counter(packs_of(step for step in steps if step[0] == epoch))
        if schedule.dataloader_drop_last and schedule.batch_size > 1:
            assert seen <= aligned
            assert seen.total() == schedule.batches_per_epoch * schedule.batch_size * schedule.world_size
        else:
            assert aligned == seen
    assert 2 * schedule.steps_per_epoch == len(steps)
    assert steps == trained(attrs.evolve(schedule, num_train_epochs=2))
    if not schedule.shuffle and not schedule.batch_size > 1:
        assert sorted(packs_of(steps[:1])) == packs_of(steps[:1]) or schedule.world_size > 1


@given(schedules(), ranks, st.data())
def test_works_decide_who_trains_a_pack_and_never_in_which_step(schedule, world_size, data):
    """Steps keep their packs, also after a resume on other ranks."""
    plain = attrs.evolve(schedule, works=None)

    def contents(of):
        return [(epoch, Counter(packs_of([(epoch, step)]))) for epoch, step in trained(of)]

    assert contents(plain) == contents(schedule)
    stop = data.draw(st.integers(0, schedule.total_steps))
    assert plain.progress_at(stop) == schedule.progress_at(stop)
    assume(not schedule.dataloader_drop_last or schedule.num_packs >= world_size * schedule.batch_size)
    event(f"other ranks in mid-epoch, by work: {world_size != schedule.world_size and schedule.works is not None}")
    change = {"world_size": world_size, "start": schedule.progress_at(stop)}
    assert contents(attrs.evolve(plain, **change)) == contents(attrs.evolve(schedule, **change))


@given(schedules())
def test_steps_and_epochs_are_counted_as_transformers_counts_them(schedule):
    """The epochs times the steps of one, rounded up; `max_steps` overrides."""
    assert (
        math.ceil(schedule.num_train_epochs * schedule.steps_per_epoch)
        == schedule.total_steps
        == len(trained(schedule))
    )
    assert math.ceil(schedule.num_train_epochs) == schedule.num_epochs

    assert 7 == attrs.evolve(schedule, max_steps=7).total_steps == len(trained(attrs.evolve(schedule, max_steps=7)))


@given(schedules(), st.lists(st.tuples(ranks, st.integers(1, 3)), min_size=1, max_size=3), st.data())
def test_resumes_on_other_ranks_finish_the_epoch_with_what_it_has_not_consumed(schedule, changes, data):
    """Each pack is trained once, but for fewer fillers or cut packs than ranks a change."""
    schedule = attrs.evolve(schedule, batch_size=1, num_train_epochs=2)
    consumed = []
    cut, fillers = schedule.num_packs % schedule.world_size, -schedule.num_packs % schedule.world_size
    for world_size, accumulation in changes:
        here = schedule.num_remaining_steps(0) if schedule.start.epoch == 0 else 0
        steps = trained(schedule)[: data.draw(st.integers(0, here))]
        if not steps or len(steps) == here:
            continue
        if schedule.dataloader_drop_last and schedule.num_packs < world_size:
            continue  # no schedule at all
        consumed += packs_of(steps)
        before = schedule
        schedule = attrs.evolve(
            schedule,
            world_size=world_size,
            gradient_accumulation_steps=accumulation,
            start=schedule.progress_at(schedule.start.step + len(steps)),
        )
        assert schedule.start_fault() is None
        event(f"the rest gives no batch: {not schedule.num_remaining_batches(0)}")
        left = set(before.order(0).tolist()[len(packs_of(steps)) :]) - set(consumed)
        if world_size == before.world_size:
            continue
        event("other ranks in mid-epoch")
        assert left >= set(schedule.order(0).tolist())
        cut += len(left) % world_size
        fillers += -len(left) % world_size
    rest = [step for step in trained(schedule) if step[0] == 0]
    consumed += packs_of(rest)

    counts = Counter(consumed)
    missing = set(range(schedule.num_packs)) - set(counts)
    if schedule.dataloader_drop_last:
        assert all(count == 1 for count in counts.values())
        assert len(missing) <= cut
    else:
        assert not missing
        assert counts.total() - schedule.num_packs <= fillers
    ends = trained(schedule)
    here, later = schedule.num_remaining_steps(schedule.start.epoch), 1 - schedule.start.epoch
    assert here + later * schedule.steps_per_epoch == len(ends) == schedule.total_steps - schedule.start.step
    epoch_one = Counter(packs_of(step for step in ends if step[0] == 1))
    assert epoch_one == Counter(attrs.evolve(schedule, start=Progress()).order(1).tolist())


@given(st.integers(2, 20), ranks, ranks, st.integers(1, 4), st.integers(1, 20), st.booleans())
@example(4, 1, 3, 1, 2, True)  # noqa: FBT003  # 2 packs are left for 3 ranks
@example(7, 1, 1, 3, 5, True)  # noqa: FBT003  # 2 samples are left for a batch of 3
@example(3, 2, 1, 1, 1, False)  # noqa: FBT003  # what is left may be a repetition
def test_an_epoch_whose_rest_gives_no_batch_takes_no_further_step(  # noqa: PLR0917  # examples are by position
    num_packs, before, after, batch_size, stop, drop_last
):
    """The next epoch goes on, and the total of steps counts so."""
    assume(not drop_last or num_packs >= max(before, after * batch_size))
    schedule = plain_schedule(num_packs, before, dataloader_drop_last=drop_last, num_train_epochs=2)
    assume(stop < schedule.steps_per_epoch)
    order = schedule.order(0).tolist()
    left = len(set(order) - set(order[: stop * before]))
    of_left = left // after if drop_last else -(-left // after)
    per_rank = schedule.steps_per_epoch - stop if before == after else of_left
    num_batches = per_rank // batch_size if drop_last else -(-per_rank // batch_size)
    event(f"the rest gives no batch: {not num_batches}")

    resumed = attrs.evolve(schedule, world_size=after, batch_size=batch_size, start=schedule.progress_at(stop))

    assert resumed.start_fault() is None
    assert num_batches == resumed.num_remaining_batches(0) == resumed.num_remaining_steps(0)
    assert (0 if num_batches else 1) == resumed.progress_at(stop).epoch
    steps = trained(resumed)
    assert [0] * num_batches + [1] * resumed.steps_per_epoch == [epoch for epoch, _ in steps]
    assert (stop + len(steps), 2) == (resumed.total_steps, resumed.num_epochs)
    last = attrs.evolve(resumed, num_train_epochs=1)
    assert (stop + num_batches, num_batches) == (last.total_steps, len(trained(last)))


@pytest.mark.parametrize(
    ("works", "options", "message"),
    [
        ([1.0] * 7, {}, r"differ in number \(7 and 8\)"),
        ([1.0, -2.0] * 4, {}, "work 1 is -2.0, .* 4 of 8 are wrong"),
        ([1.0] * 7 + [float("nan")], {}, "work 7 is nan, but the work of packs is a finite number of at least 0$"),
        ([1.0] * 7 + [float("inf")], {}, "work 7 is inf"),
        ([1.0] * 8, {"batch_size": 2}, "batch_size has to be 1, not 2"),
        ([1.0] * 8, {"sync_at": "epoch"}, "sync_at is 'epoch', but has to be one of step, microbatch"),
    ],
)
def test_works_that_cannot_be_balanced_are_refused(works, options, message):
    """One finite number for each pack, from 0; index, value and number are named."""
    with pytest.raises(ValueError, match=message):
        plain_schedule(8, 2, works=np.array(works), **options)


def test_a_resume_state_names_what_has_changed():
    then = ResumeState("a1", "d", 1, True, "full", 1, Progress())  # noqa: FBT003

    assert () == then.differences(attrs.evolve(then, progress=Progress(step=5)))
    for name, now, says, kind in (
        ("order_version", 2, "order_version: stored 1, now 2", "changed_order"),
        ("plan", "b2", "plan: stored 'a1', now 'b2'", "changed_plan"),
    ):
        differences = then.differences(attrs.evolve(then, **{name: now}))
        assert [says] == list(map(str, differences))
        assert kind == StaleError.plan("checkpoint-1", differences).kind
    inputs = [attrs.evolve(then, plan=name, inputs={"algorithm": name, "packing": True}) for name in ("a", "b")]
    assert ["plan", "algorithm"] == [one.key for one in inputs[0].differences(inputs[1])]
    assert ["plan"] == [one.key for one in then.differences(inputs[0])]
    assert () == inputs[0].differences(attrs.evolve(inputs[0], inputs={}))
    both = then.differences(attrs.evolve(then, order_version=2, plan="b2"))
    assert "changed_order" == StaleError.plan("checkpoint-1", both).kind


GOLDEN_ORDERS = {
    2: {
        "ranks": [[[4], [9], [7]], [[8], [3], [2]], [[0], [6], [1]], [[1], [0], [5]]],
        "second epoch": [0, 1, 2, 8, 1, 5, 3, 9, 6, 0, 4, 7],
        "resumed on other ranks": [7, 2, 5],
        "padded batches": [[[2, 5]], [[4, 1]], [[7, 0]], [[3, 6]]],
        "many packs": "64e207512a18fc84eb757dfc749a86ba1546694008d56acb1f77bcc28e4eba91",
        "equal work a step": "c2380caf4b96c645cbad8d2574794155a178d0b3eedd406e9743b0b336ae158a",
        "equal work a microbatch": "513d32426365438b2d6ede182a0d2204cdfd9b778bd49c76b11670ff34de1c7b",
    },
}
"""Orders of this `ORDER_VERSION`."""


def test_the_golden_order():
    """Under one version, which checkpoints name, the order never changes."""
    schedule = plain_schedule(10, 4, gradient_accumulation_steps=2, num_train_epochs=2, seed=42)
    padded = attrs.evolve(schedule, batch_size=2, dataloader_drop_last=True, seed=7)
    many = attrs.evolve(schedule, num_packs=1000, seed=1)
    works = np.arange(1000) ** 2 % 997
    step = attrs.evolve(many, works=works, world_size=8, gradient_accumulation_steps=4)

    assert GOLDEN_ORDERS[ORDER_VERSION] == {
        "ranks": [schedule.batches(0, rank=rank) for rank in range(4)],
        "second epoch": schedule.order(1).tolist(),
        "resumed on other ranks": attrs.evolve(schedule, world_size=3, start=schedule.progress_at(1)).order(0).tolist(),
        "padded batches": [padded.batches(3, rank=rank) for rank in range(4)],
        **{
            name: plan_checksum([one.order(epoch).tolist() for epoch in range(3)])
            for name, one in {
                "many packs": many,
                "equal work a step": step,
                "equal work a microbatch": attrs.evolve(step, sync_at="microbatch"),
            }.items()
        },
    }, "meant? raise ORDER_VERSION in core/schedule/schedule.py, and write its orders into GOLDEN_ORDERS"


@given(raw_plans(), ranks, st.integers(1, 3), st.booleans(), st.booleans())
def test_a_schedule_of_an_aligned_plan_trains_that_plan(plan, world_size, batch_size, drop_last, shuffle):
    """It trains the aligned plan's packs, in their order unless it shuffles."""
    assume(not drop_last or len(plan.packs) >= world_size * batch_size)
    aligned = align_plan(plan, world_size=world_size, dataloader_drop_last=drop_last, batch_size=batch_size)
    event(f"repeated: {aligned.pad_needed > 0}, dropped: {aligned.num_dropped > 0}")

    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 1.5, "max_steps": 9, "seed": 3, "shuffle": shuffle}
    schedule = EpochSchedule.from_plan(aligned, **options)

    assert shuffle or aligned.packs.tolist() == plan.packs.take(schedule.order(0)).tolist()
    assert len(aligned.packs) == schedule.packs_per_epoch
    assert schedule == plain_schedule(
        len(plan.packs), world_size, batch_size=batch_size, dataloader_drop_last=drop_last, **options
    )


@st.composite
def differing(draw) -> EpochSchedule:
    """Schedules whose epochs have packs of their own."""
    world_size, batch_size = draw(ranks), draw(st.sampled_from([1, 1, 2]))
    drop_last = draw(st.booleans())
    least = world_size * batch_size if drop_last else 1
    num_packs = tuple(draw(st.lists(st.integers(least, 24), min_size=3, max_size=3)))
    return EpochSchedule(
        num_packs=num_packs,
        world_size=world_size,
        dataloader_drop_last=drop_last,
        gradient_accumulation_steps=draw(st.integers(1, 4)),
        num_train_epochs=draw(st.sampled_from([1, 2, 3, 0.4, 1.5, 2.1])),
        batch_size=batch_size,
        seed=draw(st.integers(0, 3)),
        works=None if batch_size > 1 or draw(st.booleans()) else lambda epoch: np.arange(num_packs[epoch]) % 5,
    )


@given(differing())
def test_epochs_of_their_own_are_each_the_epoch_of_a_plan(schedule):
    """An epoch's packs and steps are those of a plan that has as many packs in every epoch."""
    steps = trained(schedule)

    assert schedule.total_steps == len(steps)
    assert math.ceil(schedule.num_train_epochs) == schedule.num_epochs
    for epoch in range(schedule.num_epochs):
        works = None if schedule.works is None else schedule.works(epoch)
        alone = attrs.evolve(schedule, num_packs=schedule.num_packs[epoch], works=works)
        share = min(1, Fraction(str(schedule.num_train_epochs)) - epoch)
        mine = [step for step in trained(attrs.evolve(alone, num_train_epochs=3)) if step[0] == epoch]
        assert mine[: math.ceil(share * alone.steps_per_epoch)] == [step for step in steps if step[0] == epoch]
    assert 5 == attrs.evolve(schedule, max_steps=5).total_steps


@given(schedules() | differing(), st.data())
def test_a_resume_on_as_many_ranks_goes_on_where_it_stopped(schedule, data):
    """The rest equals that of an uninterrupted run, batch for batch."""
    whole = trained(schedule)
    stop = data.draw(st.integers(0, len(whole)))
    event(f"mid-epoch: {schedule.progress_at(stop).epoch_step > 0}, epochs differ: {schedule.epochs_differ}")

    resumed = attrs.evolve(schedule, start=schedule.progress_at(stop))

    assert resumed.start_fault() is None
    assert whole[stop:] == trained(resumed)
    assert schedule.total_steps == resumed.total_steps
    assert all(schedule.progress_at(step) == resumed.progress_at(step) for step in range(stop, len(whole) + 1))
    epoch = schedule.progress_at(stop).epoch
    before = Counter(packs_of(step for step in whole[:stop] if step[0] == epoch))
    assert before == Counter(resumed.consumed_packs(epoch).tolist() if resumed.num_epoch_packs(epoch) else [])


@given(differing(), st.data())
def test_epochs_of_their_own_go_on_with_what_they_have_left_on_other_ranks(schedule, data):
    """Every pack of the epoch once, before the resume or after it."""
    assume(not schedule.dataloader_drop_last and schedule.world_size > 1)
    whole = trained(schedule)
    start = schedule.progress_at(data.draw(st.integers(0, len(whole) - 1)))
    resumed = attrs.evolve(schedule, world_size=1, batch_size=1, start=start, num_train_epochs=3)

    done = set(resumed.consumed_packs(start.epoch).tolist())
    later = packs_of(step for step in trained(resumed) if step[0] == start.epoch)
    assert sorted({*range(schedule.num_packs[start.epoch])} - done) == sorted(later)
