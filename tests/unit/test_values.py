"""Errors, measurements and isolation: small values that others rely on."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from typing import get_args, get_type_hints

import attrs
import numpy as np
import pytest

from packplan.adapters.loaders.batches import PackBatches
from packplan.core import errors
from packplan.core.align import align_plan
from packplan.core.batch import resolve_accumulation
from packplan.core.config import with_remedy
from packplan.core.epochs import EpochRecord, with_epochs
from packplan.core.equality import PackingVerdict, ProbeResult, choose_attention, trials
from packplan.core.errors import Difference, Fault, ModelError, PackplanError, agree, counted
from packplan.core.lengths import checked_works
from packplan.core.packers import pack
from packplan.core.plan import build_raw_plan, refuse_dropped, refuse_longer, refuse_unsupervised
from packplan.core.policy import PlanPolicy
from packplan.core.samples import COLUMNS, Measurement, column, from_row, to_row
from packplan.core.schedule import EpochSchedule
from packplan.core.shard import shard_packed, shard_plain
from packplan.core.surface import plan

DISAGREES = re.compile(
    r"(?<![\d.,])1 (?:[a-z]+ )?(?:samples|packs|ranks|tokens|sequences|workers|findings|faults|batches)\b.{0,40}"
)

ERRORS = (
    errors.ConfigError("run.yaml", (Fault("a.b", "is wrong"), Fault("", "at all"))),
    errors.RecordError("data, line 7", "is broken", "fix it"),
    errors.DataSetError("the data hold no record"),
    errors.ArgumentError("length", "length 3 is -1", {"index": 3, "value": -1}),
    errors.PlanError("too_short", "1 pack cannot feed 8 ranks", {"num_packs": 1, "world_size": 8}),
    errors.ModelError.isolation("llama", "auto", "it says so"),
    errors.StaleError.lengths("runs", (Difference("key", 1, 2),)),
    errors.NotBuiltError("runs", "holds no plan"),
    errors.OutputError("runs", "No space left on device"),
    errors.RunError("rank_gone", "rank 1 is gone"),
    errors.MismatchError("unsound", "3 findings"),
    errors.ProofError("leak", "sample 1 depends on sample 0", {"samples": (1, 0)}),
    errors.CorruptArtefactError("runs/plan.npy", "it is missing"),
)
"""One of each class."""

CLASSES = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PackplanError)}


def test_there_is_an_example_of_every_class():
    """Only the three that are never raised have none; the package's docstring draws them all."""
    assert CLASSES - {type(error) for error in ERRORS} == {PackplanError, errors.UserError, errors.VerificationError}
    assert all(cls.__name__ in errors.__doc__ for cls in CLASSES)
    assert "there is no sample" == str(PackplanError("there is no sample"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_say_something(error):
    """Between processes, with all fields and the same text."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes

    assert str(error) == str(again)
    assert (type(error), attrs.astuple(error)) == (type(again), attrs.astuple(again))
    assert len(str(error)) > 5


def test_a_noun_agrees_with_its_number():
    """Whatever it ends with."""
    assert ["1 pack", "0 packs", "2,000 batches"] == [counted(1, "pack"), counted(0, "pack"), counted(2000, "batch")]
    assert ("is", "are", "has", "have") == (agree(1), agree(0), agree(1, "has", "have"), agree(2, "has", "have"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_error_prints_at_length_what_it_quotes(error):
    """A path, a value or a list as long as data can make it; the ends of the text stay."""
    long = "x" * 20_000
    texts = {field.name: long for field in attrs.fields(type(error)) if isinstance(getattr(error, field.name), str)}
    if isinstance(error, errors.ConfigError):
        texts["faults"] = (Fault("a.b", long),) * 200

    lines = str(attrs.evolve(error, **texts)).split("\n")

    assert len(lines) <= errors.MAX_LINES
    assert all(len(line) <= errors.MAX_LINE for line in lines)


SCHEDULE = EpochSchedule(
    num_packs=1, world_size=1, dataloader_drop_last=False, gradient_accumulation_steps=1, num_train_epochs=1
)
EPOCH = EpochRecord(
    epoch=0, selection="", checksum="", num_samples=1, num_tokens=1, num_packs=2, planned_samples=1, planned_tokens=1,
    fill=1.0,
)  # fmt: skip
ARGUMENTS = {
    "length": lambda: pack([9], capacity=8, algorithm="best_fit_decreasing"),
    "works": lambda: checked_works([1.0, -1.0], 2),
    "ranks": lambda: PackBatches(plan([9], 16).schedule(), 0, 2),
    "too_few_samples": lambda: pack([1], capacity=8, algorithm="best_fit_decreasing", min_bin_count=2),
    "over_budget": lambda: shard_packed([9], shards=1, batch_size=1, max_tokens_per_microbatch=8),
    "uneven_shards": lambda: shard_plain([1, 2, 3], shards=2, batch_size=3),
    "batch": lambda: shard_plain([], shards=1, batch_size=1),
    "batch_size": lambda: resolve_accumulation(
        effective_batch_size=3, per_device_train_batch_size=1, gradient_accumulation_steps=1, world_size=2
    ),
    "empty": lambda: build_raw_plan([], packing_length=8),
    "all_skipped": lambda: build_raw_plan([9], packing_length=8, allow_single_long=False),
    "all_dropped": lambda: build_raw_plan([1], packing_length=8, min_fill_ratio="0.65"),
    "dropped_tokens": lambda: refuse_dropped(
        build_raw_plan([51, 51, 90], packing_length=100, min_fill_ratio="0.6"),
        [51, 51, 90],
        PlanPolicy(packing_length=100, min_fill_ratio="0.6"),
    ),
    "too_long": lambda: refuse_longer([9], PlanPolicy(packing_length=8, refuse_longer=True)),
    "unsupervised": lambda: refuse_unsupervised(build_raw_plan([5], packing_length=8), [0]),
    "too_many_epochs": lambda: with_epochs(
        attrs.evolve(SCHEDULE, max_steps=10**6), lambda epoch: attrs.evolve(EPOCH, epoch=epoch)
    ),
    "too_short": lambda: align_plan(build_raw_plan([8], packing_length=9), world_size=2, dataloader_drop_last=True),
}
"""
Kind of an error about an argument -> a call that raises it; tests of losses have the one left.
"""


@pytest.mark.parametrize(("kind", "call"), ARGUMENTS.items())
def test_errors_about_arguments_are_value_errors(kind, call):
    """
    For whoever calls a function, as for any library; nouns and verbs agree with numbers, and the
    remedy fits into the text.
    """
    with pytest.raises(ValueError, match=r"\w") as raised:
        call()

    error = raised.value
    assert isinstance(error, errors.ArgumentError)
    assert kind == error.kind
    assert [] == DISAGREES.findall(with_remedy(error))


def test_every_kind_of_argument_has_a_call():
    """But for a loss that needs the whole batch, and what trainers and batches of others raise."""
    assert {*ARGUMENTS, "whole_batch_loss", "host", "packed_batch"} == set(
        get_args(get_type_hints(errors.ArgumentError)["kind"])
    )
    assert {errors.ArgumentError, errors.PlanError} == {cls for cls in CLASSES if issubclass(cls, ValueError)}


def test_an_error_that_is_raised_in_several_places_has_its_kind():
    """A sample that changed, or its copy; a worker that died."""
    changed = (Difference("length", 1, 2),)
    assert "changed_sample" == errors.StaleError.sample(3, "data, line 7", changed).kind
    copied = errors.StaleError.sample(3, "data, line 7", changed, copy="runs/records")
    assert ("changed_copy", True) == (copied.kind, "delete runs/records" in str(copied))
    assert {"worker": 1, "method": "train"} == errors.RunError.worker(1, "train", "it died").details


def test_a_remedy_names_a_key_with_its_value():
    """Numbers of the error are in it; a text of several lines gets another one; some have none."""
    with pytest.raises(errors.PlanError) as raised:
        ARGUMENTS["too_long"]()
    assert with_remedy(raised.value).endswith("; raise template.max_length to 9")
    assert with_remedy(errors.StaleError.lengths("runs", (Difference("key", 1, 2),))).split("\n")[2].startswith("  use")
    assert with_remedy(errors.ModelError.isolation("llama", "sdpa", "why")).endswith("; set model.attn_impl: auto")
    assert with_remedy(errors.ModelError.isolation("llama", "auto", "why")).endswith("; set training.packing: false")
    assert "1 finding" == with_remedy(errors.MismatchError("unsound", "1 finding"))


def test_a_shortened_text_says_how_much_is_left_out():
    """Its beginning and its end are there; what is short is as it was."""
    found = errors.shortened("the image " + "x" * 75_852 + " does not exist: name another")

    assert errors.MAX_LINE == len(found)
    assert found.startswith("the image xxx")
    assert "… 75,891 characters …" in found
    assert found.endswith("xxx does not exist: name another")
    assert "as it was" == errors.shortened("as it was")
    lines = errors.shortened("\n".join(map(str, range(1000)))).split("\n")
    assert ["0", "1"] == lines[:2]
    assert ["  … 941 more lines …", "998", "999"] == lines[-3:]
    assert errors.MAX_LINES == len(lines)


PASSED = ProbeResult(0, 3e-7)


def test_measurements_survive_the_table():
    """Row by row; columns by name."""
    rows = [Measurement(9, 4, 2, 64), Measurement(5, 5, 0, 0, cut=True)]
    table = np.array([to_row(row) for row in rows], dtype=np.int32)

    assert rows == [from_row(table, index) for index in range(2)]
    assert [9, 5] == column(table, "length").tolist()
    assert len(COLUMNS) == table.shape[1]
    assert ("images", 2, 1) == attrs.astuple(rows[0].differences(attrs.evolve(rows[0], images=1))[0])


def verdict(strategy="varlen", attention="varlen", native="sdpa", split=(), measured=PASSED, **fields):
    """A verdict that passes, unless its strategy is None."""
    plain = {"native": native, "split": split, "follows_rows": False, "measured": measured, "reason": "it says so"}
    return PackingVerdict("llama", strategy, attention, **plain, **fields)


FLASH = {"flash_installed": True}

ON_CPU = {"on_cpu": True}


@pytest.mark.parametrize(
    ("attn_impl", "verdict", "options", "name", "why", "leak"),
    [
        ("auto", verdict(), {}, "varlen", "llama was shown to pack by it", None),
        ("auto", verdict(split=("Mixer",)), {}, "varlen", "llama was shown to pack by it", None),
        ("auto", None, ON_CPU, "sdpa", "is auto", None),
        ("auto", verdict(None, native="eager"), {}, "eager", "may not share packs: it says so", "it says so"),
        ("varlen", verdict(), {}, "varlen", "names it", None),
        ("sdpa", verdict("own", "sdpa"), {}, "sdpa", "names it", None),
        ("sdpa", verdict(None), {}, "sdpa", "may not share packs: it says so", "it says so"),
        ("eager", None, {}, "eager", "names it", None),
        ("flash_attention_2", None, {}, "flash_attention_2", "names it", "flash-attn is not installed"),
        ("flash_attention_2", None, FLASH | ON_CPU, "flash_attention_2", "names it", "on a GPU alone"),
        ("flash_attention_2", None, FLASH, "flash_attention_2", "names it", None),
        ("flex_attention", None, ON_CPU, "flex_attention", "names it", "no backward pass on a CPU"),
        ("flex_attention", None, {}, "flex_attention", "names it", None),
    ],
)
def test_auto_takes_what_the_model_was_shown_to_pack_by(*, attn_impl, verdict, options, name, why, leak):
    """
    What is named is taken as it is; the reason says why. What cannot train here, or may not pack,
    says so.
    """
    found = choose_attention(attn_impl, verdict, **{"flash_installed": False, "on_cpu": False, **options})

    assert (name, verdict) == (found.name, found.verdict)
    assert why in found.why
    assert f"{name}: {found.why}" == str(found)
    assert (found.native if name == "varlen" else name) == found.backend
    assert found.leak is None if leak is None else leak in found.leak


def test_varlen_by_name_is_refused_where_it_does_not_run():
    """The message has its name and the reason."""
    with pytest.raises(errors.ModelError, match=r"attn_impl varlen .*it says so") as raised:
        choose_attention("varlen", verdict(None))
    assert "attention" == raised.value.kind
    assert "llama may not pack under attn_impl sdpa: why" == str(ModelError.isolation("llama", "sdpa", "why"))


@pytest.mark.parametrize("measured", [ProbeResult(0.25, 1e-7), ProbeResult(float("inf"), 1e-7), None])
def test_a_verdict_survives_json(measured):
    """Numbers that are none too; people read them, or that nothing could be measured."""
    one = verdict(None, split=("Mixer", "Other"), measured=measured, not_exercised=("vision",))
    numbers = measured and f" (isolation {measured.isolation} (must be 0), equality 1e-07)"

    assert one == PackingVerdict.from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False)))
    assert str(one).endswith(f"sample by sample{numbers or ''}; not asked: vision")
    assert measured or one.isolation is one.equality is None


def test_a_blind_probe_says_nothing():
    """No gradient reaches a sample from its own logits."""
    assert "no gradient reaches a sample" in ProbeResult(float("inf"), 0).why_not(limit=1.0)


def test_trials_go_from_the_fastest_to_the_slowest():
    """Flash attention where it runs; what is named is tried alone."""

    def tried(*arguments, **options):
        return [(one.strategy, one.attention) for one in trials(*arguments, **options)]

    assert ["flash", "varlen", "varlen", "own", "masked"] == [
        one for one, _ in tried("auto", native="sdpa", flash=True)
    ]
    assert [("own", "eager")] == tried("auto", native="eager", flash=False)[2:3]
    assert {"varlen"} == {one for one, _ in tried("varlen", native="sdpa", flash=True)}
    assert [("own", "flex_attention")] * 2 == tried("flex_attention", native="sdpa", flash=False)
    assert [("flash", "flash_attention_3")] == tried("flash_attention_3", native="sdpa", flash=True)


def test_what_is_measured_passes_if_it_is_apart_and_equal():
    """Isolation has no threshold; what is not a number passes nothing."""
    assert ProbeResult(0, 2e-5, 2e-5, 2e-5).passes()
    assert not ProbeResult(1e-30, 0).passes()
    assert not ProbeResult(0, 0, 0, 3e-5).passes()
    assert not ProbeResult(0, float("nan")).passes()
    assert ProbeResult(0, 5e-2).passes("bfloat16")


def test_packing_names_a_length_over_the_capacity_and_an_unknown_algorithm():
    """Index and value; the known names."""
    with pytest.raises(errors.ArgumentError, match="length 1 is 9"):
        pack([3, 9], capacity=8)
    with pytest.raises(ValueError, match="constant_volume"):
        pack([3], capacity=8, algorithm="magic")


def test_a_resume_on_another_plan_names_the_keys_that_changed():
    """Each once; inputs that no key decides alone are left to the differences."""
    differences = (Difference("plan", "a", "b"), Difference("mix", "x", "y"), Difference("mix_seed", 1, 2))
    told = with_remedy(errors.StaleError.plan("checkpoint-1", differences))

    assert "changed: custom.fusion_config, training.seed\n" in told
    assert "changed:" not in with_remedy(errors.StaleError.plan("checkpoint-1", differences[:1]))
