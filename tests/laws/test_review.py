"""Warnings about a plan: packs over the packing length, and why room is unused."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.inspection import longest_pack, low_fill
from packplan.core.plan import build_raw_plan
from tests.strategies import raw_lengths


# 330 of 300 is exactly a tenth more, though 1.1 is no binary fraction.
@example(case=([330, 331, 300, 10], 300))
@given(case=raw_lengths())
def test_packs_that_exceed_the_packing_length_are_counted(case):
    """Against a count over lists: more than 1.1 times the length, exactly."""
    lengths, packing_length = case
    plan = build_raw_plan(lengths, packing_length=packing_length, drop_last=False)
    loads = [sum(lengths[index] for index in pack) for pack in plan.packs]
    over = [load for load in loads if Fraction(load, packing_length) > Fraction(11, 10)]
    event(f"over: {min(len(over), 2)}")

    found = longest_pack(plan, lengths)

    assert (max(loads), len(over)) == (found.tokens, found.num_oversized)


@pytest.mark.parametrize(
    ("lengths", "algorithm", "reason"),
    [
        ([51] * 150, "constant_volume", "partners"),
        ([51] * 150 + [100] * 20, "constant_volume", "partners"),
        ([34] * 400, "constant_volume", "lengths"),
        ([34] * 400, "certified", "lengths"),
        ([60, 50] * 150 + [40, 50] * 150, "concatenative", "algorithm"),
        ([51, 51, 49, 60, 60, 40] * 60 + [51] * 400, "constant_volume", "partners"),
        ([51] * 300 + [60, 41, 40, 59], "concatenative", "partners"),  # one pack could be saved
        ([34] * 400 + [70] * 2, "constant_volume", "lengths"),  # two have no partner
    ],
)
def test_the_reason_of_a_low_fill_is_what_makes_it(lengths, algorithm, reason):
    """Samples lack a partner, lengths do not add up, or the algorithm could save packs."""
    plan = build_raw_plan(lengths, packing_length=100, algorithm=algorithm, drop_last=False)

    low = low_fill(plan, lengths)

    among_bad = np.ravel([[length, 0] for length in lengths])
    assert low == low_fill(plan.with_indices(2 * np.arange(len(lengths))), among_bad)
    assert (reason, plan.fill) == (low.reason, low.fill)
    short = [length for length in lengths if length < 100]
    assert (len(plan.packs) - len(plan.single_long), int(np.median(short))) == (low.num_packs, low.median)
    assert sum(len(pack) == 1 and 50 < lengths[pack[0]] < 100 for pack in plan.packs) == low.num_alone
    assert low.lower_bound <= low.num_packs


@example(num=100, length=51, num_long=0)
@example(num=101, length=51, num_long=0)
@given(num=st.integers(1, 120), length=st.integers(30, 99), num_long=st.integers(0, 30))
def test_a_fill_that_is_high_or_of_few_packs_needs_no_reason(num, length, num_long):
    """From 0.8, and up to 100 packs."""
    lengths = [length] * num + [150] * num_long
    plan = build_raw_plan(lengths, packing_length=100, drop_last=False)
    event(f"low: {low_fill(plan, lengths) is not None}")

    assert (len(plan.packs) > 100 and plan.fill < 0.8) == (low_fill(plan, lengths) is not None)
