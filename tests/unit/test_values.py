"""Errors, measurements and isolation: small values that others rely on."""

from __future__ import annotations

import inspect
import pickle

import attrs
import numpy as np
import pytest

from core import errors
from core.errors import Difference, Fault, IsolationError, PackplanError
from core.isolation import check_isolation, choose_attention
from core.packers import pack
from core.samples import COLUMNS, Measurement, column, from_row, to_row

EXAMPLES = {
    "num_dropped": 4, "shortest": 51, "dropped_tokens": 212, "num_tokens": 300, "max_dropped_share": "0.01", "min_fill_ratio": "0.65",
    "padded": 96, "max_tokens": 95, "num_over": 2, "widest": 128, "num_sequences": 3, "num_shards": 2, "worker": 1,
    "method": "train", "number": float("inf"), "consequence": "nothing was saved",
    "checkpoint": "runs/first/checkpoint-2",
    "checks": ("logits", "gradients"),
    "why_not": "it is not established for gemma2", "instead": "sdpa",
    "num_findings": 3,
    "missing": (3, 4),
    "surplus": (),
    "source": "run.yaml", "faults": (Fault("a.b", "is wrong"), Fault("", "at all")), "line": 7, "reason": "is broken",
    "index": 3, "value": None, "num_samples": 5, "num_skipped_long": 5, "num_dropped_packs": 2, "packing_length": 80,
    "num_packs": 3, "min_bin_count": 2, "bin_count_multiple": 4, "world_size": 8, "batch_size": 4, "effective_batch_size": 7, "per_device": 1, "model_type": "m", "attn_impl": "a",
    "established": ("sdpa",), "detail": "", "where": "runs", "differences": (Difference("key", 1, 2),), "record": "r",
    "length": 90, "limit": 80, "num_too_long": 2, "longest": 99, "path": "p", "what": "plans", "remedy": "mend it", "image": 1, "folder": "runs", "holder": "process 7", "waited_s": 3.0, "borrowed": True, "loss": "DPOLoss", "values": ("x", "y"),
}  # fmt: skip

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
    """Soft caps, sinks and shared rows among it; the message has the key, the reason, and what to use."""
    with pytest.raises(errors.AttentionError, match=f"model.attn_impl varlen .*{says}"):
        choose_attention("varlen", model_type=model_type, context_parallel_size=context_parallel_size)


def test_packing_names_a_length_over_the_capacity_and_an_unknown_algorithm():
    """Index and value; the known names."""
    with pytest.raises(errors.InvalidLengthError, match="length 1 is 9"):
        pack([3, 9], capacity=8)
    with pytest.raises(ValueError, match="constant_volume"):
        pack([3], capacity=8, algorithm="magic")
