"""Measuring and planning a split, over doubles: what is measured, kept, planned again, compared."""

import logging

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.app.planning.log_lines import describe, log_plan
from packplan.app.planning.measure import REPEATED_SAMPLES
from packplan.app.planning.plan import Ranks
from packplan.app.planning.split import alignment
from packplan.core.config.identity import plan_policy
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.errors import (
    ArgumentError,
    CorruptArtefactError,
    DataSetError,
    MismatchError,
    RecordError,
    StaleError,
)
from packplan.core.plan import build_raw_plan
from packplan.core.samples.tables import column
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.vision import VisionWork
from tests.fakes import (
    UNSTEADY,
    FailingSource,
    GuessingSource,
    ListSource,
    OddSource,
    ScriptedGroup,
    TornPlanStore,
)
from tests.flows.desk import LENGTHS, Desk

pytestmark = pytest.mark.covers


def test_a_second_run_measures_and_plans_nothing():
    """Warm: a few samples are compared with what is stored, and the same plan comes back."""
    desk = Desk()
    first = desk.plan()
    desk.source.measured.clear()

    second = desk.plan()

    assert [7, 6, 5, 4, 3, 2, 1, 0] == desk.source.measured
    assert [8] == desk.lengths.flushes
    assert 1 == desk.plans.saves
    assert (first.raw, first.checksum) == (second.raw, second.checksum)
    assert build_raw_plan(LENGTHS, packing_length=80, min_fill_ratio="0.65") == first.raw


def test_packs_of_equal_work_are_planned_from_what_was_measured():
    """Lengths and patches by the model's sizes; another model's work plans again."""
    work = WorkModel(per_position=10, per_pair=1, vision=VisionWork(100, 1, 0, 0))
    desk = Desk()
    planned = desk.plan(algorithm="balanced", work=work)
    table = planned.table
    works = SampleWorks.from_lengths(
        work, LENGTHS, images=column(table, "images"), patches=column(table, "patches")
    ).flops

    assert build_raw_plan(LENGTHS, packing_length=80, algorithm="balanced", works=works) == planned.raw
    assert planned.raw_checksum == desk.plan(algorithm="balanced", work=work).raw_checksum
    assert 1 == desk.plans.saves
    desk.plan(algorithm="balanced", work=work.trained())
    assert 2 == desk.plans.saves


def test_another_world_size_never_plans_anew():
    """It aligns the same raw plan."""
    desk = Desk()
    one = desk.plan()
    desk.group = ScriptedGroup(world_size=4)

    four = desk.plan()

    assert 1 == desk.plans.saves
    assert [1, 4] == desk.plans.aligned
    assert one.raw_checksum == four.raw_checksum
    assert 0 == len(four.aligned.packs) % 4


@pytest.mark.parametrize(
    ("source", "says"),
    [(ListSource(LENGTHS, name="other"), "name: stored 'data', now 'other'"), (ListSource([61, *LENGTHS[1:]]), "data")],
    ids=["another source", "a changed row"],
)
def test_other_data_in_the_same_folder_are_refused(source, says):
    """Before anything is measured: no stale length is trusted."""
    desk = Desk()
    desk.plan()
    desk.source = source

    with pytest.raises(StaleError, match=says):
        desk.plan()
    assert [] == desk.source.measured


def test_appended_rows_alone_are_measured():
    """And the plan is made again, since its lengths are others."""
    desk = Desk()
    desk.plan()
    desk.source = ListSource([*LENGTHS, 33, 44])

    planned = desk.plan()

    assert [8, 9] == desk.source.measured[:2]
    assert build_raw_plan([*LENGTHS, 33, 44], packing_length=80, min_fill_ratio="0.65") == planned.raw


@given(st.integers(0, 7), st.integers(1, 9))
def test_what_was_measured_before_a_failure_is_kept(bad, flush_every):
    """After the record is fixed, only it and what follows is measured."""
    desk = Desk(FailingSource(LENGTHS, bad={bad, 7}))
    with pytest.raises(RecordError, match=f"line {bad + 1}"):
        desk.plan(flush_every=flush_every)
    assert not desk.source.is_measuring, "processes would go on measuring"
    desk.source.bad = set()
    desk.source.measured.clear()

    table = desk.plan(flush_every=flush_every).table

    assert list(range(bad, 8)) == desk.source.measured[: 8 - bad]
    assert LENGTHS == table[:, 0].tolist()
    assert all(0 < size <= flush_every for size in desk.lengths.flushes)


@pytest.mark.parametrize("unsteady", UNSTEADY)
def test_samples_that_measure_differently_are_refused(unsteady):
    """Such a plan would be wrong in training; the next run does not trust them either."""
    desk = Desk(OddSource(LENGTHS, UNSTEADY[unsteady]))

    for flush_every in (1, 3, 8, 100):
        with pytest.raises(DataSetError, match="encode the same every time: make the preprocessing deterministic"):
            desk.plan(flush_every=flush_every)
        assert desk.lengths.stored().repeatability is None


def test_lengths_measured_but_not_checked_are_checked_by_the_next_run():
    """An interrupted run's rows are complete by chance when the data is cut to them."""
    desk = Desk(FailingSource(LENGTHS, bad={6}))
    with pytest.raises(RecordError):
        desk.plan()
    desk.source = OddSource(LENGTHS[:6], UNSTEADY["epoch"])

    with pytest.raises(DataSetError, match="epoch 1"):
        desk.plan()
    desk.source = ListSource(LENGTHS[:6])
    desk.plan()
    assert list(range(5, -1, -1)) == desk.lengths.stored().repeatability["samples"]
    assert not desk.lock.is_held


def test_an_image_replaced_after_measuring_is_found_at_the_next_start():
    """Before anything is planned, with what changed, by a sample of all data."""
    desk = Desk(ListSource(LENGTHS * 100))
    desk.plan()
    desk.source.image_bytes = 1001

    with pytest.raises(StaleError, match=r"image 0 of sample 0 .* num_bytes: stored 1000, now 1001"):
        desk.plan()
    assert REPEATED_SAMPLES == len(desk.lengths.stored().repeatability["samples"])


@given(st.booleans(), st.integers(0, 7), st.integers(1, 9))
def test_a_shortcut_that_is_wrong_is_given_up(audits, wrong, flush_every):
    """At the end, or on the way: all is encoded in full then, and nothing else stays."""
    desk = Desk(GuessingSource(LENGTHS, wrong=wrong, audits=audits))

    table = desk.plan(flush_every=flush_every).table

    assert [False, True] == desk.source.ways
    assert LENGTHS == table[:, 0].tolist() == desk.lengths.inspect().tokens.tolist()
    assert desk.lengths.stored().in_full


@given(st.integers(0, 7), st.integers(1, 9))
def test_measuring_in_full_that_was_interrupted_goes_on_in_full(bad, flush_every):
    """What shows that the shortcut is wrong may lie in what is measured already."""
    desk = Desk(GuessingSource(LENGTHS, wrong=0))
    desk.source.bad = bad
    with pytest.raises(RecordError):
        desk.plan(flush_every=flush_every)
    desk.source.bad, desk.source.wrong = None, 7

    table = desk.plan(flush_every=flush_every).table

    assert LENGTHS == table[:, 0].tolist()
    assert bad == 0 or [False, True, True] == desk.source.ways
    assert desk.lengths.stored().in_full


def test_the_first_image_of_each_shape_is_audited():
    """A shortcut that is wrong for one panorama among hundreds is found."""
    desk = Desk(GuessingSource(LENGTHS * 100, wrong=333))
    desk.source.widths = {333: 4000}

    table = desk.plan().table

    assert [False, True] == desk.source.ways
    assert LENGTHS * 100 == table[:, 0].tolist()


def test_a_source_without_samples_is_refused_before_anything_is_stored():
    """Not even a lock is taken."""
    desk = Desk(ListSource([]))

    with pytest.raises(ArgumentError, match="the data set is empty"):
        desk.plan()
    assert [] == desk.lock.waits
    assert desk.lengths.inspect() is None


def test_training_and_evaluation_share_one_deadline():
    """Later waits lack what one took; for ever stays for ever; what is late asks once."""
    now = iter([100, 103, 104, 109, 109.5, 120, 130])
    ranks = Ranks(group := ScriptedGroup(), timeout_s=10, clock=lambda: next(now))
    desks = [Desk(), Desk(), Desk()]

    for desk in desks:
        desk.plan(ranks)

    waits = [wait for desk in desks for wait in desk.lock.waits]
    assert [7, 1] == group.waits[:2]
    assert [6, 0.5] == waits[:2]
    assert all(0 < wait < 0.1 for wait in (group.waits[2], waits[2]))

    (for_ever := Desk()).plan(Ranks(for_ever.group, timeout_s=0, clock=iter([0]).__next__))
    assert ([0], [0]) == (for_ever.group.waits, for_ever.lock.waits)


def test_a_damaged_plan_is_never_used():
    with pytest.raises(CorruptArtefactError, match="torn"):
        Desk(plans=TornPlanStore()).plan()


def test_ranks_that_disagree_stop_the_run():
    group = ScriptedGroup(world_size=2, others=lambda value: f"not {value}")

    with pytest.raises(MismatchError, match=r"the train plan's checksum: rank 0: .*; rank 1: not "):
        Desk(group=group).plan()


UNMATCHED = [60] * 6 + [40, 40, 80]
"""At 80 tokens a pack and a ratio of 0.8, six packs of one sample each are dropped."""


class MaskedSource(ListSource):
    """Samples of which some have no supervised token, since they were truncated."""

    masked = frozenset(range(len(LENGTHS)))

    def measure(self, index, **_):
        measured = super().measure(index)
        return attrs.evolve(measured, supervised=0, cut=True) if index in self.masked else measured


@pytest.mark.parametrize(
    ("source", "options", "kind", "allowed"),
    [
        (ListSource([*LENGTHS, 95]), {"refuse_longer": True}, "too_long", {"refuse_longer": False}),
        (ListSource(LENGTHS), {"packing": False, "dataloader_drop_last": True, "batch_size": 9}, "too_short",
         {"dataloader_drop_last": False}),
        (ListSource(UNMATCHED), {"min_fill_ratio": "0.8"}, "dropped_tokens", {"max_dropped_share": "1"}),
        (MaskedSource(LENGTHS), {"drop_last": False}, "unsupervised", {"name": "eval"}),
    ],
)  # fmt: skip
def test_what_training_refuses_is_refused_where_it_is_planned(source, options, kind, allowed):
    """New or stored; nothing is said to be aligned. What allows it plans nothing again."""
    desk = Desk(source)

    for _ in range(2):
        with pytest.raises(ArgumentError) as raised:
            desk.plan(**options)
        assert kind == raised.value.kind
    assert [] == desk.plans.aligned

    assert desk.plan(**options | allowed).aligned
    assert desk.plans.saves <= 1


def test_samples_that_teach_nothing_are_counted():
    """An evaluation of them alone is planned, and said to be left out."""
    some = MaskedSource(LENGTHS)
    some.masked = {2, 3, 7}

    planned, alone = Desk(some).plan(drop_last=False), Desk(MaskedSource(LENGTHS)).plan(name="eval", drop_last=False)

    assert (True, False) == (planned.is_supervised, alone.is_supervised)
    (line,), (left_out,) = ([line for _, line in describe(of) if "no supervised" in line] for of in (planned, alone))
    assert line.startswith("3 planned samples have")
    assert line.endswith(": 2..3, 7")
    assert left_out.endswith(", so training leaves the evaluation out")


@pytest.mark.parametrize(("algorithm", "says"), [("constant_volume", 1), ("auto", 0), ("concatenative", 0)])
def test_the_log_says_how_many_packs_auto_needs_where_that_saves_some(caplog, algorithm, says):
    planned = Desk(ListSource([25, 19, 15, 8, 9])).plan(packing_length=40, algorithm=algorithm, min_fill_ratio="0")

    with caplog.at_level(logging.INFO):
        log_plan(planned)
    lines = [line for line in caplog.messages if "auto" in line]

    assert ["train: training.packing_algorithm: auto needs at most 2 packs instead of 3"] * says == lines


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("eval_packing", [True, False])
def test_a_run_says_how_its_splits_are_aligned(packing, eval_packing):
    """Packs go one at a time, padded batches as the run says; evaluation never drops."""
    training = TrainingConfig(
        output_dir="o", packing=packing, eval_packing=eval_packing, dataloader_drop_last=True,
        per_device_train_batch_size=2, per_device_eval_batch_size=3,
    )  # fmt: skip
    config = RunConfig(
        model=ModelConfig(model="m"), template=TemplateConfig(max_length=8), custom=CustomConfig(train_jsonl=("t",)),
        training=training,
    )  # fmt: skip

    packs_eval = packing and eval_packing
    assert [
        ({"dataloader_drop_last": True, "batch_size": 1 if packing else 2}, packing, True),
        ({"dataloader_drop_last": False, "batch_size": 1 if packs_eval else 3}, packs_eval, False),
    ] == [
        (alignment(config, split), plan_policy(config, split).packing, plan_policy(config, split).drop_last)
        for split in ("train", "eval")
    ]
