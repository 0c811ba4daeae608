"""Streams go on where they stopped: the same packs, or each sample once on other shards."""

from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain, pairwise

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.fingerprint import Fingerprint
from packplan.core.stream import (
    RankState,
    ShardState,
    StreamCounts,
    StreamItem,
    StreamOptions,
    StreamProgress,
    StreamSegment,
    StreamState,
    admit_first,
    flush_buffer,
    read_place,
    reshard,
    take_pack,
    unread_places,
)
from tests.laws.test_carry import run

Step = tuple[tuple[StreamItem, ...], ShardState]


@st.composite
def streams(draw) -> tuple[list[int], StreamOptions]:
    """Lengths that fill a buffer several times, and how they are packed."""
    packing_length = draw(st.integers(8, 30))
    options = StreamOptions(
        packing_length=packing_length,
        packing_buffer=draw(st.integers(3, 8)),
        min_fill_ratio=draw(st.sampled_from(["0.65", "0.9", "1"])),
        drop_last=draw(st.booleans()),
        allow_single_long=draw(st.booleans()),
    )
    lengths = st.integers(1, packing_length + 1) | st.just(packing_length // 2 + 1)
    return draw(st.lists(lengths, min_size=16, max_size=28)), options


def steps_of(state: ShardState, places: list[int], lengths: list[int], options, group: int = 1) -> Iterator[Step]:
    """Yield the packs of a shard's places, each with the state after it, as loaders do."""
    read = 0
    while True:
        while state.packs:
            pack, state = take_pack(state, options=options)
            yield pack, state
        if state.ahead:
            state = admit_first(state, lengths[state.ahead[0].place], options=options)
        elif read < len(places):
            for place in places[read : read + group]:
                state, read = read_place(state, place), read + 1
        elif state.buffer:
            state = flush_buffer(state, options=options)
        else:
            yield (), state
            return


def places_in(packs) -> list[list[int]]:
    return [[item.place for item in pack] for pack in packs if pack]


@given(streams(), st.integers(1, 5))
def test_a_shard_packs_as_its_buffer_does(stream, group):
    """However many samples are read at a time; each is counted as trained, dropped or skipped."""
    lengths, options = stream

    packs, states = zip(*steps_of(ShardState(), [*range(len(lengths))], lengths, options, group), strict=True)

    assert run(lengths, options)[0] == places_in(packs)
    counts = states[-1].counts
    loads = [sum(item.length for item in pack) for pack in packs if pack]
    assert len(lengths) == counts.samples == sum(map(len, packs)) + counts.dropped + counts.skipped
    assert (len(loads), sum(lengths)) == (counts.packs, counts.tokens)
    assert counts.filled_tokens == sum(min(load, options.packing_length) for load in loads)
    skipped = sum(length for length in lengths if length >= options.packing_length and not options.allow_single_long)
    assert sum(lengths) == sum(loads) + counts.dropped_tokens + skipped
    assert counts.long + counts.skipped == sum(length >= options.packing_length for length in lengths)


@given(streams(), st.integers(1, 5))
def test_a_saved_shard_goes_on_as_it_would_have(stream, group):
    """From every pack: the same packs and counts, whatever was read ahead."""
    lengths, options = stream
    places = [*range(len(lengths))]
    steps = [*steps_of(ShardState(), places, lengths, options, group)]
    event(f"packs that wait: {any(state.packs for _, state in steps)}")
    event(f"read ahead: {any(state.ahead for _, state in steps)}")
    for number, (_, state) in enumerate(steps[:-1]):
        assert steps[number + 1 :] == [*steps_of(state, places[state.read :], lengths, options, group)]


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.randoms(use_true_random=False)), max_size=3))
def test_what_no_shard_has_read_stays_in_order(num_places, parts):
    """Each place is read once, or is left."""
    segments, read = [], []
    for num_shards, random in parts:
        left = unread_places(num_places, segments).tolist()
        shares = [left[shard::num_shards] for shard in range(num_shards)]
        reads = tuple(random.randint(0, len(share)) for share in shares)
        read += [place for share, count in zip(shares, reads, strict=True) for place in share[:count]]
        segments.append(StreamSegment(reads=reads))

    left = unread_places(num_places, segments).tolist()

    assert sorted(left) == left
    assert [*range(num_places)] == sorted([*read, *left])


@pytest.mark.parametrize("state", [{"next_shard": 1}, {"next_shard": -1}, {"trained": -1}])
def test_progress_of_no_rank_is_refused(state):
    with pytest.raises(ValueError, match="is next, after"):
        RankState((ShardState(),), **state)


@given(streams(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=4), st.data())
def test_no_sample_is_lost_or_trained_twice_on_other_ranks(stream, shapes, data):
    """Over any chain of ranks and workers; what waits is trained first."""
    lengths, options = stream
    trained: list[int] = []
    progress, ranks = StreamProgress(), (RankState(),)
    for shape in pairwise([(1, 1), *shapes, None]):
        before, now = shape
        world_size, per_rank = before
        shards = list(chain.from_iterable(rank.shards for rank in ranks)) or [ShardState()] * world_size * per_rank
        left = unread_places(len(lengths), progress.segments).tolist()
        for shard, state in enumerate(shards):
            places = left[shard :: len(shards)][state.read :]
            steps = [((), state), *steps_of(state, places, lengths, options, data.draw(st.integers(1, 3)))]
            stop = len(steps) if now is None else data.draw(st.integers(1, len(steps)))
            trained += chain.from_iterable(places_in(pack for pack, _ in steps[:stop]))
            shards[shard] = steps[stop - 1][1]
        counts = sum((state.counts for state in shards), StreamCounts())
        assert (
            counts.packs
            <= len(trained)
            == counts.samples - counts.dropped - counts.skipped - sum(len(state.admitted_items) for state in shards)
        )
        ranks = tuple(RankState(tuple(shards[n : n + per_rank])) for n in range(0, len(shards), per_rank))
        if now is not None:
            waiting = sorted(item.place for state in shards for item in state.waiting_items)
            event(f"samples wait: {len(waiting) > 1}")
            progress, ranks = reshard(progress, ranks, world_size=now[0], shards_per_rank=now[1])
            again = [[item.place for item in state.ahead] for rank in ranks for state in rank.shards]
            assert [waiting[shard :: len(again)] for shard in range(len(again))] == again

    assert dict.fromkeys(trained, 1) == Counter(trained)
    assert len(lengths) == len(trained) + counts.dropped + counts.skipped == counts.samples
    assert sum(lengths) == counts.tokens


@given(st.integers(1, 4), st.integers(1, 4))
def test_totals_stay_between_epochs(before, now):
    """Their sum over ranks is the same; no shard has begun."""
    earlier = [StreamCounts(samples=rank) for rank in range(before)]
    ranks = [RankState(earlier=counts, trained=rank) for rank, counts in enumerate(earlier)]

    progress, assigned = reshard(StreamProgress(before, 1, step=3, epoch=1), ranks, world_size=now, shards_per_rank=2)

    assert StreamProgress(now, 2, step=3, epoch=1) == progress
    assert now == len(assigned)
    assert not any(rank.shards for rank in assigned)
    assert sum(earlier, StreamCounts()) == sum((rank.earlier for rank in assigned), StreamCounts())
    assert sum(range(before)) == sum(rank.trained for rank in assigned)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(2, 20))
def test_a_pack_that_fills_no_step_is_dropped_instead_of_trained(lengths, packing_length):
    """Its samples, and its tokens; the numbers of the others stay."""
    others = StreamCounts(samples=9, packs=2, filled_tokens=7, tokens=99, underfilled_packs=1)
    options = StreamOptions(packing_length=packing_length)
    dropped = (others + StreamCounts.from_pack(lengths, options)).without_pack(lengths, options)

    expected = {"dropped": len(lengths), "dropped_packs": 1, "dropped_tokens": sum(lengths)}
    assert attrs.evolve(others, **expected) == dropped


def test_one_dropped_pack_is_never_too_much():
    """The end of a stream leaves one; from two on the share of tokens decides."""
    limit = Decimal("0.1")
    assert not StreamCounts(tokens=100, dropped_packs=1, dropped_tokens=50).dropped_more_than(limit)
    assert not StreamCounts(tokens=100, dropped_packs=2, dropped_tokens=10).dropped_more_than(limit)
    assert StreamCounts(tokens=100, dropped_packs=2, dropped_tokens=11).dropped_more_than(limit)


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
)
def test_a_stream_of_other_inputs_differs_by_name(then, now):
    stored = StreamState(Fingerprint(then), StreamProgress(step=4))

    names = [one.key for one in stored.differences(StreamState(Fingerprint(now), StreamProgress()))]

    assert sorted(key for key in {*then, *now} if then.get(key) != now.get(key)) == names
