"""Which records a data set's name draws: all, so many, and which of them are evaluated."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.samples import DataEntry, draw_records, parse_entry

sizes = st.lists(st.integers(3, 40), min_size=1, max_size=4)


@given(sizes, st.data(), st.sampled_from([0.0, 0.1, 0.5]), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_draw_has_as_many_records_as_it_says_and_evaluates_none_that_it_trains(sizes, data, ratio, shuffle, seed):
    """Of each data set its count, a part of it for evaluation; the same for the same seed."""
    counts = [data.draw(st.none() | st.integers(3, 100)) for _ in sizes]
    event(
        f"some data set is repeated: {any(count and count > size for size, count in zip(sizes, counts, strict=True))}"
    )

    drawn = draw_records(sizes, counts, split_ratio=ratio, shuffle=shuffle, seed=seed)

    for size, count, one in zip(sizes, counts, drawn, strict=True):
        assert (count or size) == len(one.train) + len(one.val)
        assert not set(one.train.tolist()) & set(one.val.tolist())
        assert len(set(one.val.tolist())) == len(one.val)
        assert {*one.train.tolist(), *one.val.tolist()} <= set(range(size))
        assert (len(one.val) > 0) == (ratio > 0)
    again = draw_records(sizes, counts, split_ratio=ratio, shuffle=shuffle, seed=seed)
    assert [one.train.tolist() for one in drawn] == [one.train.tolist() for one in again]


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("a.jsonl", DataEntry("a.jsonl")),
        ("a.jsonl#7", DataEntry("a.jsonl", count=7)),
        ("a.jsonl#999999999999", DataEntry("a.jsonl", count=10**12 - 1)),
        ("org/name:a/b#5", DataEntry("org/name", ("a", "b"), 5)),
        ("MS::org/name:all", DataEntry("org/name", ("all",), hub="ms")),
        ("there#7", DataEntry("there#7")),
        ("there:x#7", DataEntry("there", ("x",), 7)),
    ],
)
def test_a_name_is_read_as_ms_swift_reads_it(text, entry):
    """What exists is taken whole, whatever it holds."""
    assert entry == parse_entry(text, exists=lambda name: name in {"there#7", "there"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("X::a", "begins with X::"),
        ("a#0", "asks for #0"),
        ("a#many", "asks for #many"),
        (f"a#{10**12}", "is a whole number from 1 to"),
    ],
)
def test_a_name_that_is_none_is_refused(text, says):
    """A hub that is none, a count that is none."""
    with pytest.raises(ValueError, match=says):
        parse_entry(text, exists=lambda _: False)


@pytest.mark.parametrize(
    ("size", "count", "ratio", "says"), [(3, 4, 1, "evaluation repeats none"), (1, None, 0.5, "too few to split")]
)
def test_data_that_are_too_few_are_refused(size, count, ratio, says):
    """For their split, or for an evaluation that would repeat them."""
    with pytest.raises(ValueError, match=says):
        draw_records([size], [count], split_ratio=ratio, shuffle=True, seed=0)


def test_an_evaluation_takes_all_of_its_count():
    """A ratio of 1 trains nothing."""
    [drawn] = draw_records([5], [3], split_ratio=1, shuffle=False, seed=0)

    assert ([], [0, 1, 2]) == (drawn.train.tolist(), drawn.val.tolist())
