"""A mix is exact, deterministic, and another one each epoch, by samples and by tokens."""

import hashlib
import math
from decimal import Decimal
from fractions import Fraction
from itertools import product

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from packplan.core.mixes import (
    Mix,
    Mixes,
    Source,
    draw_in_order,
    measured_mixes_faults,
    mixes_faults,
    quotas,
    select_lowest_keys,
    select_records,
    stream_faults,
)

ratios = st.sampled_from(["0.1", "0.25", "1", "3", "0.7", "0.05"]).map(Decimal)

seeds, epochs = st.integers(0, 5), st.integers(0, 5)


def sources_of(number, **fields) -> st.SearchStrategy[Source]:
    return st.builds(Source, jsonl=st.just(f"s{number}"), replacement=st.booleans(), **fields)


@st.composite
def mixes_by_samples(draw) -> tuple[Mixes, list[int]]:
    """A mix by samples, how many samples each source has, and perhaps how many an epoch has."""
    sizes, sources = draw(st.lists(st.integers(1, 80), min_size=1, max_size=5)), []
    for number, size in enumerate(sizes):
        one = draw(sources_of(number, ratio=ratios, cap=st.none() | st.integers(1, 100)))
        if draw(st.booleans()):
            count = draw(st.integers(1, 2 * size if one.replacement else size))
            one = attrs.evolve(one, ratio=None, cap=None, count=count)
        sources.append(one)
    mix = Mix(sources=tuple(sources), samples_per_epoch=draw(st.none() | st.integers(1, 200)))
    return Mixes((mix,), is_curriculum=False), sizes


@st.composite
def mixes_by_tokens(draw) -> tuple[Mixes, list[int], list[int]]:
    """A mix by tokens, all lengths, some of which cannot be drawn, and the sources' sizes."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 31, sum(sizes)).tolist()
    caps = st.none() | st.integers(1, 300)
    sources = draw(st.tuples(*(sources_of(number, ratio=ratios, cap=caps) for number in range(len(sizes)))))
    mix = Mix(sources=sources, by="tokens", tokens_per_epoch=draw(st.none() | st.integers(1, 2000)))
    return Mixes((mix,), is_curriculum=False), lengths, sizes


ONE = Decimal(1)


def mix_of(*sources: dict, **keys) -> Mix:
    """A mix of sources a, b …, each of its keys."""
    made = [Source(**{"jsonl": name, **one}) for name, one in zip("abc", sources, strict=False)]
    return Mix(sources=tuple(made), **keys)


def paths(faults) -> list[str]:
    return [fault.path for fault in faults]


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
def test_an_order_draws_its_quotas_and_a_selection_its_samples(given_mix, seed, epoch):
    """
    Without replacement each sample once at most. A selection is ascending, and records that cannot
    be drawn are as if they were not there.
    """
    mix, sizes = attrs.evolve(given_mix[0].entries[0], samples_per_epoch=None), given_mix[1]
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([rng.permutation(2 * size) < size for size in sizes]).astype(np.int64)

    drawn = draw_in_order(Mixes((mix,)), sizes, seed=seed, epoch=epoch)

    times = in_files(sizes, np.bincount(drawn, minlength=sum(sizes)))
    selection = select_records(Mixes((mix,)), lengths, [2 * size for size in sizes], seed=seed, epoch=epoch)
    assert quotas(mix, sizes) == [part.sum() for part in times]
    assert all(one.replacement or part.max() <= 1 for one, part in zip(mix.sources, times, strict=True))
    assert np.sort(np.flatnonzero(lengths)[drawn]).tolist() == selection.tolist()
    assert np.dtype(np.int64) == selection.dtype


@given(mixes_by_tokens(), seeds, epochs)
def test_shares_of_tokens_are_within_one_sample(given_mix, seed, epoch):
    """Without passing a cap; of no record that cannot be drawn; refused where none fits."""
    mixes, lengths, sizes = given_mix
    (mix,) = mixes.entries
    lengths = np.array(lengths)
    own = in_files(sizes, lengths)
    refused = [*mixes_faults(mixes, sizes), *measured_mixes_faults(mixes, lengths, sizes, 1)]
    event(f"refused: {bool(refused)}")
    if refused:
        return
    wanted = quotas(mix, [int(part.sum()) for part in own])

    selection = select_records(mixes, lengths, sizes, seed=seed, epoch=epoch)

    assert selection.tolist() == select_records(mixes, lengths, sizes, seed=seed, epoch=epoch).tolist()
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


keys_of_samples = st.builds(lambda high, low: (high << 48) + low, st.sampled_from([0, 1, 2, 65_535]), st.integers(0, 4))
"""Random keys, many of which are equal, or are equal in their highest bits."""


@example(samples=[(0, 1)], hundredths=100, room=None)
@example(samples=[(0, 1), (1, 1)], hundredths=75, room=None)  # 1 and 2 are as near to 3 / 2
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

    assert sorted(order[:num].tolist()) == select_lowest_keys(keys.astype(np.uint64), weights, quota, cap=cap).tolist()


MEANT = "meant? CHANGELOG.md says so, and a version in EpochRecipe.fingerprint_inputs, that stored plans are made again"


@pytest.mark.parametrize(
    ("draw", "by", "digest"),
    [
        (select_records, "samples", "03dc04dc9115da2a"),
        (select_records, "tokens", "022990bf25de196f"),
        (draw_in_order, "samples", "9ae41f384afedbe2"),
    ],
)
def test_golden_draws(draw, by, digest):
    """From seed and epoch alone, in every process; other draws would not resume those of before."""
    ordered = draw is draw_in_order
    second = {"count": 3000} if ordered else {"ratio": Decimal("0.3"), "cap": 4000}
    mix = mix_of({"ratio": Decimal("0.5")}, second, {"ratio": Decimal("0.2"), "replacement": True}, by=by)
    lengths = [] if ordered else [np.arange(30_000) * 7919 % 97]
    drawn = [draw(Mixes((mix,)), *lengths, [10_000] * 3, seed=3, epoch=epoch) for epoch in range(3)]
    parts = [part for one in drawn for part in (divmod(one, 10_000) if ordered else [one])]

    assert digest == hashlib.sha256(np.concatenate(parts).tobytes()).hexdigest()[:16], MEANT


def test_each_epoch_has_its_entry_and_the_last_stays():
    """The files of all entries count as records; each has the key that names it first."""
    entries = ((("b", 2),), (("a", 1), ("b", 1)), (("c", 3),))
    mixes = Mixes(tuple(Mix(sources=tuple(Source(jsonl=j, count=n) for j, n in entry)) for entry in entries))
    sizes, lengths = [4, 3, 3], np.arange(1, 11)

    assert ("b", "a", "c") == mixes.files
    places = [f"curriculum[{entry}].sources[0].jsonl" for entry in range(3)]
    assert dict(zip("bac", places, strict=True)) == mixes.file_keys
    for epoch, counts in enumerate([[2, 0, 0], [1, 1, 0], [0, 0, 3], [0, 0, 3]]):
        for drawn in (
            select_records(mixes, lengths, sizes, seed=0, epoch=epoch), draw_in_order(mixes, sizes, seed=0, epoch=epoch)
        ):  # fmt: skip
            assert counts == [part.sum() for part in in_files(sizes, np.bincount(drawn, minlength=10))]


@pytest.mark.parametrize(
    ("mix", "path"),
    [
        (mix_of({}), "sources[0]"), (mix_of({"ratio": ONE, "count": 1}), "sources[0]"),
        *((mix_of({"ratio": Decimal(ratio)}), "sources[0].ratio") for ratio in (0, -1, "nan", "inf")),
        *((mix_of({"count": count}), "sources[0].count") for count in (0, 10)),
        *((mix_of({**one, "cap": cap}), "sources[0].cap") for one, cap in (({"ratio": ONE}, 0), ({"count": 1}, 2))),
        (mix_of({"ratio": ONE}, {"ratio": ONE}, {"jsonl": "a", "count": 1}), "sources[2].jsonl"),
        (mix_of(), "sources"), (mix_of({"ratio": ONE}, by="tokens", samples_per_epoch=3), "samples_per_epoch"),
        (mix_of({"ratio": ONE}, tokens_per_epoch=3), "tokens_per_epoch"),
        (mix_of({"ratio": ONE}, by="tokens", tokens_per_epoch=0), "tokens_per_epoch"),
        (mix_of({"count": 1}, by="tokens"), "sources[0].count"),
        (mix_of({"ratio": ONE, "cap": 4}, by="tokens", tokens_per_epoch=5), "tokens_per_epoch"),
        (mix_of({"ratio": ONE, "cap": 4}, samples_per_epoch=5), "samples_per_epoch"),
        *((mix_of({"count": 5}, samples_per_epoch=total), "samples_per_epoch") for total in (0, 2, 99)),
        *((mix_of({"ratio": ONE}, {"count": 5}, samples_per_epoch=total), path)
          for total, path in ((2, "samples_per_epoch"), (5, "sources[0]"), (50, "sources[0]"))),
        (mix_of({"count": 10**9, "replacement": True}), "sources[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_mix_is_named_by_its_key(mix, path):
    """Before samples are measured, also in a later entry; each source has nine."""
    mixes = Mixes((mix_of({"ratio": ONE}), mix_of({"ratio": ONE}), mix))

    alone = Mixes((mix,), is_curriculum=False)

    assert [path] == paths(mixes_faults(alone, [9] * len(alone.files)))
    assert [f"curriculum[2].{path}"] == paths(mixes_faults(mixes, [9] * len(mixes.files)))


def test_what_gives_no_sample_or_more_than_memory_holds_is_refused():
    """A stream draws before it measures, so it cannot count tokens."""
    one, by_tokens = mix_of({"ratio": ONE}), mix_of({"ratio": ONE}, by="tokens")
    for by, total in product(("tokens", "samples"), (999_999_999, 10**8)):
        mix = mix_of({"ratio": ONE, "replacement": True}, by=by, **{f"{by}_per_epoch": total})
        found = measured_mixes_faults(Mixes((mix,), is_curriculum=False), [4, 6], [2], 1)
        assert ["sources[0]"] * (total > 10**8) == paths(found)

    assert ["curriculum"] == paths(mixes_faults(Mixes(()), []))
    assert ["curriculum[0].sources[0]"] == paths(mixes_faults(Mixes((one,)), [0]))
    assert ["curriculum[1].by"] == paths(stream_faults(Mixes((one, by_tokens))))


@pytest.mark.parametrize(
    ("ratio", "total", "lengths", "cap", "fault"),
    [
        (1, None, [0, 0], None, "sources[0]"),
        (1, 5, [9, 9], None, "sources[0]"),
        (1, 20, [9, 0], None, "sources[0]"),
        (1, None, [9, 0], 9, "sources[0]"),
        (1, None, [7, 9], 8, "sources[0].cap"),
        (1, 18, [9, 0], None, None),
        (10, None, [9, 0], 9, None),
    ],
)
def test_faults_that_lengths_decide_are_named(ratio, total, lengths, cap, fault):
    """By their place; entries of epochs that are not trained have none."""
    good = {"jsonl": "b", "ratio": ONE, "replacement": True}
    last = mix_of({"ratio": Decimal(ratio), "cap": cap}, good, by="tokens", tokens_per_epoch=total)
    mixes = Mixes((mix_of(good, by="tokens"), last))

    assert not list(measured_mixes_faults(mixes, [2, *lengths], [1, 2], 1))
    assert [f"curriculum[1].{fault}"] * bool(fault) == paths(measured_mixes_faults(mixes, [2, *lengths], [1, 2], 2))
