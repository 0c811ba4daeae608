"""Epochs with plans of their own follow from a recipe and the epoch, and are counted exactly."""

import hashlib
import math
from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from packplan.core.epochs import (
    MOST_EPOCHS,
    EpochRecipe,
    RecordLengths,
    epoch_selection,
    plan_epoch,
    plan_fingerprint,
    record_epoch,
    schedule_epochs,
)
from packplan.core.errors import ArgumentError
from packplan.core.mixes import Mix, Mixes, Source, measured_mixes_faults
from packplan.core.packs import plan_checksum
from packplan.core.plan import build_raw_plan
from packplan.core.policy import PlanPolicy
from tests.strategies import plain_schedule

PACKING_LENGTH = 50


@st.composite
def recipes(draw) -> tuple[EpochRecipe, PlanPolicy, RecordLengths]:
    """Recipes with a curriculum of up to three mixes, or with none; some records are no samples."""
    sizes = draw(st.lists(st.integers(4, 20), min_size=1, max_size=3))
    lengths = np.array(draw(st.lists(st.sampled_from([0, *range(5, 61)]), min_size=sum(sizes), max_size=sum(sizes))))
    policy = PlanPolicy(
        packing_length=PACKING_LENGTH, allow_single_long=draw(st.booleans()), min_fill_ratio="0.1",
        replanned=draw(st.booleans()),
    )  # fmt: skip
    samples = RecordLengths(lengths=lengths, sizes=tuple(sizes))
    fields = {"ratio": st.sampled_from(["1", "3", "0.5"]).map(Decimal), "replacement": st.booleans()}
    sources = st.tuples(*(st.builds(Source, jsonl=st.just(f"s{number}"), **fields) for number in range(len(sizes))))
    mix = st.builds(Mix, sources=sources, by=st.sampled_from(["samples", "tokens"]))
    mixes = draw(st.none() | st.lists(mix, min_size=1, max_size=3).map(tuple).map(Mixes))
    if mixes:
        lengths = samples.drawable_lengths(policy)
        assume(not list(measured_mixes_faults(mixes, lengths, samples.sizes, len(mixes.entries))))
    assume(samples.drawable_lengths(policy).any())
    return EpochRecipe(mixes=mixes, seed=draw(st.integers(0, 3))), policy, samples


def recorder(recipe, policy, samples):
    """Return a function that plans an epoch, and returns its record."""
    return lambda epoch: record_epoch(plan_epoch(recipe, policy, samples, epoch), samples)


@given(recipes(), st.permutations(range(4)))
def test_plans_follow_from_the_recipe_and_the_epoch_alone(made, epochs):
    """In any order, with the same record, which counts what was drawn."""
    recipe, policy, samples = made
    event(f"a mix: {recipe.mixes is not None}")
    plans = {epoch: plan_epoch(recipe, policy, samples, epoch) for epoch in range(4)}

    for epoch in epochs:
        again = plan_epoch(recipe, policy, samples, epoch, quick_bound=True)
        assert again.raw.packs == plans[epoch].raw.packs
        assert record_epoch(again, samples) == record_epoch(plans[epoch], samples)
    for epoch, planned in plans.items():
        plan = planned.raw
        chosen = epoch_selection(recipe, policy, samples, epoch)
        record = record_epoch(planned, samples)
        assert (chosen.size, samples.lengths[chosen].sum()) == (record.num_samples, record.num_tokens)
        drawn = (sum(record.source_samples), sum(record.source_tokens))
        assert drawn == ((record.num_samples, record.num_tokens) if len(samples.sizes) > 1 else (0, 0))
        assert hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest() == record.selection
        assert plan_checksum(plan.packs) == record.checksum
        if recipe.mixes is None:
            alone = build_raw_plan(samples.lengths[samples.lengths > 0], policy, epoch=epoch)
            assert alone.with_indices(np.flatnonzero(samples.lengths)).packs == plan.packs
        elif not policy.allow_single_long:
            assert not plan.skipped_long


@given(
    recipes(),
    st.sampled_from([1, 2.5, 3, 0.5]),
    st.sampled_from([-1, 1, 5, 9]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
def test_all_steps_are_counted_before_the_first(made, epochs, max_steps, ranks, accumulation, data):  # noqa: PLR0917
    """As many epochs are planned as are trained, also after a resume at any step."""
    record, counts = recorder(*made), {"num_train_epochs": epochs, "max_steps": max_steps}
    schedule = plain_schedule(1, ranks, gradient_accumulation_steps=accumulation, **counts)

    whole, records = schedule_epochs(schedule, record)

    packs = [one.num_packs for one in records]
    assert packs == list(whole.num_packs)
    per_epoch = [math.ceil(math.ceil(num / ranks) / accumulation) for num in packs]
    if max_steps > 0:
        assert sum(per_epoch[:-1]) < max_steps <= sum(per_epoch)
    else:
        assert math.ceil(epochs) == len(records)
        share = Fraction(str(epochs)) - (len(records) - 1)
        assert sum(per_epoch[:-1]) + math.ceil(per_epoch[-1] * share) == whole.total_steps
    steps = list(whole.steps())
    assert whole.total_steps == len(steps)
    stop = data.draw(st.integers(0, len(steps)))
    resumed, again = schedule_epochs(attrs.evolve(schedule, start=whole.progress_at(stop)), record)
    assert records == again[: len(records)]
    assert steps[stop:] == list(resumed.steps())


def test_a_resume_beyond_fewer_epochs_knows_the_epoch_it_is_in():
    """Nothing is left where the run now ends before the checkpoint. Endless runs are refused."""
    record = recorder(EpochRecipe(), PlanPolicy(packing_length=10), RecordLengths(lengths=np.array([6, 6, 6])))
    schedule = plain_schedule(9, 1, num_train_epochs=3)
    whole, _ = schedule_epochs(schedule, record)
    fewer = attrs.evolve(schedule, num_train_epochs=1, start=whole.progress_at(4))
    resumed, records = schedule_epochs(fewer, record)

    assert (2, 4, []) == (len(records), resumed.total_steps, list(resumed.steps()))
    one = record(0)
    last = MOST_EPOCHS * 3
    with pytest.raises(ArgumentError, match=f"the first {MOST_EPOCHS:,} epochs end at optimizer step {last:,}, and"):
        schedule_epochs(attrs.evolve(schedule, max_steps=last + 1), lambda _: one)
    assert MOST_EPOCHS == len(schedule_epochs(attrs.evolve(schedule, max_steps=last), lambda _: one)[1])
    assert 2 == len(schedule_epochs(attrs.evolve(schedule, max_steps=4), record)[1])


def test_epochs_that_cannot_be_trained_are_refused():
    """Far too many before they are planned; one without a pack for each rank before any step."""
    with pytest.raises(ArgumentError) as caught:
        schedule_epochs(plain_schedule(9, 1, num_train_epochs=MOST_EPOCHS + 0.5), pytest.fail)
    assert "too_many_epochs" == caught.value.kind
    record = recorder(EpochRecipe(), PlanPolicy(packing_length=10), RecordLengths(lengths=np.array([6, 6, 6])))
    with pytest.raises(ArgumentError, match=r"^epoch 0: ") as caught:
        schedule_epochs(plain_schedule(9, 4, dataloader_drop_last=True), record)
    assert "too_short" == caught.value.kind


def test_works_are_those_of_the_samples_that_are_drawn():
    """An algorithm that packs by work gets the works of the epoch's samples, in their order."""
    works, lengths = np.arange(40)[::-1] ** 2.0, np.where(np.arange(40) % 3, 0, np.arange(1, 41))
    policy = PlanPolicy(packing_length=60, algorithm="balanced", min_fill_ratio="0")

    plan = plan_epoch(EpochRecipe(), policy, RecordLengths(lengths=lengths, works=works), 0).raw

    alone = build_raw_plan(lengths[::3], policy, works=works[::3])
    assert alone.with_indices(np.arange(0, 40, 3)).packs == plan.packs


def test_golden_epochs():
    """Of a curriculum by tokens, packed again in each; no process or hash seed changes them."""
    sources = (Source(jsonl="b", ratio=Decimal("0.7")), Source(jsonl="a", ratio=Decimal("0.3"), replacement=True))
    mixes = Mixes((Mix(sources=sources, by="tokens"), Mix(sources=sources)))
    policy = PlanPolicy(packing_length=PACKING_LENGTH, replanned=True, seed=5)
    samples = RecordLengths(lengths=np.arange(400) * 7 % 60 + 1, sizes=(150, 250))

    record = recorder(EpochRecipe(mixes=mixes, seed=3), policy, samples)

    found = [record(epoch).checksum[:12] for epoch in range(3)]
    assert ["d17b23dd545d", "dcecaef8ea28", "3df42733beac"] == found, "meant? as test_golden_draws"


def test_the_key_of_plans_knows_files_by_their_places():
    """Their paths may change; what is drawn of them may not."""
    sources = [Source(jsonl=name, count=count) for name, count in (("a", 1), ("b", 1), ("a", 2))]
    drawn = [EpochRecipe(mixes=Mixes((Mix(sources=(one,)),))) for one in sources]
    cases = [None, EpochRecipe(), *drawn, attrs.evolve(drawn[0], seed=1)]

    found = [plan_fingerprint(one, PlanPolicy(packing_length=9), "d").digest for one in cases]

    assert found[2] == found[3]
    assert 5 == len({*found})
    assert ["mixes", "seed"] == [one.name for one in attrs.fields(EpochRecipe)], "another is for fingerprint_inputs too"
