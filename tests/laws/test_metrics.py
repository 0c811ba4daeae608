"""Packing metrics against their definitions."""

import statistics

import pytest
from hypothesis import given

from packplan.core.bounds import lower_bound
from packplan.core.metrics import packing_metrics
from packplan.core.packers import pack
from packplan.core.packs import Packs
from packplan.core.plan import build_raw_plan
from tests.strategies import packable, raw_lengths


@given(packable(min_size=1))
def test_packing_efficiency_metrics_are_as_the_specification_defines_them(case):
    """In plain Python, pack by pack."""
    lengths, capacity = case
    packs = pack(lengths, capacity=capacity)
    shares = [sum(lengths[i] for i in members) / capacity for members in packs]

    found = packing_metrics(lengths, packs, capacity=capacity)

    assert statistics.fmean(shares) == pytest.approx(found.utilisation)
    assert 1 - statistics.fmean(shares) == pytest.approx(found.waste_ratio)
    assert 1 - statistics.pstdev(shares) / statistics.fmean(shares) == pytest.approx(found.balance)
    assert -(-sum(lengths) // capacity) / len(packs) == pytest.approx(found.efficiency)
    assert len(packs) / lower_bound(lengths, capacity=capacity) - 1 == pytest.approx(found.gap)
    assert found == packing_metrics(lengths, packs, capacity=capacity, bound=found.lower_bound)


@given(raw_lengths())
def test_a_plan_with_long_samples_can_be_measured(case):
    """A sample over the capacity counts as a pack of its own, also in the bound."""
    lengths, packing_length = case
    plan = build_raw_plan(lengths, packing_length=packing_length, drop_last=False)

    assert packing_metrics(lengths, plan.packs, capacity=packing_length).gap >= 0


def test_what_cannot_be_measured_is_refused():
    """No pack, a sample without a length, a bound below one."""
    with pytest.raises(ValueError, match="no pack to measure"):
        packing_metrics([1], Packs.from_lists([]), capacity=2)
    with pytest.raises(ValueError, match="sample 7 is in a pack, but there are 2 lengths"):
        packing_metrics([1, 2], [[0, 7]], capacity=2)
    with pytest.raises(ValueError, match="bound is 0"):
        packing_metrics([1, 2], [[0], [1]], capacity=2, bound=0)


def test_lists_of_lists_are_measured_as_packs():
    """In any form that a script holds them."""
    lists = [[0, 1], [2]]
    assert packing_metrics([60, 20, 50], Packs.from_lists(lists), capacity=80) == packing_metrics(
        [60, 20, 50], lists, capacity=80
    )


@pytest.mark.parametrize("wrong", [[[0, -1]], [[0.7]], ["01"], [[True]]])
def test_packs_hold_whole_numbers(wrong):
    with pytest.raises(ValueError, match="whole numbers from 0"):
        Packs.from_lists(wrong)
