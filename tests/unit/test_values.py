"""Errors, measurements and isolation: small values that others rely on."""

from __future__ import annotations

import inspect
import pickle
import re

import attrs
import numpy as np
import pytest

from core import errors
from core.align import align_plan
from core.batch import resolve_accumulation
from core.equality import check_isolation, choose_attention
from core.errors import Difference, Fault, IsolationError, PackplanError, agree, counted
from core.packers import pack
from core.plan import build_raw_plan, refuse_dropped, refuse_longer
from core.policy import PlanPolicy
from core.samples import COLUMNS, Measurement, column, from_row, to_row
from core.shard import shard_packed, shard_plain

EXAMPLES = {
    "num_dropped": 4, "shortest": 51, "dropped_tokens": 212, "num_tokens": 300, "max_dropped_share": "0.01",
    "min_fill_ratio": "0.65",
    "padded": 96, "max_tokens": 95, "num_over": 2, "widest": 128, "num_sequences": 3, "num_shards": 2, "worker": 1,
    "dropped_lengths": (51, 60), "fullest": 60,
    "method": "train", "number": float("inf"), "consequence": "nothing was saved",
    "checkpoint": "runs/first/checkpoint-2",
    "checks": ("logits", "gradients"),
    "why_not": "it is not established for gemma2", "instead": "sdpa",
    "num_findings": 3,
    "missing": (3, 4),
    "surplus": (),
    "source": "run.yaml", "faults": (Fault("a.b", "is wrong"), Fault("", "at all")), "line": 7, "reason": "is broken",
    "index": 3, "value": None, "num_samples": 5, "num_skipped_long": 5, "num_dropped_packs": 2, "packing_length": 80,
    "num_packs": 3, "min_bin_count": 2, "bin_count_multiple": 4, "world_size": 8, "batch_size": 4,
    "effective_batch_size": 7, "per_device": 1, "model_type": "m", "attn_impl": "a",
    "established": ("sdpa",), "detail": "", "where": "runs", "differences": (Difference("key", 1, 2),), "record": "r",
    "length": 90, "limit": 80, "num_too_long": 2, "longest": 99, "path": "p", "what": "plans", "remedy": "fix it",
    "image": 1, "folder": "runs", "holder": "process 7", "limit_s": 3.0, "borrowed": True, "loss": "DPOLoss",
    "values": ("x", "y"),
}  # fmt: skip

DISAGREES = re.compile(
    r"(?<![\d.,])1 (?:[a-z]+ )?(?:samples|packs|ranks|tokens|sequences|workers|findings|faults|batches)\b.{0,40}"
)

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PackplanError) and attrs.has(cls)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling_and_say_something(cls):
    """Between processes, with all fields and the same text."""
    error = cls(*(EXAMPLES[field.name] for field in attrs.fields(cls)))

    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes

    assert str(error) == str(again)
    assert attrs.astuple(error) == attrs.astuple(again)
    assert len(str(error)) > 5
    assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_an_error_counts_agrees_with_its_number(cls):
    """One of each: no noun is in the plural, and no verb."""
    ones = {name: 1 for name, example in EXAMPLES.items() if type(example) is int}
    error = cls(*({**EXAMPLES, **ones, "dropped_lengths": (1, 1)}[field.name] for field in attrs.fields(cls)))

    assert [] == DISAGREES.findall(str(error))


def test_a_noun_agrees_with_its_number():
    """Whatever it ends with."""
    assert ["1 pack", "0 packs", "2,000 batches"] == [counted(1, "pack"), counted(0, "pack"), counted(2000, "batch")]
    assert ("is", "are", "has", "have") == (agree(1), agree(0), agree(1, "has", "have"), agree(2, "has", "have"))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_error_prints_at_length_what_it_quotes(cls):
    """A path, a value or a list as long as data can make it; the ends of the text stay."""
    long, many = "x" * 100_000, (Fault("a.b", "y" * 100_000),) * 1000
    grown = {"faults": many, "differences": (Difference("key", long, long),) * 1000, "values": (long,) * 9}
    texts = {name: long for name, example in EXAMPLES.items() if isinstance(example, str)}
    error = cls(*({**EXAMPLES, **texts, **grown}[field.name] for field in attrs.fields(cls)))

    lines = str(error).split("\n")

    assert len(lines) <= errors.MAX_LINES
    assert all(len(line) <= errors.MAX_LINE for line in lines)
    assert "__str__" not in vars(cls)


ARGUMENTS = {
    errors.InvalidLengthError: lambda: pack([9], capacity=8, algorithm="best_fit_decreasing"),
    errors.TooFewSamplesError: lambda: pack([1], capacity=8, algorithm="best_fit_decreasing", min_bin_count=2),
    errors.OverBudgetError: lambda: shard_packed([9], shards=1, batch_size=1, max_tokens_per_microbatch=8),
    errors.UnevenShardsError: lambda: shard_plain([1, 2, 3], shards=2, batch_size=3),
    errors.BatchError: lambda: shard_plain([], shards=1, batch_size=1),
    errors.EmptyPlanError: lambda: build_raw_plan([], packing_length=8),
    errors.DroppedTokensError: lambda: refuse_dropped(
        build_raw_plan([51, 51, 90], packing_length=100, min_fill_ratio="0.6"),
        [51, 51, 90],
        PlanPolicy(packing_length=100, min_fill_ratio="0.6"),
    ),
    errors.SampleTooLongError: lambda: refuse_longer([9], PlanPolicy(packing_length=8, refuse_longer=True)),
    errors.PlanTooShortError: lambda: align_plan(
        build_raw_plan([8], packing_length=9), world_size=2, dataloader_drop_last=True
    ),
    errors.BatchSizeError: lambda: resolve_accumulation(
        effective_batch_size=3, per_device_train_batch_size=1, gradient_accumulation_steps=1, world_size=2
    ),
    errors.WholeBatchLossError: None,
}
"""
Error about what a library function was given -> a call that raises it; of the last, tests of losses
have it.
"""


@pytest.mark.parametrize(("cls", "call"), ARGUMENTS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_errors_about_arguments_are_value_errors(cls, call):
    """For whoever calls a function, as for any library; and errors of the user, for commands."""
    assert issubclass(cls, ValueError)
    assert issubclass(cls, errors.UserError)
    if call is not None:
        with pytest.raises(ValueError, match=r"\w") as raised:
            call()
        assert type(raised.value) is cls


def test_no_other_error_is_a_value_error():
    """A YAML, a file, a run that fails: what catches ValueErrors of a call does not hide them."""
    assert set(ARGUMENTS) == {cls for cls in CLASSES if issubclass(cls, ValueError)}
    assert not any(issubclass(cls, ValueError) for cls in (errors.ConfigError, errors.RecordError, errors.DataSetError))


def test_an_error_of_one_text_says_it():
    """Those that have no fields."""
    assert "there is no sample" == str(errors.PackplanError("there is no sample"))


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


def test_measurements_survive_the_table():
    """Row by row; columns by name."""
    rows = [Measurement(9, 4, 2, 64), Measurement(5, 5, 0, 0, cut=True)]
    table = np.array([to_row(row) for row in rows], dtype=np.int32)

    assert rows == [from_row(table, index) for index in range(2)]
    assert [9, 5] == column(table, "length").tolist()
    assert len(COLUMNS) == table.shape[1]
    assert ("images", 2, 1) == attrs.astuple(rows[0].differences(attrs.evolve(rows[0], images=1))[0])


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3"])
def test_established_backends_pass(model_type):
    """Ours, sdpa and eager; flash attention where it is installed."""
    check_isolation(model_type, "varlen", flash_installed=False, on_cpu=True)
    check_isolation(model_type, "sdpa", flash_installed=False, on_cpu=True)
    check_isolation(model_type, "eager", flash_installed=False, on_cpu=True)
    check_isolation(model_type, "flash_attention_2", flash_installed=True, on_cpu=False)
    if model_type.startswith("qwen") and "vl" not in model_type:
        check_isolation(model_type, "flex_attention", flash_installed=False, on_cpu=False)


@pytest.mark.parametrize(
    ("model_type", "attn_impl", "says"),
    [
        ("qwen2_5_vl", "flex_attention", "varlen or sdpa or eager"),
        ("qwen2_5_vl", "flash_attention_2", "flash-attn is not installed"),
        ("qwen3", "flex_attention", "no backward pass on a CPU"),
        ("llava", "sdpa", "set training.packing: false"),
    ],
)
def test_other_backends_are_refused_with_what_is_established(model_type, attn_impl, says):
    """Never silently."""
    with pytest.raises(IsolationError, match=says):
        check_isolation(model_type, attn_impl, flash_installed=False, on_cpu=True)


@pytest.mark.parametrize(
    ("attn_impl", "model_type", "context_parallel_size", "name", "says"),
    [
        ("auto", "qwen3_vl", 1, "varlen", "established for qwen3_vl"),
        ("varlen", "qwen2", 1, "varlen", "names it"),
        ("sdpa", "qwen2", 1, "sdpa", "names it"),
        ("flash_attention_2", "gemma2", 2, "flash_attention_2", "names it"),
        ("auto", "gemma2", 1, "sdpa", "not established for gemma2"),
        ("auto", "qwen3", 2, "context_parallel", "policy.context_parallel_size is 2"),
    ],
)
def test_auto_takes_varlen_where_it_is_established_and_rows_are_not_shared(
    attn_impl, model_type, context_parallel_size, name, says
):
    """What is named is taken as it is; the reason says why."""
    found = choose_attention(attn_impl, model_type=model_type, context_parallel_size=context_parallel_size)

    assert name == found.name
    assert says in found.reason
    assert f"{name}: {found.reason}" == str(found)


@pytest.mark.parametrize(
    ("model_type", "context_parallel_size", "says"),
    [("gemma2", 1, "not established for gemma2; use model.attn_impl: sdpa"),
     ("gpt_oss", 1, "not established for gpt_oss; use model.attn_impl: sdpa"),
     ("qwen3", 2, "policy.context_parallel_size is 2, .* use model.attn_impl: auto")],
)  # fmt: skip
def test_varlen_by_name_is_refused_where_it_does_not_run(model_type, context_parallel_size, says):
    """
    Soft caps, sinks and shared rows among it; the message has the key, the reason, and what to use.
    """
    with pytest.raises(errors.AttentionError, match=f"model.attn_impl varlen .*{says}"):
        choose_attention("varlen", model_type=model_type, context_parallel_size=context_parallel_size)


def test_packing_names_a_length_over_the_capacity_and_an_unknown_algorithm():
    """Index and value; the known names."""
    with pytest.raises(errors.InvalidLengthError, match="length 1 is 9"):
        pack([3, 9], capacity=8)
    with pytest.raises(ValueError, match="constant_volume"):
        pack([3], capacity=8, algorithm="magic")
