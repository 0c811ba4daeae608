"""A mix is exact, deterministic, and another one each epoch."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.stream import Mix, Source, mix_faults, quotas, schedule, share_faults

ratios = st.sampled_from(["0.1", "0.25", "1", "3", "0.7", "0.05"]).map(Decimal)


@st.composite
def mixes(draw) -> tuple[Mix, list[int]]:
    """Sources, how many samples each has, and perhaps how many an epoch has."""
    sizes = draw(st.lists(st.integers(1, 80), min_size=1, max_size=5))
    sources = []
    for number, size in enumerate(sizes):
        replacement = draw(st.booleans())
        if draw(st.booleans()):
            sources.append(Source(jsonl=f"s{number}", ratio=draw(ratios), replacement=replacement))
        else:
            count = draw(st.integers(1, 2 * size if replacement else size))
            sources.append(Source(jsonl=f"s{number}", count=count, replacement=replacement))
    return Mix(sources=tuple(sources), samples_per_epoch=draw(st.none() | st.integers(1, 200))), sizes


@given(mixes())
def test_ratios_are_exact_to_within_one_sample(mix):
    """Counts are exact; a source that is too small for its share is named."""
    (mix, sizes), sources, samples_per_epoch = mix, mix[0].sources, mix[0].samples_per_epoch
    assert not list(mix_faults(mix, sizes))
    wanted = quotas(mix, sizes)
    too_small = [q > n and not s.replacement for s, n, q in zip(sources, sizes, wanted, strict=True)]
    faults = {fault.path for fault in share_faults(mix, sizes)}
    event(f"a source is too small: {any(too_small)}")
    assert {f"sources[{n}]" for n, q in enumerate(wanted) if not q or too_small[n]} == faults - {"samples_per_epoch"}
    if any(too_small):
        return

    whole = sum(Fraction(source.ratio) for source in sources if source.ratio is not None)
    shared = sum(quota for source, quota in zip(sources, wanted, strict=True) if source.ratio is not None)
    for source, size, quota in zip(sources, sizes, wanted, strict=True):
        if source.count is not None:
            assert source.count == quota
        else:
            assert abs(quota - shared * Fraction(source.ratio) / whole) < 1
        assert source.replacement or quota <= size
    if whole and samples_per_epoch is not None:
        assert max(samples_per_epoch, sum(wanted) - shared) == sum(wanted)


@given(mixes(), st.integers(0, 5), st.integers(0, 5))
def test_a_schedule_draws_its_quotas_in_a_mixed_order(mix, seed, epoch):
    """Without replacement each sample once at most; the same again for the same seed and epoch."""
    mix, sizes = attrs.evolve(mix[0], samples_per_epoch=None), mix[1]
    sources = mix.sources

    drawn = schedule(mix, sizes, seed=seed, epoch=epoch)

    again = schedule(mix, sizes, seed=seed, epoch=epoch)
    assert np.array_equal(drawn.source, again.source)
    assert np.array_equal(drawn.index, again.index)
    assert quotas(mix, sizes) == np.bincount(drawn.source, minlength=len(sources)).tolist()
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        indices = drawn.index[drawn.source == number]
        assert not indices.size or 0 <= indices.min() <= indices.max() < size
        assert source.replacement or len(set(indices.tolist())) == indices.size


def test_another_epoch_is_another_draw_and_another_order():
    """And so is another seed."""
    one = Decimal(1)
    mix = Mix(sources=(Source(jsonl="a", ratio=one), Source(jsonl="b", ratio=one, replacement=True)))
    drawn = [schedule(mix, [100, 100], seed=seed, epoch=epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]

    assert 3 == len({tuple(one.source.tolist()) for one in drawn})
    assert 3 == len({tuple(np.sort(one.index[one.source == 1]).tolist()) for one in drawn})
    assert 3 == len({tuple(one.index[one.source == 0].tolist()) for one in drawn})
    assert (200, 200) == (len(drawn[0]), len(drawn[0].index))


def test_draws_with_replacement_are_even():
    """Each of 10 samples about as often as the others: within five deviations."""
    drawn = schedule(Mix(sources=(Source(jsonl="a", count=100_000, replacement=True),)), [10], seed=3, epoch=0)

    assert np.abs(np.bincount(drawn.index) - 10_000).max() < 5 * np.sqrt(9_000)


@pytest.mark.parametrize(
    ("source", "size", "says"),
    [
        (Source(jsonl="a"), 5, "either a ratio or a count"),
        (Source(jsonl="a", ratio=Decimal(1), count=1), 5, "either a ratio or a count"),
        (Source(jsonl="a", ratio=Decimal(0)), 5, "above 0"),
        (Source(jsonl="a", ratio=Decimal("nan")), 5, "above 0"),
        (Source(jsonl="a", ratio=Decimal("inf")), 5, "above 0"),
        (Source(jsonl="a", count=0), 5, "at least 1"),
        (Source(jsonl="a", count=6), 5, "a has 5 samples: lower it, or set replacement: true"),
        (Source(jsonl="a", ratio=Decimal(1)), 0, "has no record"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(source, size, says):
    """By its place."""
    (fault,) = mix_faults(Mix(sources=(source,)), [size])

    assert fault.path.startswith("sources[0]")
    assert says in str(fault)


@pytest.mark.parametrize(
    ("count", "ratio", "total", "says"),
    [
        (50, Decimal(1), 20, "samples_per_epoch: is 20, but the counts alone are 50"),
        (50, None, 1000, "samples_per_epoch: is 1000, but the counts are 50, and no source has a ratio"),
        (50, Decimal(1), 50, r"sources[0]: (a) has a share of no sample"),
        (5, Decimal(1), 500, r"sources[0]: (a) has 100 samples, but its share is 495"),
    ],
)
def test_no_source_falls_out_or_runs_out_in_silence(count, ratio, total, says):
    """Each case is a fault, with both numbers."""
    sources = [Source(jsonl="a", ratio=ratio)] if ratio else []
    mix = Mix(sources=(*sources, Source(jsonl="b", count=count)), samples_per_epoch=total)

    assert says in "; ".join(map(str, share_faults(mix, [100] * len(mix.sources))))


def test_a_mix_needs_sources_and_samples():
    """At least one of each."""
    assert ["sources: is empty: name at least one"] == list(map(str, mix_faults(Mix(sources=()), [])))
    assert ["samples_per_epoch"] == [
        fault.path for fault in mix_faults(Mix(sources=(Source(jsonl="a", count=1),), samples_per_epoch=0), [1])
    ]
