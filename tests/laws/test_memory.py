"""Laws of the memory of a step: amounts, peaks, the longest length that fits."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.forecast import (
    MEMORY_KINDS,
    StepTrace,
    add_margin,
    bytes_text,
    longest_fit,
    parse_bytes,
    peak_candidates,
)

POWERS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


@given(st.integers(1, 10**6), st.sampled_from(sorted(POWERS)), st.sampled_from(["", " "]))
def test_an_amount_has_a_power_of_1024_bytes_a_unit(number, unit, space):
    """`iB` counts in powers of 1,024; `B` and a bare prefix count in powers of 1,000."""
    assert number * 1024 ** POWERS[unit] == parse_bytes(f"{number}{space}{unit}")
    assert parse_bytes(f"{number}{unit.lower()}") == parse_bytes(f"{number}{unit}")
    if POWERS[unit]:
        assert number * 1000 ** POWERS[unit] == parse_bytes(f"{number}{unit[0]}B") == parse_bytes(f"{number}{unit[0]}")
    written, shown = bytes_text(number * 1024 ** POWERS[unit]).split()
    assert float(written.replace(",", "")) * 1024 ** POWERS[shown] == pytest.approx(
        number * 1024 ** POWERS[unit], rel=0.01
    )


@pytest.mark.parametrize("text", ["", "80", "GiB", "-1GB", "0GB", "80 GBs", "1.5B", "1e3GB", "80ib", "٨GB1", "8 0GB"])
def test_anything_but_a_positive_number_and_a_unit_is_refused(text):
    with pytest.raises(ValueError, match="is not an amount of memory"):
        parse_bytes(text)


@st.composite
def traces(draw):
    """Draw a trace of a few blocks, of any kind."""
    blocks = draw(
        st.lists(
            st.tuples(
                st.integers(0, 20), st.integers(1, 10), st.integers(0, 99), st.integers(-1, 2), st.booleans()
            ),
            min_size=1, max_size=12,
        )
    )  # fmt: skip
    allocated, lives, sizes, kinds, logits = (np.array(column) for column in zip(*blocks, strict=True))
    forward_end, buckets = (draw(st.integers(0, 25)) for _ in range(2))
    return StepTrace(allocated, allocated + lives, sizes, kinds, logits, forward_end, buckets)


@given(traces(), st.booleans())
def test_the_peak_is_the_largest_sum_of_blocks_at_one_time(trace, fused_loss):
    """Of the blocks that are there then, beside buckets that are there throughout."""
    kept = ~(trace.logits & fused_loss)
    expected = trace.buckets + max(
        int(trace.sizes[kept & (trace.allocated <= time) & (trace.freed > time)].sum())
        for time in range(int(trace.freed.max()))
    )

    peak = trace.peak(fused_loss=fused_loss)

    assert expected == peak.total
    assert peak.total == sum(getattr(peak, kind) for kind in MEMORY_KINDS)


def test_kinds_follow_from_what_blocks_are_for_and_when_they_live():
    """What the forward pass leaves for the backward pass is an activation; the rest is not."""
    trace = StepTrace(
        allocated=np.array([0, 5, 1, 6, 0]), freed=np.array([9, 9, 3, 9, 9]),
        sizes=np.array([1, 20, 300, 4000, 50000]), kinds=np.array([0, -1, -1, 1, 2]),
        logits=np.zeros(5, dtype=bool), forward_end=5, buckets=600000,
    )  # fmt: skip

    assert (1, 4000, 50000, 20, 600000) == attrs.astuple(trace.peak())


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=9))
def test_candidates_have_the_most_of_each(packs):
    """Tokens, tokens with a loss, patches, and the largest sum of their shares; each pack once."""
    columns = [np.array(column) for column in zip(*packs, strict=True)]

    found = peak_candidates(*columns)

    sums = sum(one / max(one.max(), 1) for one in columns)
    assert len(set(found)) == len(found)
    for one in (*columns, sums):
        assert one.max() == pytest.approx(one[list(found)].max())


@given(
    shape=st.tuples(st.integers(0, 10**6), st.integers(1, 500), st.integers(0, 500), st.integers(1, 40_000)),
    start=st.integers(1, 8192),
    limit=st.integers(1, 10**8),
    most=st.sampled_from([100, 4096, 131_072]),
)
def test_the_length_that_is_found_fits_and_its_peak_is_its_own(shape, start, limit, most):
    """Whatever the memory's shape, a returned length was tried itself, and fits with the margin."""
    tried = {}

    def peak_at(tokens):
        fixed, slope, jump, bend = shape
        tried[tokens] = fixed + slope * tokens + jump * max(0, tokens - bend)
        return tried[tokens]

    found = longest_fit(peak_at, start=start, limit=limit, most=most)

    assert len(tried) <= 4
    if found.tokens:
        assert tried[found.tokens] == found.peak
        assert add_margin(found.peak) <= limit + 1
        assert found.tokens <= most
        assert found.limited == (found.tokens == most)
    else:
        assert all(add_margin(peak) > limit or tokens > most for tokens, peak in tried.items())


def test_a_line_finds_the_longest_length_and_one_that_misleads_the_longest_tried():
    """Where memory is a line, 128 tokens more would not fit; no fourth length is traced."""
    for slope, times in ((1, 10), (70, 333), (500, 1000)):
        line = longest_fit(lambda tokens, of=slope: of * tokens, start=64, limit=int(70.4 * slope * times), most=10**6)
        assert 64 * (times - 2) <= line.tokens <= 64 * times
    bent = longest_fit(lambda tokens: tokens + 100 * max(0, tokens - 3000), start=1000, limit=11_000, most=131_072)
    assert 2000 == bent.tokens == bent.peak
