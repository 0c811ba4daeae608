"""Lengths: a correct result, or an error with index and value; never a wrong one."""

import contextlib
import inspect
import math
import re
from collections import UserList, deque
from functools import partial

import numpy as np
import pytest

import packplan as pp
from packplan.core.bounds import lower_bound
from packplan.core.errors import ArgumentError
from packplan.core.lengths import as_lengths, as_works
from packplan.core.metrics import packing_metrics
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.plan import build_raw_plan


@pytest.mark.parametrize(
    ("lengths", "index", "value"),
    [
        ([3, -1], 1, -1), ([3, 0, -1], 1, 0), ([3, True], 1, True), ([3, np.True_], 1, np.True_),
        ([3, 1.5], 1, 1.5), ([3, 2.0], 1, 2.0), ([3, None], 1, None), ([3, "2"], 1, "2"), ([3, [2]], 1, [2]),
        ([3, 2**63], 1, 2**63), ([3, -(2**70)], 1, -(2**70)), ([2**62, 2**61, 2**62], 2, 2**62),
        (np.array([3.5, 1]), 0, 3.5), (np.array([3, -4]), 1, -4), (np.array([True, False]), 0, True),
        (np.array([3, None], dtype=object), 1, None), (np.array([3, 2**63], dtype=object), 1, 2**63),
        (np.array([3, 2**63], dtype=np.uint64), 1, 2**63),
        *((np.array([3], kind), 0, np.array([3], kind)[0]) for kind in ("m8[ns]", "M8[ns]")),  # whose list has integers
        *((held, 1, "NaN") for held in ([3, math.nan], np.array([3, math.nan]))),
        (np.ma.array([5, 3], mask=[0, 1]), 1, "masked"),  # a sum would leave it out
    ],
)  # fmt: skip
def test_what_is_no_length_is_named_with_its_index(lengths, index, value):
    """By every function that takes lengths."""
    for call in (
        as_lengths,
        lambda bad: pack(bad, capacity=2**62),
        lambda bad: lower_bound(bad, capacity=2**62),
        lambda bad: build_raw_plan(bad, packing_length=2**62),
        lambda bad: packing_metrics(bad, pack([1], capacity=1), capacity=2**62),
    ):
        with pytest.raises(ArgumentError) as caught:
            call(lengths)
        assert {"index": index, "value": value} == caught.value.details
        assert f"length {index} is {value if value == 'NaN' else repr(value)}: " in str(caught.value)


class Column(UserList):
    """Lazy column, which is read by one slice, not by an item each."""

    def __iter__(self):
        raise AssertionError

    def __getitem__(self, item):
        assert item == slice(None)
        return self.data[item]


@pytest.mark.parametrize(
    "lengths",
    [
        [np.int32(2), 1], (2, 1), range(2, 0, -1), np.ma.array([2, 1]), Column([2, 1]), deque([2, 1]),
        np.array([2, 2, 1, 1])[::2], *(np.array([2, 1], dtype) for dtype in ("O", "i4", "i8", "u2", "u8", ">i8")),
    ],
    ids=lambda lengths: type(lengths).__name__,
)  # fmt: skip
def test_integers_of_any_kind_are_lengths(lengths):
    """Python's, numpy's, in sequences and arrays of any kind."""
    assert [2, 1] == as_lengths(lengths).tolist()


class GradTensor(UserList):
    """Tensor that numpy cannot read, as torch's with gradients, on a GPU or of bfloat16."""

    def __array__(self, *_, **__):
        raise RuntimeError

    def tolist(self):
        if not self.data:
            raise NotImplementedError("no data")
        return self.data


def test_a_tensor_that_numpy_does_not_read_is_read_by_its_numbers():
    """Lengths on a GPU are lengths; floats are none, wherever they are."""
    assert [2, 1] == as_lengths(GradTensor([2, 1])).tolist()
    with pytest.raises(ArgumentError, match=r"length 0 is 2\.0"):
        as_lengths(GradTensor([2.0, 1.0]))
    assert [2.0, 1.0] == as_works(GradTensor([2.0, 1.0]), 2).tolist()
    with pytest.raises(ArgumentError, match="not list"):
        as_works(["much"], 1)
    with pytest.raises(ArgumentError, match="this GradTensor has no readable numbers: no data"):
        as_lengths(GradTensor())


@pytest.mark.parametrize("kind", [None, "numpy", pytest.param("torch", marks=pytest.mark.slow), "pandas", "arrow"])
def test_a_column_of_a_data_set_is_lengths(kind):
    """In every format that it may have, and with the index of what is no length."""
    import datasets

    rows = datasets.Dataset.from_dict(
        {"length": [3, 1, 2], "wrong": [3, 0, 2], "half": [1.0, 1.5, 2.0], "gap": [3, None, 2]}
    )
    rows = rows.with_format(kind)

    assert [3, 1, 2] == as_lengths(rows["length"]).tolist()
    with pytest.raises(ArgumentError, match="not Dataset: give its column of lengths"):
        as_lengths(rows)
    for column, index in (("wrong", 1), ("half", 0), ("gap", 1)):
        with pytest.raises(ArgumentError) as caught:
            as_lengths(rows[column])
        assert index == caught.value.details["index"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("unit", [2**31, 2**53 + 1, 2**58])
def test_totals_beyond_32_and_53_bits_are_exact(algorithm, unit):
    """As with lengths of a few tokens; work grows otherwise, so by work all packs fit."""
    lengths = [5, 3, 3, 2, 2, 1]

    huge = pack([n * unit for n in lengths], capacity=5 * unit, algorithm=algorithm)

    assert all(sum(lengths[i] for i in members) <= 5 for members in huge)
    assert "works" in ALGORITHMS[algorithm].takes or pack(lengths, capacity=5, algorithm=algorithm) == huge
    assert lower_bound(lengths, capacity=5) == lower_bound([n * unit for n in lengths], capacity=5 * unit)
    assert 1.0 == packing_metrics([5 * unit, 5 * unit], pack([1, 1], capacity=1), capacity=5 * unit).utilisation


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_largest_capacity_holds_everything(algorithm):
    assert [[0, 1, 2]] == pack([4, 2**40, 1], capacity=2**63 - 1, algorithm=algorithm)
    assert [[0, 1, 2]] == pp.plan([4, 2**40, 1], 2**63 - 1, algorithm=algorithm).packs.tolist()
    assert 1 == lower_bound([4, 2**40, 1], capacity=2**63 - 1)
    assert [2**62, 1, 1] == as_lengths([2**62, 1, 1]).tolist()


L, RAW = [3, 1, 2, 5], pp.build_raw_plan([3, 1, 2, 5], packing_length=9)
SHARDS = {"shards": 2, "batch_size": 4, "max_tokens_per_microbatch": 9}
BATCH = {"effective_batch_size": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "world_size": 2}
CALLS = {
    "align_plan": (partial(pp.align_plan, RAW), {"world_size": 2}),
    "build_raw_plan": (partial(pp.build_raw_plan, L, packing_length=9, replanned=True), {"epoch": 0}),
    "chunk_positions": (pp.chunk_positions, {"length": 8, "cp_size": 2, "cp_rank": 0}),
    "cu_seqlens": (partial(pp.cu_seqlens, L), {}), "lower_bound": (partial(pp.lower_bound, L), {"capacity": 9}),
    "pack": (partial(pp.pack, L), {"capacity": 9}),
    "packing_metrics": (partial(pp.packing_metrics, L, RAW.packs), {"capacity": 9}),
    "padded_length": (pp.padded_length, {"length": 5, "cp_size": 2}),
    "partial_window": (pp.partial_window, {"per_rank_batches": 3, "gradient_accumulation_steps": 2}),
    "plan": (partial(pp.plan, L), {"packing_length": 9}),
    "resolve_accumulation": (pp.resolve_accumulation, BATCH),
    "shard_dynamic": (partial(pp.shard_dynamic, L), SHARDS),
    "shard_packed": (partial(pp.shard_packed, L), SHARDS),
    "EpochSchedule": (pp.EpochSchedule, {
        "num_packs": 3, "world_size": 1, "dataloader_drop_last": False, "gradient_accumulation_steps": 1,
        "num_train_epochs": 1, "works": np.ones(3)}),
    "Plan.schedule": (pp.plan(L, 9).schedule, {}), "PlanPolicy": (pp.PlanPolicy, {"packing_length": 9}),
}  # fmt: skip
"""Public name -> call, and its arguments that have no default."""

LIMITS = [
    (name, parameter.name)
    for name, (call, _) in CALLS.items()
    for parameter in inspect.signature(call).parameters.values()
    if re.match(r"int\b|BatchSize|.*'int'", str(parameter.annotation))
]


def test_every_public_function_is_called():
    """Here, if it takes a limit or a count."""
    functions = {name for name in pp.__all__ if inspect.isfunction(getattr(pp, name))}
    assert {"plan_checksum", "write_report"} == functions - CALLS.keys()
    assert len(LIMITS) > 40


@pytest.mark.parametrize(("function", "limit"), LIMITS)
def test_a_limit_is_a_whole_number_of_its_range_or_refused_by_name(function, limit):
    """One below 2**63 overflows nothing; a tokenizer's int(1e30) is explained."""
    call, given = CALLS[function]
    for wrong in (-2, True, 1.5, "8", 2**64, int(1e30)):
        with pytest.raises(ArgumentError, match=limit) as said:
            call(**{**given, limit: wrong})
    assert function == "padded_length" or "a tokenizer that sets no limit" in str(said.value)
    with contextlib.suppress(ValueError):
        call(**{**given, limit: 2**63 - 1})


@pytest.mark.parametrize("epochs", [0, -1, math.inf, math.nan, "3"])
def test_a_number_of_epochs_is_finite_and_positive(epochs):
    """Unless a number of steps stands in its place."""
    with pytest.raises(ArgumentError, match="the number of epochs is"):
        pp.plan([5], 10).schedule(epochs=epochs)
    assert 3 == pp.plan([5], 10).schedule(epochs=epochs, max_steps=3).total_steps


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *((one, f"not {type(one).__name__}") for one in (None, 5, "12", b"12", {1: 2}, {3, 4})),
        ((n for n in (1, 2)), r"not generator: give list\(…\) of it"),
        ([2.0], "length 0 is 2.0: .*: convert the lengths to int"), ([[5, 6]], r"such as len\(row\['input_ids'\]\)"),
        *((np.ones(shape, int), "a plan needs a flat list: one length for") for shape in ((), (2, 1))),
    ],
)  # fmt: skip
def test_what_is_no_list_of_lengths_is_refused_with_advice(wrong, says):
    """It is named by its type or shape."""
    with pytest.raises(ArgumentError, match=says):
        as_lengths(wrong)
    for call in (pack, lower_bound):
        with pytest.raises(ArgumentError, match="length 1 is 101: a pack holds at most 100 tokens; "):
            call([5, 101], capacity=100)
