"""Batches of packs in torch's loaders: the schedule's, and after a state those that are left."""

import copy
import itertools
import json
from typing import Any

import attrs
import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import event, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import packplan as pp
from packplan.adapters import models
from packplan.adapters.loaders.batches import EvalBatches, PackBatches
from packplan.adapters.loaders.packs import PackInputs, RowsOfPacks, flatten, refuse_other_packs
from packplan.core.errors import ArgumentError, CorruptArtefactError, MismatchError, StaleError
from packplan.core.fingerprint import Fingerprint, RunIdentity, seal, unseal
from packplan.core.schedule import EpochSchedule
from tests.hosts.pages import hosted
from tests.references import changed

pytestmark = pytest.mark.covers

PLAN = pp.plan([5, 40, 33, 60, 12, 29, 51, 8, 47, 20, 36], 64)


def schedule(world_size: int, accumulation: int = 2) -> EpochSchedule:
    return PLAN.schedule(world_size=world_size, packs_per_step=world_size * accumulation, epochs=3)


def batches_of(world_size: int, rank: int, accumulation: int = 2) -> PackBatches:
    return PackBatches(schedule(world_size, accumulation), rank, world_size, plan=PLAN.checksum)


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_an_iteration_is_an_epoch_and_the_next_one_follows(world_size, accumulation, data):
    """Of each rank; an epoch that is set is served again."""
    rank = data.draw(st.integers(0, world_size - 1))
    batches = batches_of(world_size, rank, accumulation)
    planned = schedule(world_size, accumulation)

    for epoch in range(3):
        assert len(planned.batches(epoch, rank=rank)) == len(batches)
        assert planned.batches(epoch, rank=rank) == list(batches)
    batches.set_epoch(1)
    assert planned.batches(1, rank=rank) == [batch for batch, _ in zip(batches, range(len(batches)), strict=False)]
    assert 2 == batches.epoch, "who counts its batches asks for none behind the last"
    batches.set_epoch(1)
    assert planned.batches(1, rank=rank) == list(batches)
    batches.restart()
    assert planned.batches(0, rank=rank) == list(batches)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_a_state_leaves_what_was_not_served(before, after, accumulation, data):
    """At any batch, kept as JSON, on any number of ranks; of a step, whatever was read ahead."""
    ranks = [batches_of(before, rank, accumulation) for rank in range(before)]
    served = data.draw(st.integers(0, len(ranks[0])))
    epoch = [iter(rank) for rank in ranks]
    first = [next(one)[0] for _ in range(served) for one in epoch]
    event(f"other ranks: {before != after}, in the middle: {0 < served < len(ranks[0])}")
    ahead = batches_of(before, 0, accumulation)
    list(ahead)
    if served % accumulation == 0 or served == len(ranks[0]):
        assert ahead.state_dict(step=-(-served // accumulation)) == ranks[0].state_dict()

    state = json.loads(json.dumps(ranks[0].state_dict()))
    resumed = [batches_of(after, rank, accumulation) for rank in range(after)]
    for rank in resumed:
        rank.load_state_dict(state)
    rest = [pack for rank in resumed for (pack,) in rank]

    if served == len(ranks[0]):
        assert set(range(len(PLAN.packs))) == set(rest), "the next epoch"
    else:
        assert set(range(len(PLAN.packs))) == set(first) | set(rest)
        assert before == after or set(first).isdisjoint(rest)


@given(st.integers(1, 3), st.integers(0, 5), st.data())
def test_the_rest_of_an_epoch_is_never_served_as_a_whole_one(world_size, resumed, data):
    """One that was left begins again only if it is named: at its start, or where it was loaded."""
    batches = batches_of(world_size, 0)
    batches.load_state_dict(batches.state_dict(step=min(resumed, batches.schedule.steps_per_epoch)))
    whole = batches.schedule.batches(batches.epoch, rank=0)
    served = data.draw(st.integers(1, max(1, len(whole) - 1)))
    assert served == len([*zip(range(served), batches, strict=False)])
    if served == len(whole):
        return

    with pytest.raises(ArgumentError, match=f"stopped after batch {served} of {len(whole)} in epoch {batches.epoch}"):
        list(batches)
    batches.set_epoch(batches.epoch)
    assert whole == list(batches)


@pytest.mark.parametrize("resumed", [False, True])
def test_nothing_beyond_the_schedule_is_served(resumed):
    """A fourth epoch of three, also after the state of a finished run; a step behind the last."""
    batches = batches_of(1, 0)
    for _ in range(3):
        list(batches)
    if resumed:
        batches.load_state_dict(batches.state_dict())

    with pytest.raises(ArgumentError, match="the schedule ends after 3 epochs, but the loader asks for epoch 3"):
        list(batches)
    for step in (-1, 1.5, batches.schedule.total_steps + 1):
        with pytest.raises(ArgumentError, match=f"step is {step}, but has to be"):
            batches.state_dict(step=step)


@given(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 4))
def test_evaluation_counts_each_pack_once(degrees, batch_size, world_size):
    """In as few batches as possible. The ranks of a shared pack agree whether it counts."""
    num = len(degrees)
    ranks = [EvalBatches(num, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    counted = [pack for rank in ranks for number, batch in enumerate(rank) if rank.is_counted(number) for pack in batch]
    assert [*range(num)] == sorted(counted)
    assert {-(-num // (batch_size * world_size))} == {len(rank) for rank in ranks}
    ranks = [EvalBatches(num, 1, rank=rank, world_size=4, degrees=np.array(degrees)) for rank in range(4)]

    counted = []
    for number, packs in enumerate(zip(*ranks, strict=True)):
        for rank, (pack,) in enumerate(packs):
            block = range(rank - rank % degrees[pack], rank - rank % degrees[pack] + degrees[pack])
            assert {((pack,), ranks[rank].is_counted(number))} == {
                (tuple(packs[other]), ranks[other].is_counted(number)) for other in block
            }
            counted += [pack] if rank == block.start and ranks[rank].is_counted(number) else []
    assert [*range(len(degrees))] == sorted(counted)


@pytest.mark.parametrize(
    ("words", "rank", "world_size", "given"),
    [("rank 0 of 2", 0, 2, {}), ("rank 1 of 1", 1, 1, {}), ("rank is -1", -1, 1, {}), ("rank is '0'", "0", 1, {}),
     ("plan is a Plan, .* plan.checksum", 0, 1, {"plan": PLAN}), ("data is a Plan, .*digest", 0, 1, {"data": PLAN})],
)  # fmt: skip
def test_other_ranks_than_the_schedules_and_digests_that_are_no_text_are_refused(words, rank, world_size, given):
    with pytest.raises(ArgumentError, match=words):
        PackBatches(schedule(1), rank, world_size, **given)
    with pytest.raises(ArgumentError, match="epoch is -1"):
        PackBatches(schedule(1)).set_epoch(-1)
    with pytest.raises(ArgumentError, match="flatten got no rows"):
        flatten([])


OTHER_PLAN = pp.plan(PLAN.lengths[::-1], 64)


def test_ranks_that_begin_with_other_packs_are_refused(monkeypatch):
    """By the rank that begins later; a second iteration and another group in one store are not."""
    store = dist.HashStore()
    monkeypatch.setattr(models, "has_ranks", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def begin(rank, *runs):
        monkeypatch.setattr(PackBatches, "_compared_in", None)
        for run in runs:
            plan, data, seed = ({"plan": PLAN, "data": "rows", "seed": 0} | run).values()
            list(PackBatches(plan.schedule(world_size=2, seed=seed), np.int64(rank), 2, data=data))

    begin(0, {}, {"seed": 3})
    begin(1, {})
    begin(0, {"seed": 4})  # alone
    for rank in range(2):
        begin(rank, {"seed": 5})
    for run in ({"plan": OTHER_PLAN}, {"data": "others"}, {"seed": 1}, {"plan": OTHER_PLAN, "data": "", "seed": 1}):
        names = " and another ".join({"plan": "plan", "data": "rows", "seed": "order of packs"}[name] for name in run)
        begin(0, {})
        with pytest.raises(MismatchError, match=f"^rank 1 begins with another {names} than rank 0: give all ranks"):
            begin(1, run)


def test_a_state_of_another_plan_or_run_is_refused():
    """By the names of what differs; a setting that may change is none of them."""
    identity = RunIdentity(Fingerprint({"optim": "sgd"}), Fingerprint({"max_steps": "3"}))
    state = PackBatches(schedule(1), plan=PLAN.checksum, data="these rows", identity=identity).state_dict()
    fixed = RunIdentity(identity.fixed)
    PackBatches(schedule(1), plan=PLAN.checksum, data="these rows", identity=fixed).load_state_dict(state)
    other = PackBatches(attrs.evolve(schedule(1), seed=9), plan="another", data="other rows")

    with pytest.raises(StaleError) as raised:
        other.load_state_dict(state)

    assert {"plan", "data", "seed", "optim"} == {one.key for one in raised.value.details["differences"]}
    with pytest.raises(StaleError, match="checksum of the packs was"):
        PackBatches(OTHER_PLAN.schedule()).load_state_dict(PackBatches(PLAN.schedule()).state_dict())
    PackBatches(PLAN.schedule()).load_state_dict(PackBatches(attrs.evolve(PLAN.schedule(), plan="")).state_dict())


def test_shared_packs_go_on_with_as_many_ranks_each_or_more():
    """Fewer ranks, of which each would compute more of the longest pack, are refused by name."""
    plan = pp.plan([16] * 12 + [64, 30], 16)
    on = {size: plan.schedule(world_size=size, degrees="auto") for size in (2, 4, 8)}
    served = [PackBatches(on[4], rank, 4, plan=plan.checksum) for rank in range(4)]
    consumed = {pack for batches in served for (pack,) in itertools.islice(batches, 2)}

    more = [PackBatches(on[8], rank, 8, plan=plan.checksum) for rank in range(8)]
    for batches in more:
        batches.load_state_dict(json.loads(json.dumps(served[0].state_dict())))
    left = [pack for batches in more for (pack,) in batches]
    with pytest.raises(StaleError, match="share the longest pack was 4, now 2") as raised:
        PackBatches(on[2], 0, 2, plan=plan.checksum).load_state_dict(served[0].state_dict())
    PackBatches(plan.schedule(world_size=2), 0, 2, plan=plan.checksum).load_state_dict(served[0].state_dict())

    assert "fewer_ranks" == raised.value.kind
    assert {*range(len(plan.packs))} == consumed | {*left}
    assert not consumed & {*left}


@pytest.mark.parametrize("found", [[1, 0], [0], [0, 1, 2]], ids=str)
def test_packs_that_are_not_the_schedules_are_refused(found):
    """In another order, too few or too many of a step."""
    refuse_other_packs([{"packplan_pack": 0}, {"packplan_pack": [1]}], [(0,), (1,)])

    with pytest.raises(MismatchError, match=r"the loader served .*pack.*, but the schedule has"):
        refuse_other_packs([{"packplan_pack": pack} for pack in found], [(0,), (1,)])


IN_THE_MIDDLE = batches_of(2, 0).state_dict(step=schedule(2).steps_per_epoch + 1)  # a step of the second epoch


def test_no_changed_state_is_loaded():
    """Whatever number, text or key of it."""
    state = json.loads(json.dumps(IN_THE_MIDDLE))
    batches_of(1, 0).load_state_dict(state)

    for other in (None, *changed(state)):
        with pytest.raises(
            CorruptArtefactError, match=r"the saved progress is damaged: .*load the dict that state_dict"
        ):
            batches_of(1, 0).load_state_dict(other)


@pytest.mark.parametrize(
    "numbers",
    [
        {"segments": []}, {"epoch": 99}, {"epoch": 0}, {"step": -1}, {"step": 1000}, {"epoch_step": 3},
        {"pack_offset": 0}, {"pack_offset": 3}, {"pack_offset": 10**9}, {"pack_offset": -2}, {"world_size": 0},
        {"world_size": 3}, {"world_size": 10**9, "pack_offset": 0, "epoch_step": 0},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_contradict_each_other_are_refused(numbers):
    """Also in a state that a program wrote with their digest."""
    state = copy.deepcopy(unseal(IN_THE_MIDDLE))
    (segment,) = state["progress"]["segments"]
    for name, number in numbers.items():
        (segment if name in segment else state["progress"])[name] = number

    with pytest.raises(CorruptArtefactError, match="the saved progress is damaged"):
        batches_of(1, 0).load_state_dict(seal(state))


def loader_of(kind: Any, batches: PackBatches, workers: int) -> Any:
    rows = [{"input_ids": list(range(length))} for length in PLAN.lengths.tolist()]
    return kind(RowsOfPacks(rows, PLAN), batch_sampler=batches, collate_fn=PackInputs(), num_workers=workers)


def packs_of(loader: Any) -> list[int]:
    return [batch["packplan_pack"] for batch in loader]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_serves_the_schedule(workers):
    """Epoch by epoch."""
    loader = loader_of(DataLoader, batches_of(2, 1), workers)
    for epoch in range(2):
        assert [pack for (pack,) in schedule(2).batches(epoch, rank=1)] == packs_of(loader)


@hosted
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 3])
def test_a_stateful_loader_goes_on_where_it_was(workers, taken):
    """At any batch, whatever its workers have read ahead; then follows the next epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    planned = [[pack for (pack,) in schedule(1).batches(epoch, rank=0)] for epoch in range(2)]
    loader = loader_of(StatefulDataLoader, batches_of(1, 0), workers)
    epoch = iter(loader)
    first = [next(epoch)["packplan_pack"] for _ in range(taken)]
    state = loader.state_dict()
    del epoch

    resumed = loader_of(StatefulDataLoader, batches_of(1, 0), workers)
    resumed.load_state_dict(state)

    assert planned[0] == first + packs_of(resumed)
    assert planned[1] == packs_of(resumed)
