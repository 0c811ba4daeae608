"""JSONL records come back by position, with the line they stand on."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.jsonl_records import JsonlRecords
from core.errors import DataSetError, RecordError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.tuples(json_values, st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"])), min_size=1))
def test_every_record_comes_back_from_its_line(tmp_path_factory, rows):
    """Blank lines and both line ends; any order of access; in another process too."""
    path = tmp_path_factory.mktemp("jsonl") / "data.jsonl"
    text = "".join(f"{json.dumps(value)}{end}" for value, end in rows)
    path.write_bytes(text.encode())

    records = pickle.loads(pickle.dumps(JsonlRecords((str(path),))))  # noqa: S301  # our own bytes

    assert [value for value, _ in rows] == [records[index] for index in range(len(records))]
    lines = text.encode().split(b"\n")
    assert all(records[i] == json.loads(lines[records.where(i)[1] - 1]) for i in reversed(range(len(records))))


def test_the_digest_of_the_first_records_knows_nothing_of_the_rest(tmp_path: Path):
    """Any order of asking; appended rows leave it; another text or another folder changes it."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "one" / "a.jsonl"
    path.write_text("1\n2")
    records = JsonlRecords((str(path),))
    first, both = records.digest(1), records.digest(2)
    assert first == records.digest(1)
    assert first != both

    path.write_text("1\n2\n3\n")
    assert both == JsonlRecords((str(path),)).digest(2)
    path.write_text("1\n4\n")
    assert first == JsonlRecords((str(path),)).digest(1)
    assert both != JsonlRecords((str(path),)).digest(2)
    other = tmp_path / "two" / "a.jsonl"
    other.write_text("1\n2\n")
    assert both != JsonlRecords((str(other),)).digest(2)


@given(st.data())
def test_the_digest_of_a_slice_knows_nothing_of_the_rest(tmp_path_factory, data):
    """The same as that of a file with these rows alone; in any order of asking."""
    folder = tmp_path_factory.mktemp("slices")
    path = folder / "all.jsonl"
    path.write_text("".join(f"{number}\n" for number in range(9)))
    records = JsonlRecords((str(path),))

    for _ in range(3):
        start = data.draw(st.integers(0, 8))
        count = data.draw(st.integers(1, 9 - start))
        alone = folder / f"{start}-{count}.jsonl"
        alone.write_text("".join(f"{number}\n" for number in range(start, start + count)))
        assert JsonlRecords((str(alone),)).digest(count) == records.digest(count, start=start)


def test_several_files_are_one_data_set(tmp_path: Path):
    """In the order named; each record knows its file and folder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_text("1\n2")
    (tmp_path / "sub" / "b.jsonl").write_text("\ufeff3\n", encoding="utf-8")

    records = JsonlRecords((str(tmp_path / "a.jsonl"), str(tmp_path / "sub" / "b.jsonl")))

    assert [1, 2, 3] == [records[index] for index in range(3)]
    assert (str(tmp_path / "sub" / "b.jsonl"), 1) == records.where(2)
    assert tmp_path / "sub" == records.folder(2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": ', "no valid JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"NaN", "NaN is no JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=["torn", "bytes", "nan", "deep"],
)
def test_a_malformed_line_is_named(tmp_path: Path, line, says):
    """Line 7, when line 7 is wrong, and only when it is read."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" * 5 + b"\n" + line + b"\n{}\n")
    records = JsonlRecords((str(path),))

    assert {} == records[4]
    with pytest.raises(RecordError, match=rf"a\.jsonl, line 7: .*{says}"):
        records[5]


def test_files_that_hold_nothing_or_are_not_there(tmp_path: Path):
    """Both name the file."""
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    with pytest.raises(DataSetError, match=r"empty\.jsonl holds no record"):
        JsonlRecords((str(tmp_path / "empty.jsonl"),))
    with pytest.raises(DataSetError, match=r"gone\.jsonl cannot be read"):
        JsonlRecords((str(tmp_path / "gone.jsonl"),))
