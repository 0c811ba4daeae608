"""Measurements that are found by the content of records."""

import hashlib

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.samples.tables import (
    BAD,
    UNKNOWN,
    KnownLengths,
    MeasuredSample,
    Measurement,
    MediaFacts,
    find_changed_records,
    from_tables,
    identity_with_media,
    to_tables,
)


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@st.composite
def tables(draw):
    """Draw records, each a number, a folder, and its measurement: of text, of images, or bad."""
    records = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.integers(-1, 3)), max_size=20))
    samples = [
        MeasuredSample(BAD)
        if images < 0
        else MeasuredSample(
            Measurement(10 + number, 1, images - images // 2, 4 * images, videos=images // 2),
            tuple(MediaFacts(number, ord(folder), place, 0) for place in range(images)),
        )
        for number, folder, images in records
    ]
    return records, samples


@given(tables(), st.lists(st.tuples(st.integers(0, 11), st.sampled_from("abc")), max_size=20))
def test_a_record_is_known_by_its_content_and_with_media_by_their_folder_too(table, asked):
    """Bad records are not known; whichever of equal records answers, it is one of them."""
    records, samples = table

    identities = [
        identity_with_media(digest(number), folder) if num > 0 else digest(number) for number, folder, num in records
    ]
    known = KnownLengths(np.array([one.encode() for one in identities], "S64"), *to_tables(samples))
    rows = known.find_rows([digest(number) for number, _ in asked], [folder for _, folder in asked])

    for (number, folder), row in zip(asked, rows.tolist(), strict=True):
        alike = [(place, num, lies) for place, (own, lies, num) in enumerate(records) if own == number]
        fitting = {place for place, num, lies in alike if num == 0 or (num > 0 and lies == folder)}
        event(f"known: {bool(fitting)}")
        assert row in (fitting or {UNKNOWN})


@given(tables())
def test_tables_give_the_measurements_and_their_media(table):
    """In any order of rows."""
    _, samples = table
    rows = list(reversed(range(len(samples))))

    assert samples[::-1] == list(from_tables(*to_tables(samples), rows))


heads = st.lists(st.integers(0, 9), max_size=9).map(lambda drawn: np.array(drawn, np.int64))


@given(heads, heads)
def test_changed_records_are_those_whose_digests_are_not_stored(stored, current):
    """There are none to name if one list starts with the other."""
    changed = find_changed_records(stored, current)
    alike = all(one == other for one, other in zip(stored, current, strict=False))
    event(f"alike: {alike}, changed: {None if alike else len(changed) > 0}")
    others = [index for index, head in enumerate(current[: len(stored)]) if head not in stored]
    assert (None if alike else others) == (None if changed is None else changed.tolist())
