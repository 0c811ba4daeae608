"""Lengths: a correct result, or an error with index and value; never a wrong one."""

from __future__ import annotations

import math
from collections import UserList, deque

import numpy as np
import pytest

from packplan.core.bounds import lower_bound
from packplan.core.errors import ArgumentError
from packplan.core.lengths import as_lengths
from packplan.core.metrics import packing_metrics
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.plan import build_raw_plan


@pytest.mark.parametrize(
    ("lengths", "index", "value"),
    [
        ([3, -1], 1, -1),
        ([3, 0, -1], 1, 0),
        ([3, True], 1, True),
        ([3, np.True_], 1, np.True_),
        ([3, 1.5], 1, 1.5),
        ([3, 2.0], 1, 2.0),
        ([3, None], 1, None),
        ([3, "2"], 1, "2"),
        ([3, [2]], 1, [2]),
        ([3, 2**63], 1, 2**63),
        ([3, -(2**70)], 1, -(2**70)),
        (np.array([3.5, 1]), 0, 3.5),
        (np.array([3, -4]), 1, -4),
        (np.array([True, False]), 0, True),
        (np.array([3, None], dtype=object), 1, None),
        (np.array([3, 2**63], dtype=np.uint64), 1, 2**63),
        (np.array([[3]]), 0, "array of shape (1, 1)"),
        ([2**62, 2**61, 2**62], 2, 2**62),
    ],
)
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
        assert f"length {index}" in str(caught.value)


def test_not_a_number_is_no_length():
    """It is not even equal to itself."""
    with pytest.raises(ArgumentError) as caught:
        pack([3, math.nan], capacity=8)
    assert (1, "nan") == (caught.value.details["index"], repr(caught.value.details["value"]))


def test_integers_of_any_kind_are_lengths():
    """Python's, numpy's, in lists or object arrays; ranges too."""
    assert [1, 2] == as_lengths([np.int32(1), 2]).tolist()
    assert [1, 2] == as_lengths(np.array([1, 2], dtype=object)).tolist()
    assert [1, 2] == as_lengths(range(1, 3)).tolist()
    assert [2**62, 1, 1] == as_lengths([2**62, 1, 1]).tolist()


@pytest.mark.parametrize("kind", [None, "numpy", pytest.param("torch", marks=pytest.mark.slow), "pandas", "arrow"])
def test_a_column_of_a_data_set_is_lengths(kind):
    """In every format that it may have, and with the index of what is no length."""
    import datasets

    rows = datasets.Dataset.from_dict({"length": [3, 1, 2], "wrong": [3, 0, 2], "half": [1.0, 1.5, 2.0]})
    rows = rows.with_format(kind)

    assert [3, 1, 2] == as_lengths(rows["length"]).tolist()
    for column, index in (("wrong", 1), ("half", 0)):
        with pytest.raises(ArgumentError) as caught:
            as_lengths(rows[column])
        assert index == caught.value.details["index"]


def test_a_lazy_column_is_read_at_once():
    """By one slice, not by an item each."""

    class Column(UserList):
        def __iter__(self):
            raise AssertionError

        def __getitem__(self, item):
            assert item == slice(None)
            return self.data[item]

    assert [3, 1] == as_lengths(Column([3, 1])).tolist()


def test_what_has_no_slices_is_read_by_item():
    """A deque, for one."""
    assert [3, 1] == as_lengths(deque([3, 1])).tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("unit", [2**31, 2**53 + 1, 2**58])
def test_totals_beyond_32_and_53_bits_are_exact(algorithm, unit):
    """As with lengths of a few tokens; work grows otherwise, so by work all packs fit."""
    lengths = [5, 3, 3, 2, 2, 1]

    huge = pack([n * unit for n in lengths], capacity=5 * unit, algorithm=algorithm)

    assert all(sum(lengths[i] for i in members) <= 5 for members in huge)
    assert ALGORITHMS[algorithm].weighs or pack(lengths, capacity=5, algorithm=algorithm) == huge
    assert lower_bound(lengths, capacity=5) == lower_bound([n * unit for n in lengths], capacity=5 * unit)
    assert 1.0 == packing_metrics([5 * unit, 5 * unit], pack([1, 1], capacity=1), capacity=5 * unit).utilisation


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_capacity_beyond_64_bits_holds_everything(algorithm):
    """One pack; nothing overflows."""
    assert [[0, 1, 2]] == pack([4, 2**40, 1], capacity=2**80, algorithm=algorithm)
    assert 1 == lower_bound([4, 2**40, 1], capacity=2**80)


@pytest.mark.parametrize(
    "wrong", [None, 5, "12", b"12", {1: 2}, {3, 4}, (n for n in (1, 2))], ids=lambda wrong: type(wrong).__name__
)
def test_what_has_no_order_is_no_list_of_lengths(wrong):
    """It is named by its type."""
    with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
        as_lengths(wrong)


def test_masked_lengths_are_refused():
    """A sum would leave them out; without a mask they are an array like any other."""
    with pytest.raises(ArgumentError, match="length 1 is 'masked'"):
        as_lengths(np.ma.array([5, 3], mask=[0, 1]))
    assert [5, 3] == as_lengths(np.ma.array([5, 3])).tolist()


@pytest.mark.parametrize("call", [pack, lower_bound])
def test_a_length_over_the_capacity_is_named(call):
    """By packers and bounds alike."""
    with pytest.raises(ArgumentError, match="length 1 is 101: a pack holds 100 tokens"):
        call([5, 101], capacity=100)
