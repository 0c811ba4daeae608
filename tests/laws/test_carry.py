"""Dynamic packing: the rules of the buffer, by the library of the specification."""

from decimal import Decimal
from fractions import Fraction

import binpacking
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.stream import ShardState, StreamOptions, admit_first, flush_buffer, read_place, take_pack


@st.composite
def streams(draw) -> tuple[list[int], StreamOptions]:
    """Lengths, long ones among them, and how they are packed."""
    packing_length = draw(st.integers(2, 100))
    lengths = st.integers(1, packing_length - 1) | st.just(packing_length) | st.integers(1, 2 * packing_length)
    awkward = st.just(packing_length // 2 + 1)
    options = StreamOptions(
        packing_length=packing_length,
        packing_buffer=draw(st.integers(1, 12)),
        min_fill_ratio=draw(st.sampled_from(["0", "0.5", "0.65", 0.9, Decimal(1)])),
        drop_last=draw(st.booleans()),
        allow_single_long=draw(st.booleans()),
    )
    return draw(st.lists(draw(st.sampled_from([lengths, awkward])), max_size=60)), options


def run(lengths: list[int], options: StreamOptions) -> tuple[list[list[int]], ShardState]:
    """Return the packs of a stream on one shard, in order, and the state at its end."""
    packs, state = [], ShardState()
    for place in range(len(lengths) + 1):
        if place == len(lengths):
            state = flush_buffer(state, options=options)
        else:
            state = admit_first(read_place(state, place), lengths[place], options=options)
            assert len(state.buffer) < options.packing_buffer
        while state.packs:
            pack, state = take_pack(state, options=options)
            packs.append([item.place for item in pack])
    return packs, state


def expected(lengths: list[int], options: StreamOptions) -> tuple[list[list[int]], list[list[int]]]:
    """Return the packs to train and the dropped ones, sample by sample, of the rules in words."""
    trained: list[list[int]] = []
    buffer: list[int] = []

    def packed(most_carried: int) -> tuple[list[list[int]], list[list[int]]]:
        bins = binpacking.to_constant_volume([(i, lengths[i]) for i in buffer], options.packing_length, weight_pos=1)
        packs = sorted(sorted(index for index, _ in one) for one in bins if one)
        fills = [Fraction(sum(lengths[index] for index in pack), options.packing_length) for pack in packs]
        full = [pack for pack, fill in zip(packs, fills, strict=True) if fill >= options.min_fill_ratio]
        oldest_first = [pack for pack in packs if pack not in full]
        leaving = []
        while sum(map(len, oldest_first)) > most_carried:
            leaving.append(oldest_first.pop(0))
        buffer[:] = sorted(index for pack in oldest_first for index in pack)
        return full, leaving

    for index, length in enumerate(lengths):
        if length < options.packing_length:
            buffer.append(index)
        elif options.allow_single_long:
            trained.append([index])
        if len(buffer) == options.packing_buffer:
            trained += [pack for packs in packed(options.packing_buffer // 2) for pack in packs]
    full, leaving = packed(0)
    return ([*trained, *full], leaving) if options.drop_last else ([*trained, *full, *leaving], [])


@given(streams())
def test_a_stream_is_packed_by_the_rules(stream):
    """Pack by pack what they say in words; dropped and underfilled packs are counted."""
    lengths, options = stream

    packs, state = run(lengths, options)

    trained, dropped = expected(lengths, options)
    underfilled = [
        pack for pack in trained if sum(lengths[i] for i in pack) < options.min_fill_ratio * options.packing_length
    ]
    event(f"underfilled before the end: {options.drop_last and bool(underfilled)}")
    event(f"dropped: {bool(dropped)}")
    assert trained == packs
    assert (len(underfilled), len(dropped)) == (state.counts.underfilled_packs, state.counts.dropped_packs)
    assert not state.waiting_items


@pytest.mark.parametrize(("length", "full"), [(54, False), (55, True), (56, True)])
def test_the_ratio_is_the_decimal_that_was_written(length, full):
    """55 of 100 is 0.55, whatever a float would say."""
    options = StreamOptions(packing_length=100, min_fill_ratio=0.55)

    assert full == bool(run([length], options)[0])


@pytest.mark.parametrize(
    "wrong", [{"packing_length": 0}, {"packing_buffer": 0}, {"min_fill_ratio": 1.1}, {"min_fill_ratio": "-0.1"}]
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StreamOptions(**{"packing_length": 80, **wrong})
