"""Packing metrics against their definitions."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given

from core.metrics import packing_metrics
from core.packers import pack
from tests.strategies import packable


@given(packable(min_size=1))
def test_metrics_are_what_they_are_defined_as(case):
    """In plain Python, pack by pack."""
    lengths, capacity = case
    packs = pack(lengths, capacity=capacity)
    shares = [sum(lengths[i] for i in members) / capacity for members in packs]

    found = packing_metrics(lengths, packs, capacity=capacity)

    assert statistics.fmean(shares) == pytest.approx(found.utilisation)
    assert 1 - statistics.fmean(shares) == pytest.approx(found.waste_ratio)
    assert 1 - statistics.pstdev(shares) / statistics.fmean(shares) == pytest.approx(found.balance)
    assert -(-sum(lengths) // capacity) / len(packs) == pytest.approx(found.efficiency)
