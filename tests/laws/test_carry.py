"""Dynamic packing: bounded, linear, and no sample lost or seen twice, however the stream is cut."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.stream import Carry, CarryOptions, advance, finish


@st.composite
def streams(draw) -> tuple[list[int], CarryOptions]:
    """Lengths, long ones among them, and how they are packed."""
    packing_length = draw(st.integers(2, 100))
    lengths = st.integers(1, packing_length - 1) | st.just(packing_length) | st.integers(1, 2 * packing_length)
    awkward = st.just(packing_length // 2 + 1)
    options = CarryOptions(
        packing_length=packing_length,
        packing_buffer=draw(st.integers(1, 12)),
        min_fill_ratio=draw(st.sampled_from(["0", "0.5", "0.65", 0.9, Decimal(1)])),
        drop_last=draw(st.booleans()),
        allow_single_long=draw(st.booleans()),
    )
    return draw(st.lists(draw(st.sampled_from([lengths, awkward])), max_size=60)), options


def run(lengths, options, cuts=()):
    """Stream lengths cut at some places; return the end and all that was emitted."""
    carry, emitted, start = Carry(), [], 0
    for stop in [*cuts, len(lengths)]:
        carry, now = advance(carry, range(start, stop), lengths[start:stop], options=options)
        emitted.append(now)
        start = stop
    return carry, [*emitted, finish(carry, options=options)]


def packs_of(emitted) -> list[list[int]]:
    return [pack for one in emitted for pack in one.packs]


@given(streams())
def test_every_sample_is_trained_once_or_accounted_for(stream):
    """In a pack, skipped as too long, or in a pack that was dropped; nowhere twice."""
    lengths, options = stream
    _, emitted = run(lengths, options)

    trained = packs_of(emitted)
    skipped = [index for one in emitted for index in one.skipped_long]
    dropped = [index for one in emitted if one.dropped for pack in one.underfilled for index in pack]
    event(f"dropped: {bool(dropped)}")

    assert dict.fromkeys(range(len(lengths)), 1) == Counter(
        [*(i for pack in trained for i in pack), *skipped, *dropped]
    )
    assert all(sorted(pack) == pack for pack in trained)
    long = {index for index, length in enumerate(lengths) if length >= options.packing_length}
    assert long == {index for one in emitted for index in one.single_long} | set(skipped)
    for indices in trained:
        load = sum(lengths[index] for index in indices)
        assert load <= options.packing_length or (len(indices) == 1 and indices[0] in long)
        if options.drop_last and not long & set(indices):
            assert load >= options.min_fill_ratio * options.packing_length
    if not options.drop_last:
        assert not dropped


@given(streams(), st.data())
def test_the_packs_do_not_depend_on_how_many_samples_come_at_a_time(stream, data):
    """One by one, all at once, or cut anywhere."""
    lengths, options = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=8)))

    whole, pieces = run(lengths, options)[1], run(lengths, options, cuts)[1]

    assert packs_of(whole) == packs_of(pieces)
    assert packs_of(whole) == packs_of(run(lengths, options, range(len(lengths)))[1])


@given(streams())
def test_a_saved_buffer_goes_on_as_it_would_have(stream):
    """From every point: the same tail."""
    lengths, options = stream
    expected = packs_of(run(lengths, options)[1])
    for stop in range(len(lengths) + 1):
        carry, before = advance(Carry(), range(stop), lengths[:stop], options=options)
        restored = Carry(*carry.tolist())
        carry, after = advance(restored, range(stop, len(lengths)), lengths[stop:], options=options)
        assert expected == packs_of([before, after, finish(carry, options=options)])


@given(streams())
def test_the_buffer_stays_bounded(stream):
    """It stays below its size between samples, and a packing leaves at most half of it."""
    lengths, options = stream
    carry = Carry()
    for index, length in enumerate(lengths):
        before = carry.indices.size
        carry, _ = advance(carry, [index], [length], options=options)
        assert carry.indices.size < options.packing_buffer
        assert sorted(carry.indices.tolist()) == carry.indices.tolist()
        packed = length < options.packing_length and before + 1 == options.packing_buffer
        assert not packed or carry.indices.size <= options.packing_buffer // 2


@pytest.mark.parametrize(("length", "full"), [(54, False), (55, True), (56, True)])
def test_the_ratio_is_the_decimal_that_was_written(length, full):
    """55 of 100 is 0.55, whatever a float would say."""
    options = CarryOptions(packing_length=100, packing_buffer=1, min_fill_ratio=0.55)

    assert full == bool(len(advance(Carry(), [0], [length], options=options)[1].packs))


def test_those_that_were_carried_longest_are_let_go_first():
    """Newer ones stay: 4 of 8 after each packing."""
    options = CarryOptions(packing_length=80, packing_buffer=8, min_fill_ratio="0.6")

    carry, _ = advance(Carry(), range(8), [41] * 8, options=options)
    assert [0, 1, 2, 3] == carry.indices.tolist()
    carry, _ = advance(carry, range(8, 12), [41] * 4, options=options)

    assert [8, 9, 10, 11] == carry.indices.tolist()


@pytest.mark.parametrize(
    "wrong", [{"packing_length": 0}, {"packing_buffer": 0}, {"min_fill_ratio": 1.1}, {"min_fill_ratio": "-0.1"}]
)
def test_options_out_of_range_are_refused(wrong):
    """By name."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CarryOptions(**{"packing_length": 80, **wrong})


def test_samples_and_lengths_have_to_match():
    """One length a sample."""
    with pytest.raises(ValueError, match="2 indices, but 1 lengths"):
        advance(Carry(), [0, 1], [5], options=CarryOptions(packing_length=8))
