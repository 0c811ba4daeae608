"""Visits of samples: exact over any chain of runs, and carried over by the content of records."""

from __future__ import annotations

from collections import Counter, defaultdict

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from packplan.core.epochs import EpochRecipe, EpochSamples, plan_epoch, select_epoch
from packplan.core.errors import PlanError, StaleError
from packplan.core.packs import Packs
from packplan.core.policy import PlanPolicy
from packplan.core.schedule import Continuation, Progress, Visits, carry_over
from tests.strategies import pack_lists, plain_schedule


@st.composite
def visited(draw, most: int = 12) -> tuple[Visits, np.ndarray]:
    """Visits of some records, and the records, among which may be copies."""
    records = draw(st.lists(st.integers(0, 5), max_size=most))
    epoch = draw(st.lists(st.integers(0, 2), min_size=len(records), max_size=len(records)))
    earlier = draw(st.lists(st.integers(0, 2), min_size=len(records), max_size=len(records)))
    counts = np.array(epoch, dtype=np.int32)
    return Visits(counts + np.array(earlier, dtype=np.int32), counts), np.array(records, dtype=np.uint64)


resumes = st.tuples(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 1, 2]),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 5),
)
"""
Ranks, accumulation, batch size, whether packs that do not fill these are dropped, how packs are
assigned by work (0 for not at all), and steps.
"""


@given(pack_lists(), st.lists(resumes, max_size=4), st.integers(0, 3))
@example([[0], [1], [2]], [(1, 2, 2, True, 0, 5)], 0)  # the last window has one batch; a pack is dropped
def test_visits_are_those_of_all_runs_of_a_chain(lists, runs, seed):
    """
    Over resumes on other ranks, with other accumulation, at any step: each sample as often as the
    ranks' batches held it, in all epochs and in the one that goes on.
    """
    packs = Packs.from_lists(lists)
    num_records = packs.num_samples
    visits, progress = Visits.none(num_records), Progress()
    total, in_epoch = Counter(), defaultdict(Counter)
    for ranks, accumulation, batch_size, drop_last, weighs, num_steps in [*runs, (1, 1, 1, False, 0, 99)]:
        options = {"gradient_accumulation_steps": accumulation, "batch_size": batch_size, "num_train_epochs": 3}
        if weighs and batch_size == 1:
            options |= {"works": np.arange(len(packs)) % 3, "group_by_work": weighs - 1}
        drops = drop_last and len(packs) >= ranks * batch_size
        schedule = plain_schedule(len(packs), ranks, **options, dataloader_drop_last=drops, seed=seed, start=progress)
        stop = min(progress.step + num_steps, max(schedule.total_steps, progress.step))
        for rank in range(ranks):
            for step in schedule.steps(rank=rank):
                if step.number <= stop:
                    trained = [sample for batch in step.batches for pack in batch for sample in packs[pack]]
                    total.update(trained)
                    in_epoch[step.epoch].update(trained)
        last, number = schedule.at(stop), progress.step
        for epoch in range(progress.epoch, last.epoch + 1):
            steps = min(schedule.num_steps(epoch), stop - number)
            number += steps
            visits = visits.after(packs, schedule.trained(epoch, steps))
            if epoch < last.epoch:
                visits = visits.in_next_epoch()
        progress = last

        event(f"in the middle of an epoch: {bool(progress.segments)}, packs dropped: {drops}")
        assert [total[sample] for sample in range(num_records)] == visits.total.tolist()
        assert [in_epoch[progress.epoch][sample] for sample in range(num_records)] == visits.epoch.tolist()


@given(visited(), st.lists(st.integers(0, 7), max_size=12))
def test_visits_go_with_the_content_of_records(made, now):
    """
    The k-th copy has the visits of the k-th copy; new ones have none. Refused where copies that
    were visited differently have another number.
    """
    visits, before = made
    pairs = list(zip(visits.total.tolist(), visits.epoch.tolist(), strict=True))
    then = defaultdict(list)
    for record, pair in zip(before.tolist(), pairs, strict=True):
        then[record].append(pair)
    ambiguous = {
        record
        for record, copies in then.items()
        if record in now and now.count(record) != len(copies) and len({*copies}) > 1
    }
    event(f"ambiguous: {bool(ambiguous)}")
    ids = np.array(now, dtype=np.uint64)
    if ambiguous:
        with pytest.raises(StaleError, match=r"nothing tells which of them were trained") as raised:
            carry_over(visits, before=before, now=ids)
        assert before[raised.value.details["record"]] in ambiguous
        return

    carried, found = carry_over(visits, before=before, now=ids)

    expected = []
    for place, record in enumerate(now):
        copy = now[:place].count(record)
        expected.append(then[record][copy] if copy < len(then[record]) else (0, 0))
    assert expected == list(zip(carried.total.tolist(), carried.epoch.tolist(), strict=True))
    assert found == (Counter(before.tolist()) & Counter(now)).total()
    back, _ = carry_over(visits, before=before, now=before)
    assert (visits.total.tolist(), visits.epoch.tolist()) == (back.total.tolist(), back.epoch.tolist())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=20))
@example([(5, 1), (0, 0), (7, 1)])  # nothing is left
@example([(5, 0), (0, 1), (7, 0)])  # what was visited is no sample now
def test_what_is_left_and_what_was_visited_are_the_epoch(records):
    """
    As multisets, if nothing was visited more often than it is drawn; the packs have what is left.
    """
    lengths, counts = zip(*records, strict=True)
    samples, policy = EpochSamples(lengths=np.array(lengths)), PlanPolicy(packing_length=10, drop_last=False)
    visits = Visits(np.array(counts, dtype=np.int32), np.array(counts, dtype=np.int32))
    start = Continuation(checkpoint="c", state="s", step=5, epoch=2, visits=visits, num_found=1, num_gone=0, num_new=0)
    recipe = EpochRecipe.continuing(None, start)
    whole = Counter(select_epoch(EpochRecipe(), policy, samples, 2).tolist())
    assume(whole)
    done = Counter({sample: times for sample, (length, times) in enumerate(records) if length and times})

    assert Progress(step=5, epoch=2) == recipe.start
    assert (recipe.visited is None) == (not any(counts))
    assert whole == Counter(select_epoch(recipe, policy, samples, 3).tolist())
    if whole == done:
        with pytest.raises(PlanError, match=r"has trained all .* of epoch 2"):
            select_epoch(recipe, policy, samples, 2)
        return
    left = Counter(select_epoch(recipe, policy, samples, 2).tolist())
    assert whole == left + done
    assert left == Counter(plan_epoch(recipe, policy, samples, 2).raw.packs.indices.tolist())


def test_a_repeated_pack_is_visited_again():
    """Each time that it was trained counts."""
    packs = Packs.from_lists([[0, 2], [1], [3]])

    visits = Visits.none(5).after(packs, np.array([0, 1, 0]))

    assert [2, 1, 2, 0, 0] == visits.total.tolist() == visits.epoch.tolist()
    assert [0] * 5 == visits.in_next_epoch().epoch.tolist()
    assert np.int32 == attrs.evolve(visits).total.dtype
