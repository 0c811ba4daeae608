"""Laws of `core.surface`: a plan of lengths, its table, and the steps of its schedules."""

import inspect
import math
import tomllib
from fractions import Fraction
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st

import packplan as pp
from packplan.app.__main__ import main
from packplan.core.errors import ArgumentError
from tests.strategies import raw_lengths

DEFAULTS = {
    "EpochSchedule": {"batch_size": 1, "max_steps": -1, "seed": 0, "shuffle": True, "sync_at": "step", "plan": ""},
    "PlanPolicy": {
        "packing": True, "algorithm": "constant_volume", "min_fill_ratio": "0", "drop_last": True, "seed": 0,
        "allow_single_long": True, "max_dropped_share": "0.01", "refuse_longer": False, "replanned": False},
    "schedule": {
        "world_size": 1, "epochs": 1, "drop_last": False, "max_steps": -1, "seed": 0, "shuffle": True, "degrees": 1},
    "plan": {
        "algorithm": "auto", "allow_single_long": True, "refuse_longer": False, "drop_last": True,
        "min_fill_ratio": "0", "max_dropped_share": "0.01", "packing": True, "replanned": False, "seed": 0},
    "WorkModel": {"per_chunk": 0}, "AlignedPlan": {"max_degree": 1}, "RawPlan": {"auto_packs": 0},
    "align_plan": {"dataloader_drop_last": False, "batch_size": 1}, "cu_seqlens": {"pad_to_multiple_of": 1},
    "build_raw_plan": {"epoch": 0, "quick_bound": False}, "lower_bound": {"effort": math.inf},
    "pack": {"algorithm": "constant_volume", "seed": 0, "min_bin_count": 1, "bin_count_multiple": 1},
    "ArgumentError": {"fact": ""}, "padded_length": {"tp_size": 1}, "resolve_accumulation": {"forced_batch_size": 1},
    "shard_dynamic": {"sequence_length_round": 1, "when_long": "error"},
    "shard_packed": {
        "sequence_length_pad_multiple": 1, "algorithm": "modified_first_fit_decreasing",
        "when_long": "error", "seed": 0, "sync_at": "microbatch"},
}  # fmt: skip


def test_an_argument_that_is_left_out_has_the_same_value_as_ever():
    """Another one would plan otherwise for all who do not set it."""
    calls = {"schedule": pp.Plan.schedule} | {one: getattr(pp, one) for one in pp.__all__ if one != "ALGORITHMS"}
    for name, call in calls.items():
        defaults = {key: one.default for key, one in inspect.signature(call).parameters.items()}
        plain = {key: value for key, value in defaults.items() if isinstance(value, str | int | float)}
        assert DEFAULTS.get(name, {}) == plain


def test_packs_are_taken_in_every_form_that_people_have_them():
    """Lists, tuples, arrays, packs and plans give the same; for others, what to hand is named."""
    lengths, wanted = [60, 20, 50, 30, 40, 40], [[0, 1], [2, 3], [4, 5]]
    plan = pp.plan(lengths, 80)
    forms = [wanted, tuple(map(tuple, wanted)), np.array(wanted), [*map(np.array, wanted)], plan.packs, plan.raw, plan]

    for packs in forms:
        assert plan.checksum == pp.plan_checksum(packs)
        assert wanted == pp.align_plan(packs, world_size=1).packs
        assert 3 == pp.packing_metrics(lengths, packs, capacity=80).num_packs == len(packs)
        assert wanted[0] == list(packs[0])
        assert [wanted[0]] == [list(pack) for pack in packs[:1]]
    assert pp.plan_checksum(wanted, lengths=lengths) == pp.plan_checksum(plan, lengths=np.array(lengths))
    for bad in (lengths, 3, None):
        for call in (pp.plan_checksum, lambda bad: pp.align_plan(bad, world_size=1),
                     lambda bad: pp.packing_metrics(lengths, bad, capacity=80)):  # fmt: skip
            with pytest.raises(
                ArgumentError, match="packs have to be lists of sample indices, a Packs, a Plan or a RawPlan, not"
            ):
                call(bad)


def test_no_array_of_a_plan_or_of_what_comes_from_it_can_be_changed():
    """Neither by its caller, who may go on with the array of lengths, nor in the plan."""
    lengths = np.array([60, 20, 50, 30, 90, 40])
    plan = pp.plan(lengths, 80)
    sharding = pp.shard_packed(lengths, shards=2, batch_size=6, max_tokens_per_microbatch=90)
    lengths[:] = 1

    assert repr(pp.plan([60, 20, 50, 30, 90, 40], 80).show()) == repr(plan.show())
    shared, (batch, *_) = plan.schedule(world_size=2, degrees="auto"), sharding.shard(0)
    for one in (plan, plan.packs, shared, sharding, batch):
        arrays = [value for name in attrs.fields_dict(type(one)) if isinstance(value := getattr(one, name), np.ndarray)]
        assert {False} == {array.flags.writeable for array in arrays}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({name: "no"}, f"{name} is 'no', but has to be True or False")
          for name in ("packing", "refuse_longer", "allow_single_long", "drop_last", "replanned")),
        ({"images": [1, 1]}, "images decide"), ({"images": [1, 1], "max_images": 2**63 - 1}, "too many for a pa"),
        ({"images": [1, -1], "max_images": 2}, "count 1 is -1: a count"), ({"work": "x"}, "has to be a WorkModel"),
        ({"work": pp.WorkModel(1, 3)}, "works do not change the packs of auto: use algorithm='balanced'"),
        ({"algorithm": ["auto"]}, "algorithm is .'auto'., but has to be one of"),
    ],
)  # fmt: skip
def test_no_option_is_misread_or_ignored(options, says):
    """Texts are no flags, and an option that decides nothing is refused."""
    with pytest.raises(ArgumentError, match=says):
        pp.plan([60, 20], 80, **options)
    for name in ("shuffle", "drop_last"):
        with pytest.raises(ArgumentError, match=f"{name} is 'no', but has to be True or False"):
            pp.plan([60, 20], 80).schedule(**{name: "no"})
    with pytest.raises(ArgumentError, match="packing_length=80"):  # as people write it who know other packers
        pp.build_raw_plan([1, 2], 80)
    works, lengths = (
        ({"algorithm": "balanced", "work": pp.WorkModel(*one)} for one in ((0, 1), (1, 0))),
        range(1, 400, 7),
    )
    assert 2 == len({pp.plan(lengths, 400, **one).checksum for one in works})


def test_a_ratio_may_be_a_fraction():
    """It counts as the decimal of the same value; the fingerprint has it as it is written."""
    options = {"lengths": [60, 35, 60, 20], "packing_length": 100, "max_dropped_share": Fraction(1)}
    half = pp.plan(**options, min_fill_ratio=Fraction(3, 5))

    assert pp.plan(**options, min_fill_ratio="0.6").raw == half.raw
    assert "1/3" == pp.PlanPolicy(packing_length=9, min_fill_ratio=Fraction(1, 3)).min_fill_ratio
    with pytest.raises(ArgumentError, match="min_fill_ratio is 4/3, but has to be from 0 to 1"):
        pp.PlanPolicy(packing_length=9, min_fill_ratio=Fraction(4, 3))


def test_options_of_plan_are_those_of_a_policy():
    """By name, type and default, so that completion shows them; `auto` alone is another default."""
    policy = {field.name: field.default for field in attrs.fields(pp.PlanPolicy)}
    options = {name: one.default for name, one in inspect.signature(pp.plan).parameters.items()}

    assert {"lengths", "images"} == options.keys() - policy.keys()
    assert {"part"} == policy.keys() - options.keys(), "a plan of given lengths takes all of them"
    assert {"algorithm"} == {name for name in options.keys() & policy.keys() if name != "packing_length"
                             and options[name] != policy[name]}  # fmt: skip
    with pytest.raises(TypeError, match="unexpected keyword argument 'fill'"):
        pp.plan([1], 2, fill=1)


def test_the_package_has_a_version_and_shows_its_surface_alone(capsys):
    """As its metadata and its command have it; `dir` lists what a user may call."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    with pytest.raises(SystemExit):
        main(["--version"])

    assert project["version"] == pp.__version__
    assert f"packplan {pp.__version__}\n" == capsys.readouterr().out
    assert sorted([*pp.__all__, "__version__"]) == dir(pp)


@given(case=raw_lengths(), skips=st.booleans())
@example(case=([85, 20], 80), skips=False)
def test_a_table_has_the_figures_and_a_page_draws_the_packs(case, skips):
    """The page holds the table's values, and one bar for each drawn sample and pack."""
    lengths, packing_length = case
    try:
        plan = pp.plan(lengths, packing_length, allow_single_long=not skips)
    except ArgumentError:
        reject()
    table = plan.show()
    event(f"skipped: {bool(plan.raw.skipped_long)}, long: {bool(plan.raw.single_long)}")

    text, page = repr(table), table._repr_html_()

    options = {"packing_length": packing_length, "algorithm": "auto", "allow_single_long": not skips}
    assert plan.raw == pp.build_raw_plan(lengths, **options)
    assert plan.checksum == pp.plan_checksum(plan.packs)
    of_packs = [(len(own), sum(lengths[index] for index in own)) for own in plan.packs.tolist()]
    tokens = sum(min(packing_length, load) for _, load in of_packs)
    longest = max(load for _, load in of_packs)
    expected = {
        "num_samples": f"{len(lengths):,}",
        "num_packs": f"{len(of_packs):,}",
        "samples_per_pack": f"{sum(size for size, _ in of_packs) / len(of_packs):.2f}",
        "longest_pack": f"{longest:,}",
        "long_samples": f"{0 if skips else sum(one >= packing_length for one in lengths):,}",
        "skipped_samples": f"{skips * sum(one >= packing_length for one in lengths):,}",
        "fill_mean": f"{tokens / packing_length / len(of_packs):.4f}",
        "checksum": plan.checksum[:12],
    }
    shown = {figure.key: figure.value for figure in table.figures}
    assert {key: shown.get(key, "0") for key in expected} == expected
    assert {"checksum"} == shown.keys() - {field.name for field in attrs.fields(type(plan.summary))}
    assert all(f"{one.name}  " in text and one.remark in text for one in table.figures)
    assert f"no plan has fewer than {plan.raw.lower_bound:,}" in text
    assert plan._repr_html_() == page
    assert all(f"<td>{one.value}</td>" in page for one in table.figures)
    assert ("skipped" in text) == bool(plan.raw.skipped_long)
    assert page.count("<rect") == sum(1 + len(pack) for pack in plan.packs[:24])
    assert f"{len(plan.packs):,} pack" in repr(plan)


@example(lengths=[60, 35, 60, 20, 60, 10])
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=30))
def test_no_option_of_planning_is_ignored(lengths):
    """Samples that are too long and packs that are dropped are refused if an option says so."""
    limit = max(lengths) - 1
    assume(limit >= 1)
    with pytest.raises(pp.ArgumentError, match=r"a pack holds .* \(packing_length\)"):
        pp.plan(lengths, limit, refuse_longer=True)

    try:
        found = pp.plan(lengths, 100, min_fill_ratio="0.9", max_dropped_share=1)
    except ArgumentError:  # no pack is as full
        reject()
    if len(found.raw.dropped_packs) > 1:
        event("packs are dropped")
        assert f"in {len(found.raw.dropped_packs)} underfilled packs" in repr(found.show())
        with pytest.raises(pp.ArgumentError):
            pp.plan(lengths, 100, min_fill_ratio="0.9", max_dropped_share=0)
