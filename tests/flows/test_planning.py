"""Measuring and planning a split, over doubles: what is measured, kept, planned again, compared."""

import logging
import re
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.app.planning.audit import COMPARED_TOKENS, REPEATED_FIRST_ABOVE, REPEATED_SAMPLES
from packplan.app.planning.log_lines import log_run, plan_warnings
from packplan.app.planning.measure import MAX_KNOWN_BETWEEN, merge_known
from packplan.app.planning.plan import Ranks
from packplan.app.planning.schedule import schedule_of_split
from packplan.app.planning.split import KnownTable, align_options
from packplan.core.config.identity import plan_policy
from packplan.core.errors import LINE_WIDTH, ArgumentError, DataSetError, MismatchError, RecordError, StaleError
from packplan.core.plan import build_raw_plan
from packplan.core.policy import Part
from packplan.core.samples.tables import KnownLengths, column, identity_with_media, to_tables
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.vision import VisionWork
from tests.documents import parsed
from tests.fakes import UNSTEADY, GuessingSource, ListSource, OddSource, ScriptedGroup
from tests.flows.desk import LENGTHS, Desk, masked

pytestmark = pytest.mark.covers


def test_a_later_run_measures_and_plans_what_is_new_alone():
    """Some samples are compared; other ranks align the same plan; appended rows are measured."""
    desk = Desk()
    first = desk.plan()
    desk.source.measured.clear()

    second = desk.plan()

    assert [7, 6, 5, 4, 3, 2, 1, 0] == desk.source.measured
    assert ([8], 1) == (desk.lengths.flushes, desk.plans.saves)
    assert (first.raw, first.checksum) == (second.raw, second.checksum)
    assert build_raw_plan(LENGTHS, packing_length=80, min_fill_ratio="0.65") == first.raw

    desk.group = ScriptedGroup(world_size=4)
    four = desk.plan()
    assert (1, [1, 1, 4]) == (desk.plans.saves, desk.plans.aligned)
    assert first.raw_checksum == four.raw_checksum
    assert 0 == len(four.aligned.packs) % 4

    desk.source = ListSource([*LENGTHS, 33, 44])
    more = desk.plan()
    assert [8, 9] == desk.source.measured[:2]
    assert build_raw_plan([*LENGTHS, 33, 44], packing_length=80, min_fill_ratio="0.65") == more.raw


def test_packs_of_equal_work_are_planned_from_what_was_measured():
    """Lengths and patches by the model's sizes; another model's work plans again."""
    work, lengths = WorkModel(per_position=10, per_pair=1, vision=VisionWork(100, 1, 0, 0)), [*range(5, 45)]
    desk = Desk(source=ListSource(lengths))
    planned = desk.plan(algorithm="balanced", work=work)
    media = {name: column(planned.table, name) for name in ("images", "patches")}
    works = SampleWorks.from_lengths(work, lengths, **media).flops

    assert build_raw_plan(lengths, packing_length=80, algorithm="balanced", works=works) == planned.raw
    assert build_raw_plan(lengths, packing_length=80, algorithm="balanced").packs != planned.raw.packs
    assert planned.raw_checksum == desk.plan(algorithm="balanced", work=work).raw_checksum
    assert 1 == desk.plans.saves
    desk.plan(algorithm="balanced", work=work.trained())
    assert 2 == desk.plans.saves


def test_a_share_of_the_records_is_planned_for_the_evaluation_alone():
    """Under the indices of the data; bad records are in neither part."""
    desk, options = Desk(source=ListSource([5, -1, *range(6, 44)])), {"max_bad_share": Decimal(1), "drop_last": False}
    parts = [Part(val_share="0.25", seed=1, held_out=held_out) for held_out in (False, True)]

    train, held_out = (desk.plan(part=part, **options).raw for part in parts)

    assert [0, *range(2, 40)] == sorted([*train.packs.indices, *held_out.packs.indices])
    assert {*held_out.packs.indices} == {*np.flatnonzero(parts[1].selects(40))} - {1}
    assert 39 == train.num_samples + held_out.num_samples


def test_a_limit_of_images_counts_the_images_that_were_measured():
    """Of records that are samples; a pack with as many counts as full. Without it, one pack."""
    desk = Desk(source=ListSource([5, -1, *[5] * 14]))  # one image each

    limited = desk.plan(max_images=3, max_bad_share=Decimal("0.1"))

    assert [3] * 5 == limited.raw.packs.sizes().tolist()
    assert [0, *range(2, 16)] == sorted(limited.raw.packs.indices)
    assert 1 == len(desk.plan(max_bad_share=Decimal("0.1")).raw.packs)
    assert 2 == desk.plans.saves


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (ListSource(LENGTHS, name="other"), "name was 'data', now 'other'"),
        (
            ListSource([61, *LENGTHS[1:]]),
            r"first 8 records\) was(.|\n)*1 of 8 records is new or changed, the first is data, line 1\n",
        ),
    ],
    ids=["another source", "a changed row"],
)
def test_other_data_in_the_same_folder_are_refused(source, says):
    """Before anything is measured: no stale length is trusted."""
    desk = Desk()
    desk.plan()
    desk.source = source

    with pytest.raises(StaleError, match=says):
        desk.plan()
    desk.source.record_heads = pytest.fail  # not read if none are stored
    desk.lengths.record_heads = lambda: np.zeros(0, np.int64)
    with pytest.raises(StaleError):
        desk.plan()
    assert [] == desk.source.measured


@given(st.integers(0, 7), st.integers(1, 9))
def test_what_was_measured_before_a_failure_is_kept(bad, flush_every):
    """After the record is fixed, only it and what follows is measured."""
    desk = Desk(ListSource([*LENGTHS[:bad], -1, *LENGTHS[bad + 1 :]]))
    with pytest.raises(RecordError, match=f"line {bad + 1}"):
        desk.plan(flush_every=flush_every)
    assert not desk.source.is_measuring, "processes would go on measuring"
    desk.source = ListSource(LENGTHS)

    table = desk.plan(flush_every=flush_every).table

    assert list(range(bad, 8)) == desk.source.measured[: 8 - bad]
    assert LENGTHS == table[:, 0].tolist()
    assert all(0 < size <= flush_every for size in desk.lengths.flushes)


@pytest.mark.parametrize("more", [*UNSTEADY.values(), lambda source, *_: source.is_measuring], ids=[*UNSTEADY, "all"])
def test_samples_that_measure_differently_are_refused(more):
    """Such a plan would be wrong in training; the next run does not trust them either."""
    desk = Desk(OddSource(LENGTHS, more))

    for flush_every in (1, 3, 8, 100):
        with pytest.raises(DataSetError, match="encode the same every time: make the preprocessing deterministic"):
            desk.plan(flush_every=flush_every)
        assert desk.lengths.stored().repeatability is None


def test_lengths_measured_but_not_checked_are_checked_by_the_next_run():
    """An interrupted run's rows are complete by chance when the data is cut to them."""
    desk = Desk(ListSource([*LENGTHS[:6], -1]))
    with pytest.raises(RecordError):
        desk.plan()
    desk.source = OddSource(LENGTHS[:6], UNSTEADY["epoch"])

    with pytest.raises(DataSetError, match="epoch 1"):
        desk.plan()
    desk.source = ListSource(LENGTHS[:6])
    desk.plan()
    assert list(range(5, -1, -1)) == desk.lengths.stored().repeatability["samples"]
    assert not desk.lock.is_held


@pytest.mark.parametrize("known", [0, 8])
@pytest.mark.parametrize("unsteady", UNSTEADY)
def test_many_samples_are_not_measured_when_a_few_measure_differently(unsteady, known):
    """The few that are encoded first are all that is encoded; nothing more is stored."""
    lengths = LENGTHS * 1000
    desk = Desk(ListSource(lengths[:known]))
    if known:
        desk.plan()
    desk.source = OddSource(lengths, UNSTEADY[unsteady])
    desk.source.differs = known

    with pytest.raises(DataSetError, match="encode the same every time"):
        desk.plan()

    assert len(set(desk.source.measured)) <= REPEATED_SAMPLES
    assert len(desk.source.measured) <= 2 * REPEATED_SAMPLES
    assert known == sum(desk.lengths.flushes)


@pytest.mark.parametrize(("drifted", "world_size"), [(0, 1), (57, 3), (399, 1)])
def test_stored_lengths_are_not_trusted_when_samples_encode_to_others(drifted, world_size):
    """The first that differs is named with both; nothing is planned, measured or lost."""
    desk = Desk(ListSource(LENGTHS * 50), group=ScriptedGroup(world_size=world_size))
    desk.plan()
    desk.source = OddSource(LENGTHS * 50, lambda _, index, __: index == drifted)
    length = LENGTHS[drifted % 8]

    says = rf"sample {drifted} .* as stored: length was {length}, now {length + 1}.* another training.output_dir"
    with pytest.raises(DataSetError, match=says):
        desk.plan(packing_length=90)

    assert (desk.plans.saves, [256, 144]) == (1, desk.lengths.flushes)
    assert desk.source.measured == sorted(desk.source.measured, reverse=True)
    assert len(desk.source.measured) <= REPEATED_SAMPLES
    assert [] == desk.source.elsewhere, "no process is started"


@pytest.mark.parametrize(("length", "num"), [(100, REPEATED_SAMPLES), (COMPARED_TOKENS // 3 - 50, 3), (10_000_000, 1)])
def test_what_is_compared_at_a_start_is_little_however_long_samples_are(length, num):
    """So many as have a few tokens together, the shortest first, and one at least."""
    desk = Desk(ListSource([length] * 14 + [length // 2] + [length] * 85))
    desk.plan()
    desk.source.measured.clear()
    desk.plan()
    assert (num, True) == (len(desk.source.measured), 14 in desk.source.measured)


@pytest.mark.parametrize("left", [REPEATED_FIRST_ABOVE, REPEATED_FIRST_ABOVE + 1])
def test_some_samples_are_encoded_again_before_many_are_measured(left):
    """Forwards and backwards here, and elsewhere in a third order."""
    desk = Desk(ListSource([7] * 10))
    desk.plan()
    desk.source, desk.group = ListSource([7] * (10 + left)), ScriptedGroup(hear=(said := []).append)
    desk.plan()

    stages = [f"1 of {10 + left} train samples", "encoded again", "planning train"]
    for stage in [*stages, "more than once"] if left > REPEATED_FIRST_ABOVE else stages:
        assert any(stage in line for line in said), stage
    again = desk.source.measured[: desk.source.measured.index(11)]
    few = again[:REPEATED_SAMPLES] if left > REPEATED_FIRST_ABOVE else []
    assert [*few, *few[::-1], *few[::2], *few[1::2], 10] == again
    assert few == sorted(set(few))
    assert [] == few or (10, 10 + left - 1) == (few[0], few[-1])


def test_an_image_replaced_after_measuring_is_found_at_the_next_start():
    """Before anything is planned, with what changed, by a sample of all data."""
    desk = Desk(ListSource(LENGTHS * 100))
    desk.plan()
    desk.source.image_bytes = 1001

    with pytest.raises(StaleError, match=r"image 0 of sample 0 .* num_bytes was 1000, now 1001"):
        desk.plan()
    assert REPEATED_SAMPLES == len(desk.lengths.stored().repeatability["samples"])


@given(st.booleans(), st.none() | st.integers(0, 7), st.integers(0, 7), st.integers(1, 9))
def test_a_shortcut_that_is_wrong_is_given_up(audits, bad, wrong, flush_every):
    """At the end, or on the way: all is encoded in full then, also after an interruption."""
    desk = Desk(GuessingSource(LENGTHS, wrong=wrong, audits=audits))
    desk.source.bad, ways = bad, [False, True]
    if bad is not None:
        with pytest.raises(RecordError):
            desk.plan(flush_every=flush_every)
        # What shows that the shortcut is wrong may lie in what is measured already.
        desk.source.bad, desk.source.wrong = None, 7
        ways += [True] if bad else desk.source.ways[2:]

    table = desk.plan(flush_every=flush_every).table

    assert bad == 0 or ways == desk.source.ways
    assert LENGTHS == table[:, 0].tolist() == desk.lengths.inspect().tokens.tolist()
    assert desk.lengths.stored().in_full


def test_the_first_image_of_each_shape_is_audited():
    """A shortcut that is wrong for one panorama of hundreds is found; bad records count once."""
    desk = Desk(GuessingSource([-1, *LENGTHS * 100], wrong=333))
    desk.source.widths = {333: 4000}

    table = desk.plan(max_bad_share=1).table

    assert ([False, True], [0]) == (desk.source.ways, [one.index for one in desk.lengths.bad_records()])
    assert [0, *LENGTHS * 100] == table[:, 0].tolist()


def test_a_source_without_samples_is_refused_before_anything_is_stored():
    """Not even a lock is taken."""
    desk = Desk(ListSource([]))

    with pytest.raises(ArgumentError, match="the data set is empty"):
        desk.plan()
    assert ([], None) == (desk.lock.waits, desk.lengths.inspect())


def test_training_and_evaluation_share_one_deadline():
    """Later waits lack what one took; for ever stays for ever; what is late asks once."""
    now = iter([100, 103, 104, 109, 109.5, 120, 130])
    ranks = Ranks(group := ScriptedGroup(), timeout_s=10, clock=lambda: next(now))
    desks = [Desk(), Desk(), Desk()]

    for desk in desks:
        desk.plan(ranks)

    waits = [wait for desk in desks for wait in desk.lock.waits]
    assert ([7, 1], [6, 0.5]) == (group.waits[:2], waits[:2])
    assert all(0 < wait < 0.1 for wait in (group.waits[2], waits[2]))

    (for_ever := Desk()).plan(Ranks(for_ever.group, timeout_s=0, clock=iter([0]).__next__))
    assert ([0], [0]) == (for_ever.group.waits, for_ever.lock.waits)


@pytest.mark.parametrize("agreed", range(3))
def test_ranks_that_disagree_stop_the_run(agreed):
    """On the plan, on what lengths depend on, or on the data."""
    said = iter([True] * agreed)
    group = ScriptedGroup(world_size=2, others=lambda value: value if next(said, None) else f"not {value}")

    with pytest.raises(MismatchError, match=r"rank 0: .*; rank 1: not "):
        Desk(group=group).plan()


@pytest.mark.parametrize(
    ("source", "options", "kind", "allowed"),
    [
        (ListSource([*LENGTHS, 95]), {"refuse_longer": True}, "too_long", {"refuse_longer": False}),
        (ListSource(LENGTHS), {"packing": False, "dataloader_drop_last": True, "batch_size": 9}, "too_short",
         {"dataloader_drop_last": False}),
        (ListSource([60] * 6 + [40, 40, 80]), {"min_fill_ratio": "0.8"}, "dropped_tokens", {"max_dropped_share": "1"}),
        (masked(range(8)), {"drop_last": False}, "unsupervised", {"name": "eval"}),
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
    planned = Desk(masked({2, 3, 7})).plan(drop_last=False)
    alone = Desk(masked(range(8))).plan(name="eval", drop_last=False)

    assert (True, False) == (planned.is_supervised, alone.is_supervised)
    (line,), (left_out,) = ([line for line in plan_warnings(of) if "no supervised" in line] for of in (planned, alone))
    assert re.fullmatch("3 planned samples have .*: 2..3, 7", line)
    assert left_out.endswith(", so training leaves the evaluation out")


def start_of(caplog, *splits) -> tuple[dict[str, str], list[str]]:
    """Return the rows of the table at the start of a run of splits, and its warnings."""
    config = parsed(packing=splits[0].policy.packing, gradient_accumulation_steps=2, effective_batch_size=None)
    with caplog.at_level(logging.INFO):
        log_run(config, splits, schedule_of_split(config, "train", splits[0].aligned))
    table, *warnings = caplog.messages
    assert max(map(len, table.splitlines())) <= LINE_WIDTH
    title, *rows = re.sub(r"\n {5,}", " ", table).splitlines()
    assert "run.yaml:" == title
    return dict(row.strip().split("  ", 1) for row in rows), warnings


@pytest.mark.parametrize(("algorithm", "says"), [("constant_volume", 1), ("auto", 0), ("concatenative", 0)])
def test_the_log_says_how_many_packs_auto_needs_where_that_saves_some(caplog, algorithm, says):
    planned = Desk(ListSource([25, 19, 15, 8, 9])).plan(packing_length=40, algorithm=algorithm, min_fill_ratio="0")

    rows, _ = start_of(caplog, planned)

    assert ["training.packing_algorithm: auto needs about 2 packs"] * says == [
        text.strip() for name, text in rows.items() if name == "better"
    ]


@pytest.mark.parametrize(
    ("masked", "world_size", "options", "expected"),
    [
        ({6, 9}, 5, {"drop_last": False}, {
            "data": "11 704", "packs": "8 80 0.8859", "long": "4 200", "supervised": "9 1.3%",
            "ranks": "8 5 2 0..1", "training": "1 3 5 10 2",
            "warnings": ["2 2 6 9", "2 10 200 80 6 8..10", "2 89 long"]}),
        ({0}, 2, {"allow_single_long": False, "dataloader_drop_last": True}, {
            "data": "11 704", "packs": "3 80 1.0000", "left out": "4 80 457 1 7 0.99% 1", "supervised": "5 2.1%",
            "ranks": "3 2 1", "training": "1 3 2 4 2",
            "warnings": ["1 1 0", "1 2", "1 60", "4 36.36% 457 64.91% 80 6 8..10", "1 2 1"]}),
        ((), 1, {"drop_last": False}, {
            "data": "11 704", "packs": "8 80 0.8859", "long": "4 200", "supervised": "11 1.6%",
            "ranks": "8 1", "training": "4 12 1 2", "warnings": ["2 10 200 80 6 8..10"]}),
        ((), 3, {"packing": False, "batch_size": 1}, {
            "data": "11 704", "supervised": "11 1.6%", "ranks": "11 3 1 0", "training": "2 6 3 6 2"}),
    ],
)  # fmt: skip
def test_a_run_starts_with_one_table_of_its_numbers(caplog, masked, world_size, options, expected):
    """Samples, packs, repeated, truncated, long, skipped and dropped ones; at most 15 lines."""
    source = ListSource([*LENGTHS, 88, 89, 200])
    source.masked = masked
    planned = Desk(source, group=ScriptedGroup(world_size=world_size)).plan(**options)

    rows, warnings = start_of(caplog, planned)

    def numbers(text):
        return " ".join(re.findall(r"\d+(?:\.+\d+)?%?|\blong\b", text))

    assert len(rows) <= 14
    assert planned.raw_checksum[:12] == rows.pop("plan").strip()
    assert expected == {name: numbers(text) for name, text in rows.items() if numbers(text)} | (
        {"warnings": [numbers(line) for line in warnings]} if warnings else {}
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("eval_packing", [True, False])
def test_a_run_says_how_its_splits_are_aligned(packing, eval_packing):
    """Packs go one at a time, padded batches as the run says; evaluation never drops."""
    config = parsed(
        packing=packing, eval_packing=eval_packing, dataloader_drop_last=True, per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
    )  # fmt: skip

    packs_eval = packing and eval_packing
    assert [
        ({"dataloader_drop_last": True, "batch_size": 1 if packing else 2}, packing, True),
        ({"dataloader_drop_last": False, "batch_size": 1 if packs_eval else 3}, packs_eval, False),
    ] == [
        (align_options(config, split), plan_policy(config, split).packing, plan_policy(config, split).drop_last)
        for split in ("train", "eval")
    ]


EVERYTHING = list(range(200))


def table_of(source) -> KnownTable:
    """Return a table of the measured records of a source."""
    rows, media = to_tables(source.measure_many(range(len(source)), in_full=False))
    identities = [identity_with_media(*source.digest_and_folder(index)) for index in range(len(rows))]
    known = KnownLengths(np.array([one.encode() for one in identities], "S64"), rows, media)
    return KnownTable("table", lambda: known)


def measured(source, known=None):
    """Measure a source as a run does; return its table and its media."""
    desk = Desk(source)
    desk.measure(known=known)
    return desk.lengths.stored()


@given(
    known=st.lists(st.sampled_from(EVERYTHING), unique=True),
    asked=st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=150),
    start=st.integers(0, 5),
)
def test_only_what_a_table_lacks_is_measured_and_the_result_is_the_same(known, asked, start):
    """In any order, with records twice; known ones are measured only close to unknown ones."""
    source = ListSource(asked)
    indices = range(min(start, len(asked) - 1), len(asked))

    found = list(merge_known(source, indices, table_of(ListSource(known))))

    unknown = [index for index in indices if asked[index] not in known]
    event(f"unknown {bool(unknown)}, of all {len(unknown) == len(indices)}")
    assert found == list(ListSource(asked).measure_many(indices, in_full=False))
    assert set(unknown) <= set(source.measured)
    assert all(min(abs(index - one) for one in unknown) <= MAX_KNOWN_BETWEEN for index in source.measured)


def test_a_run_that_a_table_knows_encodes_some_samples_to_audit_it():
    """And stores what it would have measured."""
    source = ListSource(EVERYTHING)

    stored = measured(source, table_of(ListSource(EVERYTHING[::-1])))

    alone = measured(ListSource(EVERYTHING))
    assert (stored.table.tolist(), stored.media.tolist()) == (alone.table.tolist(), alone.media.tolist())
    assert stored.repeatability == alone.repeatability
    assert 0 < len(set(source.measured)) < 40


def test_a_table_that_is_wrong_is_not_believed():
    """A sample that encodes otherwise has all samples encoded in full, and the table not asked."""
    source = GuessingSource(EVERYTHING, wrong=-1)

    stored = measured(source, table_of(GuessingSource(EVERYTHING, wrong=0)))

    assert stored.in_full
    assert EVERYTHING == stored.table[:, 0].tolist()
    assert [True] == source.ways


def test_processes_that_measure_end_where_the_records_are_not_all_asked_for():
    """Closing closes the source's own generator."""
    source = ListSource(EVERYTHING)
    outcomes = merge_known(source, range(10), table_of(ListSource([1])))
    next(outcomes)
    assert source.is_measuring
    outcomes.close()
    assert not source.is_measuring
