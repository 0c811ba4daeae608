"""Order of training: every pack once an epoch, also when a run resumes on other ranks."""

import math
from collections import Counter
from fractions import Fraction
from unittest.mock import Mock

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

import packplan as pp
from packplan.core.align import align_plan, lay_out_slots
from packplan.core.batch import largest_degree
from packplan.core.errors import SHARED_BY, ArgumentError, StaleError, counted
from packplan.core.fingerprint import from_plain, to_plain
from packplan.core.packs import plan_checksum
from packplan.core.plan import build_raw_plan
from packplan.core.schedule import ORDER_VERSION, EpochSchedule, EpochSegment, Progress, ResumeState
from packplan.core.shuffling import seeded_permutation
from tests.strategies import plain_schedule, schedules

ranks = st.integers(1, 5)

shared_schedules = schedules(shared=True)
plain_schedules = schedules() | schedules(differing=True)
every_schedule = plain_schedules | shared_schedules


def trained(schedule: EpochSchedule) -> list[tuple[int, list[tuple[tuple[int, ...], ...]]]]:
    """Return each step's epoch, and each rank's batches; all ranks have as many."""
    of_ranks = [schedule.steps(rank=rank) for rank in range(schedule.world_size)]
    return [(mine[0].epoch, [step.batches for step in mine]) for mine in zip(*of_ranks, strict=True)]


def packs_of(steps, epoch=None) -> list[int]:
    """Return all packs of some steps, or of those of one epoch."""
    mine = [of_ranks for number, of_ranks in steps if epoch in {None, number}]
    return [pack for of_ranks in mine for batches in of_ranks for batch in batches for pack in batch]


@given(every_schedule, st.sampled_from([-1, 1, 5, 80]))
def test_steps_are_windows_of_the_batches_counted_as_transformers_counts_them(schedule, max_steps):
    """The epochs times the steps of one, rounded up, or `max_steps`; none behind the last plan."""
    schedule = attrs.evolve(schedule, max_steps=max_steps)
    planned = sum(map(schedule.num_epoch_steps, range(3))) if schedule.epochs_differ else math.inf
    event(f"ends before max_steps: {planned < max_steps}")
    per_epoch = [schedule.num_epoch_steps(e) for e in range(schedule.num_epochs) if schedule.num_epoch_packs(e)]
    event(f"ends within an epoch: {sum(per_epoch) > schedule.total_steps}, epochs differ: {schedule.epochs_differ}")
    if max_steps > 0:
        assert max_steps == schedule.total_steps
    else:
        assert math.ceil(schedule.num_train_epochs) == schedule.num_epochs
        share = Fraction(str(schedule.num_train_epochs)) - schedule.num_epochs + 1
        exact = sum(per_epoch[:-1]) + math.ceil(share * per_epoch[-1])
        by_floats = math.ceil(schedule.num_train_epochs * per_epoch[0])
        assert schedule.total_steps == (exact if schedule.epochs_differ else by_floats)
    for rank in range(schedule.world_size):
        steps = list(schedule.steps(rank=rank))
        assert [*range(1, min(schedule.total_steps, planned) + 1)] == [step.number for step in steps]
        for epoch, num_steps in enumerate(per_epoch):
            mine = [step.batches for step in steps if step.epoch == epoch]
            batches = schedule.batches(epoch, rank=rank)
            assert num_steps == len(mine) or epoch == schedule.num_epochs - 1
            assert {len(window) for window in mine[:-1]} <= {schedule.gradient_accumulation_steps}
            whole = [list(batch) for window in mine for batch in window]
            assert whole == (batches if num_steps == len(mine) else batches[: len(whole)])


@given(schedules())
def test_an_epoch_is_the_aligned_plan_in_another_order(schedule):
    """Whatever the ranks; in its own order unless it shuffles or levels work."""
    plan = build_raw_plan([5] * schedule.num_packs, packing_length=5)
    shape = {"dataloader_drop_last": schedule.dataloader_drop_last, "batch_size": schedule.batch_size}
    aligned = align_plan(plan, world_size=schedule.world_size, **shape)
    event(f"repeated: {aligned.pad_needed > 0}, dropped: {aligned.num_dropped > 0}")
    names = ("gradient_accumulation_steps", "num_train_epochs", "seed", "shuffle", "works", "sync_at")

    assert schedule == EpochSchedule.from_plan(aligned, **{name: getattr(schedule, name) for name in names})
    assert len(aligned.packs) == schedule.packs_per_epoch
    if not schedule.shuffle and schedule.works is None:
        assert aligned.packs.tolist() == plan.packs.take(schedule.order(0)).tolist()
    steps = trained(attrs.evolve(schedule, num_train_epochs=2))
    held = Counter(aligned.packs.indices.tolist())
    for epoch in range(2):
        seen = Counter(packs_of(steps, epoch))
        assert seen <= held
        smaller_batch = len(aligned.packs) // schedule.world_size % schedule.batch_size * schedule.world_size
        assert held.total() - seen.total() == (smaller_batch if schedule.dataloader_drop_last else 0)


@given(schedules() | schedules(shared=True), ranks, st.data())
def test_works_decide_who_trains_a_pack_and_never_in_which_step(schedule, world_size, data):
    """Steps keep their packs, also after a resume on other ranks."""
    plain = attrs.evolve(schedule, works=None)

    def contents(of):
        return [(epoch, Counter(packs_of([(epoch, step)]))) for epoch, step in trained(of)]

    assert contents(plain) == contents(schedule)
    stop = data.draw(st.integers(0, schedule.total_steps))
    assert plain.progress_at(stop) == schedule.progress_at(stop)
    schedule, plain = (attrs.evolve(one, max_degree=None) for one in (schedule, plain))
    assume(not schedule.dataloader_drop_last or schedule.num_packs >= world_size * schedule.batch_size)
    event(f"other ranks in mid-epoch, by work: {world_size != schedule.world_size and schedule.works is not None}")
    change = {"world_size": world_size, "start": schedule.progress_at(stop)}
    assert contents(attrs.evolve(plain, **change)) == contents(attrs.evolve(schedule, **change))


changes = st.tuples(ranks, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 40))
"""Ranks, packs of a batch, batches of a step and `dataloader_drop_last` from then on, and when."""


@example(plain_schedule(4, 1, dataloader_drop_last=True), 0, [(3, 1, 1, True, 1)])  # 2 packs are left for 3 ranks
@example(plain_schedule(7, 1, dataloader_drop_last=True), 1, [(1, 3, 1, True, 4)])  # 2 are left for a batch of 3
@example(plain_schedule(3, 2), 0, [(1, 1, 1, False, 0)])  # what is left may be a repetition
@example(plain_schedule(7, 2), 0, [(2, 1, 1, True, 0)])  # and is none where the last are dropped from now on
@given(plain_schedules, st.integers(0, 1), st.lists(changes, min_size=1, max_size=3))
def test_resumes_on_other_ranks_finish_the_epoch_with_what_it_has_not_consumed(schedule, epoch, changes):
    """Its packs are aligned again. Where they give no batch, the epoch takes no further step."""
    schedule = attrs.evolve(schedule, works=None, num_train_epochs=epoch + 2)
    schedule = attrs.evolve(schedule, start=schedule.progress_at(schedule.last_step(0) * epoch))
    least, consumed = min(map(schedule.num_epoch_packs, range(3))), []
    for world_size, batch_size, accumulation, drops, when in changes:
        here = schedule.num_remaining_steps(epoch)
        if here < 2 or (drops and least < world_size * batch_size):
            continue  # it has no step after the first, or there is no such schedule
        steps = trained(schedule)[: 1 + when % (here - 1)]
        consumed += packs_of(steps)
        order = schedule.order(epoch).tolist()[len(packs_of(steps)) :]
        if (world_size, drops) != (schedule.world_size, schedule.dataloader_drop_last):
            left = [*dict.fromkeys(pack for pack in order if pack not in consumed)]
            per_rank = len(left) // world_size if drops else -(-len(left) // world_size)
            order = (left * world_size)[: per_rank * world_size]
        start = schedule.progress_at(schedule.start.step + len(steps))
        schedule = attrs.evolve(
            schedule,
            world_size=world_size,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            dataloader_drop_last=drops,
            start=start,
        )
        per_rank = len(order) // world_size
        num_batches = per_rank // batch_size if drops else -(-per_rank // batch_size)
        num_steps, num_next = -(-num_batches // accumulation), schedule.num_epoch_steps(epoch + 1)
        event(f"the rest gives no batch: {not num_batches}, filled: {len(order) > len({*order})}")

        assert schedule.start_fault() is None
        assert order == schedule.order(epoch).tolist()
        assert Counter(consumed) == Counter(schedule.consumed_packs(epoch).tolist())
        ends = trained(schedule)
        assert [epoch] * num_steps + [epoch + 1] * num_next == [number for number, _ in ends]
        assert Counter(order[: num_batches * batch_size * world_size]) == Counter(packs_of(ends, epoch))
        assert (epoch + (not num_batches), epoch + 2) == (schedule.progress_at(start.step).epoch, schedule.num_epochs)
        assert start.step + num_steps + num_next == schedule.total_steps
        assert start.step + num_steps == attrs.evolve(schedule, num_train_epochs=epoch + 1).total_steps


@pytest.mark.parametrize("num_packs", [12, (12, 12, 12)])
def test_a_run_that_has_passed_its_end_takes_no_further_step(num_packs):
    """On other ranks, and with fewer epochs than it began: it ends where it is."""
    start = plain_schedule(num_packs, num_train_epochs=3).progress_at(30)

    ended = plain_schedule(num_packs, 3, num_train_epochs=0.5, start=start)

    assert (30, 2, []) == (ended.total_steps, ended.num_epochs, [*ended.steps()])


@pytest.mark.parametrize(
    ("works", "options", "message"),
    [
        ([1.0] * 7, {}, r"\(7 and 8\)"), ([1.0, -2.0] * 4, {}, "work 1 is -2.0, .* 4 of 8"),
        ([1.0] * 7 + [float("nan")], {}, "work 7 is nan"), ([1.0] * 7 + [float("inf")], {}, "work 7 is inf"),
        ([1.0] * 8, {"batch_size": 2}, "batch_size"), ([1.0] * 8, {"sync_at": "epoch"}, "sync_at is 'epoch'"),
    ],
)  # fmt: skip
def test_works_that_cannot_be_balanced_are_refused(works, options, message):
    """One finite number for each pack, from 0; index, value and number are named."""
    with pytest.raises(ArgumentError, match=message):
        plain_schedule(8, 2, works=np.array(works), **options)


def test_steps_and_ranks_that_do_not_match_are_refused():
    with pytest.raises(ArgumentError, match="packs_per_step"):
        pp.plan([5], 10).schedule(world_size=2, packs_per_step=3)
    with pytest.raises(ArgumentError, match="rank"):
        list(plain_schedule(1).steps(rank=1))


@pytest.mark.parametrize(
    ("start", "says"),
    [
        *((Progress(steps, epoch=2), f"2 epochs cannot have taken {steps} step") for steps in (1, 9)),
        (Progress(1, 0, 1, (EpochSegment(5, False, 5),)), "has 5 ranks, but can have at most 4"),  # noqa: FBT003
        (Progress(4, 0, 4, (EpochSegment(1, False, 4),)), "the next epoch has begun"),  # noqa: FBT003
    ],
)
def test_a_progress_that_four_packs_cannot_give_is_named(start, says):
    """An epoch of them has one to four steps."""
    assert says in plain_schedule(4, num_train_epochs=3, start=start).start_fault()


def test_fewer_ranks_to_the_longest_pack_are_refused_by_name():
    """A pack that 8 ranks held would take 4; whole packs are a choice, and more ranks no harm."""
    degrees = np.array([1, 1, 1, 16])

    def state(**options):
        return ResumeState.from_schedule(plain_schedule(4, **options), plan="a", data="d")

    then = state(world_size=8, degrees=degrees)
    assert [(SHARED_BY, 8, 4)] == [attrs.astuple(one) for one in then.differences(state(world_size=4, degrees=degrees))]
    for now in (then, state(world_size=16, degrees=degrees), state(world_size=4)):
        assert () == then.differences(now)
    short = [state(world_size=size, degrees=np.array([1, 1, 1, 2])) for size in (8, 2)]
    assert () == short[0].differences(short[1])
    assert () == from_plain(ResumeState, {**to_plain(then), "degree": None}).differences(then)


INPUTS = {"algorithm": "a", "packing": True}


@pytest.mark.parametrize(
    ("inputs", "now", "keys", "kind"),
    [
        ({}, {"progress": Progress(step=5)}, [], "changed_plan"),
        ({}, {"order_version": 2}, ["order_version"], "changed_order"),
        ({}, {"plan": "b"}, ["plan"], "changed_plan"),
        ({}, {"order_version": 2, "plan": "b"}, ["plan", "order_version"], "changed_order"),
        (INPUTS, {"plan": "b", "inputs": {**INPUTS, "algorithm": "b"}}, ["plan", "algorithm"], "changed_plan"),
        ({}, {"plan": "b", "inputs": INPUTS}, ["plan"], "changed_plan"),
        (INPUTS, {"inputs": {}}, [], "changed_plan"),
    ],
)
def test_a_resume_state_names_what_has_changed(inputs, now, keys, kind):
    """Inputs of the plan where both are known."""
    then = ResumeState("a", "d", 1, True, "full", 1, Progress(), inputs=inputs)  # noqa: FBT003

    differences = then.differences(attrs.evolve(then, **now))

    assert keys == [one.key for one in differences]
    assert kind == StaleError.for_plan("checkpoint-1", differences).kind


def test_ranks_share_long_packs_side_by_side():
    """Of 4 ranks, a pack of 4 lengths takes all; one of 2 takes half, and is filled up beside."""
    degrees = np.array([1, 4, 1, 2, 1, 1, 1, 1])

    schedule = plain_schedule(8, 4, degrees=degrees, shuffle=False, gradient_accumulation_steps=3)

    assert [[1, 1, 1, 1], [3, 3, 0, 2], [4, 5, 6, 7]] == schedule.order(0).reshape(3, 4).tolist()
    (step,) = schedule.steps(rank=1)
    assert (((1,), (3,), (5,)), (range(4), range(2), range(1, 2))) == (step.batches, step.ranks)


def test_a_loop_of_ones_own_sees_who_shares_a_pack():
    """`degrees` of a plan's schedule: the largest that is needed, or as many as are named."""
    plan = pp.plan([8, 8, 30, 8, 16], 8)

    shared = {degrees: plan.schedule(world_size=4, degrees=degrees, shuffle=False) for degrees in ("auto", 2, 1)}

    orders = {degrees: schedule.order(0).tolist() for degrees, schedule in shared.items()}
    assert [2, 2, 2, 2, 4, 4, 0, 1, 3, 0, 1, 3] == orders["auto"]
    assert [2, 2, 4, 4, 0, 1, 3, 0] == orders[2]
    assert [0, 1, 2, 3, 4, 0, 1, 2] == orders[1]
    assert {"auto": 4, 2: 2, 1: 1} == {degrees: schedule.most_ranks for degrees, schedule in shared.items()}
    with pytest.raises(
        ArgumentError, match=r"at most 3 ranks may share a pack, .* power of two that divides the 6 ranks"
    ):
        plan.schedule(world_size=6, degrees=3)
    with pytest.raises(ValueError, match="powers of two"):
        plain_schedule(2, 4, degrees=np.array([3, 1]))
    with pytest.raises(ValueError, match="batch_size has to be 1"):
        plain_schedule(2, 4, degrees=np.array([2, 1]), batch_size=2)


@given(shared_schedules)
def test_the_ranks_of_a_block_have_the_same_pack_in_the_same_microbatch(schedule):
    """As many as its degree, at most the largest, from a multiple of it on; every rank has one."""
    schedule = attrs.evolve(schedule, num_train_epochs=2)
    degrees = [schedule.pack_degrees(epoch) for epoch in range(2)]
    event(f"largest degree: {max(map(max, degrees))}, by work: {schedule.works is not None}")
    assert all(set(found.tolist()) <= {2**n for n in range(4)} for found in degrees)
    assert max(map(max, degrees)) <= schedule.most_ranks <= schedule.world_size
    steps = [[*schedule.steps(rank=rank)] for rank in range(schedule.world_size)]
    for of_ranks in zip(*steps, strict=True):
        for number, packs in enumerate(zip(*(step.batches for step in of_ranks), strict=True)):
            for rank, (pack,) in enumerate(packs):
                block, degree = of_ranks[rank].ranks[number], degrees[of_ranks[rank].epoch][pack]
                assert rank in block
                assert (degree, 0) == (len(block), block.start % degree)
                assert all(packs[other] == (pack,) for other in block)


@given(shared_schedules)
def test_every_pack_is_trained_once_but_for_the_remainder_of_the_smallest_degree(schedule):
    """As few slots as give all ranks as many; a larger pack only goes once no smaller is left."""
    for epoch in range(2):
        degrees, taken = schedule.pack_degrees(epoch), Counter(schedule.order(epoch).tolist())
        times = np.array([taken[pack] for pack in range(degrees.size)]) / degrees
        changed, rest = degrees[times != 1], int(degrees.sum()) % schedule.world_size
        event(f"dropped: {(times < 1).any()}, repeated: {(times > 1).any()}")
        assert (times % 1 == 0).all()
        if schedule.dataloader_drop_last:
            assert (rest, True) == (degrees[times == 0].sum(), bool((times <= 1).all()))
            assert not (degrees[times > 0] < changed.max(initial=0)).any()
        else:
            assert (-rest % schedule.world_size, True) == (taken.total() - degrees.sum(), bool((times >= 1).all()))
            assert set(changed) <= {degrees.min()}


@given(st.lists(st.sampled_from([1, 1, 1, 2, 4, 8]), max_size=400), st.sampled_from([8, 16, 24]), st.randoms())
def test_packs_of_one_degree_and_length_stand_together_where_one_was_drawn(degrees, world_size, rng):
    """
    In their order, by eight microbatches, of which the fifth decides; what is left is last. Shared
    packs are alike if tokens of their ranks are, to an eighth; without tokens all of a degree are.
    """
    degrees = np.array([*degrees, *[1] * (-sum(degrees) % world_size)], dtype=np.int64)
    event(f"shared: {(degrees > 1).any()}, groups: {degrees.sum() // world_size // 8}")
    length = rng.choice([1, 160])
    tokens = [rng.randrange(1 + degree * length // 2, 1 + degree * length) for degree in degrees.tolist()]
    tokens = np.array(tokens, dtype=np.int64)
    known = tokens if rng.random() < 0.8 else degrees
    each = np.where(degrees > 1, -(-known // degrees), 0)
    least = min(each[degrees > 1], default=1)
    places = sorted(range(degrees.size), key=lambda place: (-degrees[place], -(8 * each[place] // least)))
    slots = [place for place in places for _ in range(degrees[place])]
    microbatches = [slots[at : at + world_size] for at in range(0, len(slots), world_size)]
    groups = [microbatches[at : at + 8] for at in range(0, len(microbatches), 8)]
    left = [groups.pop()] if groups and len(groups[-1]) < 8 else []
    groups.sort(key=lambda group: group[4][0] if (degrees > 1).any() else 0)

    expected = [pack for group in groups + left for packs in group for pack in packs]
    assert expected == lay_out_slots(degrees, world_size, None if known is degrees else tokens).tolist()


@given(schedules() | shared_schedules)
def test_without_long_packs_the_order_is_the_one_of_whole_packs(schedule):
    """Bit for bit, also by work and where packs share no rank."""
    assume(schedule.batch_size == 1)
    plain = attrs.evolve(schedule, degrees=None, max_degree=None)
    fitting = attrs.evolve(plain, degrees=np.ones(plain.num_packs, dtype=np.int64))
    alone = attrs.evolve(plain, degrees=np.full(plain.num_packs, 4), max_degree=1)

    for one in (fitting, alone):
        assert trained(plain) == trained(one)


@given(schedules(shared=True), st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(0, 9)), max_size=3))
def test_an_epoch_that_goes_on_with_other_degrees_trains_each_pack_once(schedule, changes):
    """On any number of ranks, as often as it is interrupted; less than one pack a rank repeats."""
    schedule = attrs.evolve(schedule, dataloader_drop_last=False, num_train_epochs=1)
    consumed: Counter[int] = Counter()
    most_repeated = schedule.world_size - 1
    for world_size, when in changes:
        steps = [*zip(*(schedule.steps(rank=rank) for rank in range(schedule.world_size)), strict=True)]
        if len(steps) < 2:
            break
        done = steps[: 1 + when % (len(steps) - 1)]
        consumed += _times(schedule, done)
        start = from_plain(Progress, to_plain(schedule.progress_at(schedule.start.step + len(done))))
        goes_on = (world_size, largest_degree(world_size)) == (schedule.world_size, schedule.most_ranks)
        schedule = attrs.evolve(schedule, world_size=world_size, max_degree=None, start=start)
        most_repeated += 0 if goes_on else world_size - 1
        assert schedule.start_fault() is None
        assert set(consumed) == set(schedule.consumed_packs(0).tolist())
    rest = _times(schedule, [*zip(*(schedule.steps(rank=rank) for rank in range(schedule.world_size)), strict=True)])
    event(f"segments: {len(schedule.start.segments)}, largest degree: {schedule.pack_degrees(0).max()}")

    assert set(range(schedule.num_packs)) == {*consumed, *rest}
    assert (consumed + rest).total() <= schedule.num_packs + most_repeated


def _times(schedule, steps) -> Counter[int]:
    """Return how often each pack is trained in some steps of all ranks."""
    degrees = schedule.pack_degrees(0)
    slots = Counter(pack for of_ranks in steps for step in of_ranks for (pack,) in step.batches)
    assert all(not count % degrees[pack] for pack, count in slots.items())
    return Counter({pack: count // int(degrees[pack]) for pack, count in slots.items()})


def test_a_progress_of_before_degrees_is_read_and_goes_on():
    """A stored segment without `max_degree` shared no pack."""
    stored = {"step": 2, "epoch": 0, "epoch_step": 2}
    segment = {"world_size": 4, "dataloader_drop_last": False, "pack_offset": 8}

    start = from_plain(Progress, {**stored, "segments": [segment]})

    degrees = np.array([4, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1])
    schedule = plain_schedule(12, 4, shuffle=False, degrees=degrees, start=start)
    assert 1 == schedule.start.segments[0].max_degree
    assert [*range(8)] == schedule.consumed_packs(0).tolist()
    assert [9, 9, 8, 10, 11, 8, 10, 11] == schedule.order(0).tolist()


GOLDEN_ORDERS = {
    2: {
        "ranks": [[[4], [9], [7]], [[8], [3], [2]], [[0], [6], [1]], [[1], [0], [5]]],
        "second epoch": [0, 1, 2, 8, 1, 5, 3, 9, 6, 0, 4, 7],
        "resumed on other ranks": [7, 2, 5],
        "padded batches": [[[2, 5]], [[4, 1]], [[7, 0]], [[3, 6]]],
        "many packs": "64e207512a18fc84eb757dfc749a86ba1546694008d56acb1f77bcc28e4eba91",
        "equal work a step": "c2380caf4b96c645cbad8d2574794155a178d0b3eedd406e9743b0b336ae158a",
        "shared packs": "9a5847145668fca7994fbcb703ffc8db039660443fa6cecf75087a56a8461aa1",
        "shared packs by work": "aa63e32e2f89b0ecd44dd9acb1465b3416afd3063ebd808c912943b65c418c1d",
        "equal work a microbatch": "513d32426365438b2d6ede182a0d2204cdfd9b778bd49c76b11670ff34de1c7b",
    }
}
"""Orders of this `ORDER_VERSION`."""


def test_the_golden_order():
    """Under one version, which checkpoints name, the order never changes."""
    schedule = plain_schedule(10, 4, gradient_accumulation_steps=2, num_train_epochs=2, seed=42)
    padded = attrs.evolve(schedule, batch_size=2, dataloader_drop_last=True, seed=7)
    many = attrs.evolve(schedule, num_packs=1000, seed=1)
    works = np.arange(1000) ** 2 % 997
    degrees = np.array([1, 1, 1, 2, 1, 1, 1, 4, 1, 16])[np.arange(1000) ** 2 % 10]
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
                "shared packs": attrs.evolve(step, works=None, degrees=degrees),
                "shared packs by work": attrs.evolve(step, degrees=degrees),
            }.items()
        },
    }, "meant? raise ORDER_VERSION in core/schedule/schedule.py, and write its orders into GOLDEN_ORDERS"


@given(schedules(differing=True))
def test_epochs_of_their_own_are_each_the_epoch_of_a_plan(schedule):
    """An epoch's packs and steps are those of a plan that has as many packs in every epoch."""
    steps = trained(schedule)

    for epoch in range(schedule.num_epochs):
        works = None if schedule.works is None else schedule.works(epoch)
        alone = attrs.evolve(schedule, num_packs=schedule.num_packs[epoch], works=works, num_train_epochs=3)
        mine = [step for step in steps if step[0] == epoch]
        assert mine == [step for step in trained(alone) if step[0] == epoch][: len(mine)]


@given(every_schedule, st.integers(0, 9))
def test_a_schedule_prints_its_steps_and_its_packs(schedule, done):
    """Those that a resumed run has done, too, and packs that repeat or are dropped."""
    done = min(done, schedule.total_steps)
    resumed = attrs.evolve(schedule, start=schedule.progress_at(done))
    spread = schedule.packs_per_epoch - schedule.num_epoch_slots(0)
    event(f"resumed: {bool(done)}, repeats: {spread > 0}, drops: {spread < 0}, epochs differ: {schedule.epochs_differ}")

    assert repr(schedule).startswith(f"EpochSchedule({counted(schedule.total_steps, 'step')}, ")
    assert repr(schedule).endswith(f" on {counted(schedule.world_size, 'rank')})")
    assert (spread > 0, spread < 0) == tuple(
        f" {abs(spread)} {word}," in repr(schedule) for word in ("repeated", "dropped")
    )
    assert bool(done) == (f", {done} done" in repr(resumed))


@given(every_schedule, st.data())
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
    end = schedule.progress_at(len(whole))
    finished = attrs.evolve(schedule, start=end)
    assert (end, end.epoch) == (finished.progress_at(len(whole)), finished.num_epochs)
    epoch = schedule.progress_at(stop).epoch
    consumed = resumed.consumed_packs(epoch).tolist() if resumed.num_epoch_packs(epoch) else []
    assert Counter(packs_of(whole[:stop], epoch)) == Counter(consumed)


def test_what_is_left_of_a_resumed_epoch_is_counted_once(monkeypatch):
    """A trainer asks after each step, and the order of a million packs takes a second to draw."""
    whole, drawn = plain_schedule(9, 2), Mock(wraps=seeded_permutation)
    resumed = attrs.evolve(whole, world_size=3, start=whole.progress_at(2))
    monkeypatch.setattr("packplan.core.schedule.schedule.seeded_permutation", drawn)

    assert [(2, 2)] * 5 == [(resumed.num_remaining_batches(0), resumed.last_step(0) - 2) for _ in range(5)]
    drawn.assert_called_once()


@given(every_schedule, st.data())
def test_what_follows_any_number_of_batches_is_the_rest_of_the_epoch(schedule, data):
    """Also in the middle of a step, and after two interruptions; whole steps give `progress_at`."""
    schedule, epoch = attrs.evolve(schedule, works=None, num_train_epochs=3), data.draw(st.integers(0, 2))
    whole = schedule.num_remaining_batches(epoch)
    first = data.draw(st.integers(0, whole))
    start = schedule.progress_after(epoch, first)
    resumed = attrs.evolve(schedule, start=start)
    event(f"within a step: {bool(first % schedule.gradient_accumulation_steps)}")

    if first == whole:
        assert (epoch + 1, 0, ()) == (start.epoch, start.epoch_step, start.segments)
        return
    assert schedule.batches(epoch, rank=0)[first:] == resumed.batches(epoch, rank=0)
    second = data.draw(st.integers(0, whole - first))
    assert schedule.progress_after(epoch, first + second).segments == resumed.progress_after(epoch, second).segments
    if not first % schedule.gradient_accumulation_steps:
        assert start == schedule.progress_at(start.step)
