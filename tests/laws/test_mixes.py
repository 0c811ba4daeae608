"""A mix is exact, deterministic, and another one each epoch, by samples and by tokens."""

import hashlib
import math
from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.mixes import (
    Mix,
    Mixes,
    Source,
    drawn_faults,
    lowest,
    mixes_faults,
    quotas,
    schedule,
    select,
    stream_faults,
)

ratios = st.sampled_from(["0.1", "0.25", "1", "3", "0.7", "0.05"]).map(Decimal)

seeds, epochs = st.integers(0, 5), st.integers(0, 5)


@st.composite
def mixes_by_samples(draw) -> tuple[Mixes, list[int]]:
    """A mix by samples, how many samples each source has, and perhaps how many an epoch has."""
    sizes = draw(st.lists(st.integers(1, 80), min_size=1, max_size=5))
    sources = []
    for number, size in enumerate(sizes):
        replacement = draw(st.booleans())
        if draw(st.booleans()):
            cap = draw(st.none() | st.integers(1, 100))
            sources.append(Source(jsonl=f"s{number}", ratio=draw(ratios), cap=cap, replacement=replacement))
        else:
            count = draw(st.integers(1, 2 * size if replacement else size))
            sources.append(Source(jsonl=f"s{number}", count=count, replacement=replacement))
    mix = Mix(sources=tuple(sources), samples_per_epoch=draw(st.none() | st.integers(1, 200)))
    return Mixes((mix,), is_curriculum=False), sizes


@st.composite
def mixes_by_tokens(draw) -> tuple[Mixes, list[int], list[int]]:
    """A mix by tokens, all lengths, some of which cannot be drawn, and the sources' sizes."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(0, 30), min_size=sum(sizes), max_size=sum(sizes)))
    sources = [
        Source(
            jsonl=f"s{number}",
            ratio=draw(ratios),
            cap=draw(st.none() | st.integers(1, 300)),
            replacement=draw(st.booleans()),
        )
        for number in range(len(sizes))
    ]
    mix = Mix(sources=tuple(sources), by="tokens", tokens_per_epoch=draw(st.none() | st.integers(1, 2000)))
    return Mixes((mix,), is_curriculum=False), lengths, sizes


def faults_of(mixes: Mixes, sizes: list[int]) -> list[str]:
    return [str(fault) for fault in mixes_faults(mixes, sizes)]


def in_files(sizes: list[int], values: np.ndarray) -> list[np.ndarray]:
    """Return an array of one value a record, file by file."""
    return np.split(values, np.cumsum(sizes)[:-1])


@given(mixes_by_tokens())
def test_shares_are_as_high_as_their_ratio_up_to_a_cap(given_mix):
    """The total is reached; without one, the first source to run out is drawn whole."""
    mixes, lengths, sizes = given_mix
    (mix,) = mixes.entries
    available = [int(part.sum()) for part in in_files(sizes, np.array(lengths))]
    if "tokens_per_epoch" in {fault.path for fault in mixes_faults(mixes, sizes)}:
        return
    shares = quotas(mix, available)
    rows = list(zip(mix.sources, available, shares, strict=True))
    levels = {share / Fraction(one.ratio) for one, _, share in rows if share != one.cap}
    event(f"caps: {sum(share == one.cap for one, _, share in rows)}")

    assert len(levels) <= 1
    assert all(share / Fraction(one.ratio) <= max(levels, default=math.inf) for one, _, share in rows)
    assert all(share <= (one.cap or share) for one, _, share in rows)
    limiting = [(size, share) for one, size, share in rows if not one.replacement and (one.cap or math.inf) > size]
    if mix.tokens_per_epoch is not None:
        assert mix.tokens_per_epoch == sum(shares)
    elif limiting:
        assert any(size == share for size, share in limiting)
        assert all(size >= share for size, share in limiting)
    else:
        assert sum(min(size, one.cap or size) for one, size, _ in rows) == sum(shares)


@given(mixes_by_samples())
def test_samples_are_exact_shares_to_within_one(given_mix):
    """Counts and caps hold. A source that is too small for its share is named."""
    mixes, sizes = given_mix
    (mix,) = mixes.entries
    whole = quotas(mix, sizes)
    found = {fault.path for fault in mixes_faults(mixes, sizes)}
    rows = list(zip(mix.sources, sizes, whole, strict=True))
    too_small = [quota > size and not one.replacement for one, size, quota in rows]
    event(f"a source is too small: {any(too_small)}")
    if "samples_per_epoch" in found:
        return
    as_tokens = attrs.evolve(mix, by="tokens", samples_per_epoch=None)
    exact = quotas(attrs.evolve(as_tokens, tokens_per_epoch=int(sum(whole))), sizes)

    assert {f"sources[{n}]" for n, quota in enumerate(whole) if not quota or too_small[n]} == found
    for (one, _, quota), share in zip(rows, exact, strict=True):
        assert quota == (one.count or int(quota))
        assert quota <= (one.cap or quota)
        assert one.count or abs(quota - share) < 1
    counts = sum(one.count or 0 for one in mix.sources)
    total = math.floor(sum(quotas(as_tokens, sizes))) + counts
    assert (total if mix.samples_per_epoch is None else mix.samples_per_epoch) == sum(whole)


@given(mixes_by_samples(), seeds, epochs)
def test_a_schedule_draws_its_quotas_in_a_mixed_order(given_mix, seed, epoch):
    """Without replacement each sample once at most; the same again for the same seed and epoch."""
    mix, sizes = attrs.evolve(given_mix[0].entries[0], samples_per_epoch=None), given_mix[1]
    mixes = Mixes((mix,))

    drawn = schedule(mixes, sizes, seed=seed, epoch=epoch)

    again = schedule(mixes, sizes, seed=seed, epoch=epoch)
    assert np.array_equal(drawn.source, again.source)
    assert np.array_equal(drawn.index, again.index)
    assert quotas(mix, sizes) == np.bincount(drawn.source, minlength=len(sizes)).tolist()
    for number, (source, size) in enumerate(zip(mix.sources, sizes, strict=True)):
        indices = drawn.index[drawn.source == number]
        assert not indices.size or 0 <= indices.min() <= indices.max() < size
        assert source.replacement or len(set(indices.tolist())) == indices.size


@given(mixes_by_samples(), seeds, epochs, st.data())
def test_a_selection_has_the_samples_of_the_schedule(given_mix, seed, epoch, data):
    """Each as often, ascending; records that cannot be drawn are as if they were not there."""
    mix, sizes = attrs.evolve(given_mix[0].entries[0], samples_per_epoch=None), given_mix[1]
    mixes = Mixes((mix,))
    drawn = schedule(mixes, sizes, seed=seed, epoch=epoch)
    spread = [[*data.draw(st.lists(st.just(0), max_size=2)), 1] for _ in range(sum(sizes))]
    lengths = np.array([length for part in spread for length in part])
    drawable = np.flatnonzero(lengths)
    spread_sizes = [int(sum(part)) for part in in_files(sizes, np.array(list(map(len, spread))))]

    selection = select(mixes, lengths, spread_sizes, seed=seed, epoch=epoch)

    assert np.dtype(np.int64) == selection.dtype
    expected = drawable[np.cumsum([0, *sizes])[drawn.source] + drawn.index]
    assert np.sort(expected).tolist() == selection.tolist()


@given(mixes_by_tokens(), seeds, epochs)
def test_shares_of_tokens_are_within_one_sample(given_mix, seed, epoch):
    """Without passing a cap; of no record that cannot be drawn; refused where none fits."""
    mixes, lengths, sizes = given_mix
    (mix,) = mixes.entries
    lengths = np.array(lengths)
    own = in_files(sizes, lengths)
    refused = [*mixes_faults(mixes, sizes), *drawn_faults(mixes, lengths, sizes, 1)]
    event(f"refused: {bool(refused)}")
    if refused:
        return
    wanted = quotas(mix, [int(part.sum()) for part in own])

    selection = select(mixes, lengths, sizes, seed=seed, epoch=epoch)

    assert selection.tolist() == select(mixes, lengths, sizes, seed=seed, epoch=epoch).tolist()
    assert np.all(np.diff(selection) >= 0)
    assert np.all(lengths[selection] > 0)
    times = in_files(sizes, np.bincount(selection, minlength=sum(sizes)))
    for source, quota, part, drawn in zip(mix.sources, wanted, own, times, strict=True):
        tokens = int(part @ drawn)
        event(f"a source is drawn whole: {tokens == part.sum()}")
        assert abs(tokens - quota) < part.max()
        assert tokens <= (source.cap or tokens)
        assert drawn.any()
        assert source.replacement or drawn.max() <= 1


keys_of_samples = st.builds(lambda high, low: (high << 48) + low, st.integers(0, 4), st.integers(0, 4))
"""Random keys, many of which are equal, or are equal in their highest bits."""


@example(samples=[(0, 1)], hundredths=100, room=None)
@given(
    samples=st.lists(st.tuples(keys_of_samples, st.integers(1, 30)), min_size=1, max_size=12),
    hundredths=st.integers(0, 110),
    room=st.none() | st.integers(0, 2),
)
def test_the_lowest_keys_sum_up_to_a_quota(samples, hundredths, room):
    """As a full sort finds: the lower of two nearest sums, below the cap, never empty."""
    keys, weights = (np.array(values) for values in zip(*samples, strict=True))
    quota = Fraction(int(weights.sum()) * hundredths // 50, 2)  # halves have two sums as near
    order = np.argsort(keys, kind="stable")
    cap = None if room is None else max(math.ceil(quota), int(weights[order[0]])) + room
    sums = [0, *np.cumsum(weights[order]).tolist()]
    allowed = [n for n, total in enumerate(sums) if bool(n) >= bool(quota) and total <= (cap or total)]
    num = min(allowed, key=lambda n: abs(sums[n] - quota))
    event(f"the cap forbids the nearest sum: {num < min(range(len(sums)), key=lambda n: abs(sums[n] - quota))}")

    assert sorted(order[:num].tolist()) == lowest(keys.astype(np.uint64), weights, quota, cap=cap).tolist()


@pytest.mark.parametrize(
    ("by", "digest"),
    [("samples", "03dc04dc9115da2a"), ("tokens", "022990bf25de196f")],
)
def test_golden_selections(by, digest):
    """From seed and epoch alone, in every process; other draws would not resume those of before."""
    sources = [("a", "0.5", None, False), ("b", "0.3", 4000, False), ("c", "0.2", None, True)]
    mix = Mix(
        sources=tuple(Source(jsonl=j, ratio=Decimal(r), cap=cap, replacement=again) for j, r, cap, again in sources),
        by=by,
    )
    lengths = np.arange(30_000) * 7919 % 97
    drawn = [select(Mixes((mix,)), lengths, [10_000] * 3, seed=3, epoch=epoch) for epoch in range(3)]

    assert digest == hashlib.sha256(np.concatenate(drawn).tobytes()).hexdigest()[:16], "meant? CHANGELOG.md says so"


def test_golden_schedules():
    """A stream has these samples in this order."""
    sources = (
        Source(jsonl="a", ratio=Decimal("0.5")),
        Source(jsonl="b", count=3000),
        Source(jsonl="c", ratio=Decimal("0.2"), replacement=True),
    )
    mix = Mix(sources=sources)
    drawn = [schedule(Mixes((mix,)), [10_000] * 3, seed=3, epoch=epoch) for epoch in range(3)]
    joined = np.concatenate([values for one in drawn for values in (one.source, one.index)])

    assert "9ae41f384afedbe2" == hashlib.sha256(joined.tobytes()).hexdigest()[:16]


def test_each_epoch_has_its_entry_and_the_last_stays():
    """The files of all entries count as records, whichever of them an epoch draws."""
    entries = ((("b", 2),), (("a", 1), ("b", 1)), (("c", 3),))
    mixes = Mixes(tuple(Mix(sources=tuple(Source(jsonl=j, count=n) for j, n in entry)) for entry in entries))
    sizes = [4, 3, 3]
    lengths = np.arange(1, 11)

    assert ("b", "a", "c") == mixes.files
    for epoch, counts in enumerate([[2, 0, 0], [1, 1, 0], [0, 0, 3], [0, 0, 3]]):
        selection = select(mixes, lengths, sizes, seed=0, epoch=epoch)
        drawn = schedule(mixes, sizes, seed=0, epoch=epoch)
        assert counts == np.histogram(selection, np.cumsum([0, *sizes]))[0].tolist()
        assert counts == np.bincount(drawn.source, minlength=3).tolist()


ONE = Decimal(1)


@pytest.mark.parametrize(
    ("source", "size", "says"),
    [
        (Source(jsonl="a"), 5, "either a ratio or a count"),
        (Source(jsonl="a", ratio=ONE, count=1), 5, "either a ratio or a count"),
        (Source(jsonl="a", ratio=Decimal(0)), 5, "above 0"),
        (Source(jsonl="a", ratio=Decimal(-1)), 5, "above 0"),
        (Source(jsonl="a", ratio=Decimal("nan")), 5, "above 0"),
        (Source(jsonl="a", ratio=Decimal("inf")), 5, "above 0"),
        (Source(jsonl="a", count=0), 5, "at least 1"),
        (Source(jsonl="a", count=6), 5, "a has 5 samples: lower it, or set replacement: true"),
        (Source(jsonl="a", ratio=ONE), 0, "has no record"),
        (Source(jsonl="a", ratio=ONE, cap=0), 5, "cap: is 0, but has to be at least 1"),
        (Source(jsonl="a", count=1, cap=2), 5, "limits what a ratio gives, but the source has a count: remove one"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(source, size, says):
    """By its place, also in a later entry of a curriculum."""
    mix = Mix(sources=(source,))
    (fault,) = mixes_faults(Mixes((mix,), is_curriculum=False), [size])
    good = Mix(sources=(Source(jsonl="b", ratio=ONE),))
    (later,) = mixes_faults(Mixes((good, good, mix)), [1, size])

    assert fault.path.startswith("sources[0]")
    assert says in str(fault)
    assert f"curriculum[2].{fault}" == str(later)


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        (Mix(sources=(Source(jsonl="a", ratio=ONE),), by="tokens", samples_per_epoch=3),
         "samples_per_epoch: is set, but the mix is by tokens: set tokens_per_epoch instead"),
        (Mix(sources=(Source(jsonl="a", ratio=ONE),), tokens_per_epoch=3),
         "tokens_per_epoch: is set, but the mix is by samples: set samples_per_epoch instead"),
        (Mix(sources=(Source(jsonl="a", ratio=ONE),), by="tokens", tokens_per_epoch=0),
         "tokens_per_epoch: is 0, but has to be at least 1"),
        (Mix(sources=(Source(jsonl="a", count=1),), by="tokens"),
         "sources[0].count: is a number of samples, but the mix is by tokens: set a ratio, and perhaps a cap"),
        (Mix(sources=(Source(jsonl="a", ratio=ONE, cap=4),), by="tokens", tokens_per_epoch=5),
         "tokens_per_epoch: is 5, but no source takes more than its cap, 4 in all: lower it, or raise a cap"),
        (Mix(sources=(Source(jsonl="a", ratio=ONE, cap=4),), samples_per_epoch=5),
         "samples_per_epoch: is 5, but no source takes more than its cap, 4 in all: lower it, or raise a cap"),
        (Mix(sources=()), "sources: is empty: name at least one"),
        (Mix(sources=(Source(jsonl="a", count=1),), samples_per_epoch=0),
         "samples_per_epoch: is 0, but has to be at least 1"),
        (Mix(sources=(Source(jsonl="a", ratio=ONE), Source(jsonl="b", ratio=ONE), Source(jsonl="a", count=1))),
         "sources[2].jsonl: is a, as sources[0].jsonl is: name each file once"),
        *((Mix(sources=(*[Source(jsonl="a", ratio=ratio)] * bool(ratio), Source(jsonl="b", count=count)),
               samples_per_epoch=total), says)
          for count, ratio, total, says in (
              (5, ONE, 2, "samples_per_epoch: is 2, but the counts alone are 5"),
              (5, None, 99, "samples_per_epoch: is 99, but the counts are 5, and no source has a ratio"),
              (5, ONE, 5, "sources[0]: (a) has a share of no sample"),
              (5, ONE, 50, "sources[0]: (a) has 9 samples, but its share is 45"),
          )),
    ],
)  # fmt: skip
def test_units_and_caps_agree_with_the_total(mix, says):
    """Or their key is named, unmeasured; so are empty mixes, and files named twice."""
    mixes = Mixes((mix,), is_curriculum=False)

    (found,) = faults_of(mixes, [9] * len(mixes.files))
    assert found.startswith(says)
    assert ["curriculum: is empty: name at least one mix"] == faults_of(Mixes(()), [])


BELOW_9 = "below its shortest sample (9 tokens) in an epoch:"


@pytest.mark.parametrize(
    ("ratio", "total", "lengths", "cap", "says"),
    [
        (1, None, [0, 0], None, "(a) has no sample to draw, since all its records are bad or too long: remove it"),
        (1, 5, [9, 9], None, f"(a) has a share {BELOW_9} raise tokens_per_epoch"),
        (1, 20, [9, 0], None, "(a) has 9 tokens, but its share is 10: set replacement: true, or a cap"),
        (1, None, [9, 0], 9, f"(a) has a share {BELOW_9} raise its ratio"),
        (1, None, [7, 9], 8, "cap: is 8, but the longest sample of a has 9 tokens: raise it"),
        (1, 18, [9, 0], None, ""),
        (10, None, [9, 0], 9, ""),
    ],
)  # fmt: skip
def test_faults_that_lengths_decide_are_said(ratio, total, lengths, cap, says):
    """By their place; entries of epochs that are not trained have none."""
    good = Source(jsonl="b", ratio=ONE, replacement=True)
    two = (Source(jsonl="a", ratio=Decimal(ratio), cap=cap), good)
    mixes = Mixes((Mix(sources=(good,), by="tokens"), Mix(sources=two, by="tokens", tokens_per_epoch=total)))

    assert not list(drawn_faults(mixes, [2, *lengths], [1, 2], 1))
    found = [str(fault) for fault in drawn_faults(mixes, [2, *lengths], [1, 2], 2)]
    assert [f"curriculum[1].sources[0]{'.' if says.startswith('cap') else ': '}{says}"] * bool(says) == found


@pytest.mark.parametrize(("by", "times"), [("tokens", "199,999,999"), ("samples", "999,999,999")])
def test_no_epoch_draws_more_than_memory_holds(by, times):
    """With replacement, the data do not limit how often."""
    mix = Mix(sources=(Source(jsonl="a", ratio=ONE, replacement=True),), by=by, **{f"{by}_per_epoch": 999_999_999})

    def found(mix):
        return list(map(str, drawn_faults(Mixes((mix,), is_curriculum=False), [4, 6], [2], 1)))

    says = f"sources[0]: (a) would be drawn from {times} times in an epoch, above 100,000,000: lower {by}_per_epoch"
    assert [says] == found(mix)
    assert not found(attrs.evolve(mix, **{f"{by}_per_epoch": 10**8}))
    counted = Mix(sources=(Source(jsonl="a", count=10**9, replacement=True),))
    (fault,) = mixes_faults(Mixes((counted,)), [2])
    assert str(fault).endswith(
        "would be drawn from 1,000,000,000 times in an epoch, above 100,000,000: lower its count"
    )


def test_streams_take_no_mix_by_tokens():
    """Since nothing is measured before it is drawn."""
    by_samples = Mix(sources=(Source(jsonl="a", ratio=ONE),))

    assert ["curriculum[1].by"] == [
        fault.path for fault in stream_faults(Mixes((by_samples, attrs.evolve(by_samples, by="tokens"))))
    ]


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_place_of_a_file_is_where_it_is_named_first(named):
    """In whichever entry that is."""
    mixes = Mixes(tuple(Mix(sources=tuple(Source(jsonl=file, ratio=ONE) for file in entry)) for entry in named))
    entries = [(k, n, file) for k, entry in enumerate(named) for n, file in enumerate(entry)]

    assert set(mixes.files) == set(mixes.places)
    for file, place in mixes.places.items():
        first = next((k, n) for k, n, other in entries if other == file)
        assert place == "curriculum[{}].sources[{}].jsonl".format(*first)


def test_another_epoch_is_another_draw_and_another_order():
    """And so is another seed."""
    one = Decimal(1)
    mix = Mix(sources=(Source(jsonl="a", ratio=one), Source(jsonl="b", ratio=one, replacement=True)))
    drawn = [schedule(Mixes((mix,)), [100, 100], seed=seed, epoch=epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]

    assert 3 == len({tuple(one.source.tolist()) for one in drawn})
    assert 3 == len({tuple(np.sort(one.index[one.source == 1]).tolist()) for one in drawn})
    assert 3 == len({tuple(one.index[one.source == 0].tolist()) for one in drawn})
    assert (200, 200) == (len(drawn[0]), len(drawn[0].index))
