"""JSONL records come back by position, with the line they stand on."""

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.samples.data_files import open_records
from packplan.adapters.samples.formats import lines
from packplan.core.errors import DataSetError, RecordError, StaleError
from tests.records import json_values

pytestmark = pytest.mark.covers


@given(
    st.lists(st.tuples(json_values, st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"])), min_size=1),
    st.sampled_from(["", "\ufeff"]),
)
def test_every_record_comes_back_from_its_line(tmp_path_factory, rows, mark):
    """Blank lines, a mark and both line ends; any order of access; in another process too."""
    path = tmp_path_factory.mktemp("jsonl") / "data.jsonl"
    text = mark + "".join(f"{json.dumps({'a': value})}{end}" for value, end in rows)
    path.write_bytes(text.encode())

    records = pickle.loads(pickle.dumps(open_records((str(path),))))  # noqa: S301  # our own bytes

    assert [{"a": value} for value, _ in rows] == list(records)
    lines = text.encode().split(b"\n")
    assert all(records[i] == json.loads(lines[records.location(i).number - 1]) for i in reversed(range(len(records))))


@pytest.mark.parametrize(
    "change", [lambda path: path.write_text('{"b": 1}\n' * 9), Path.unlink], ids=["edited", "gone"]
)
def test_a_file_that_changes_after_it_was_opened_says_so(tmp_path: Path, change):
    """Also where the places of its records hold no JSON now, or the file is gone."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"b": "text"}\n' * 3)
    records = open_records((str(path),))
    assert {"b": "text"} == records.read(0)[0]
    records = open_records((str(path),))

    change(path)

    with pytest.raises(StaleError, match=r"a\.jsonl has changed since this run opened it: "):
        records.read(1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": ', "no valid JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"NaN", "NaN is no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": [{"b": 1, "c": 2, "b": 3}]}', "the key 'b' is written twice"),
        (b'{"a": "\\ud83d"}', r"has \\ud83d without its other half"),
        (b'{"\\uDC00": 1}', r"has \\udc00 without its other half"),
        (b'{"a": -' + b"9" * 5000 + b"}", "no valid JSON: Exceeds the limit"),
        (b'{"a": 1e999}', "the number 1e999 is too large: write it as text"),
    ],
    ids=["torn", "bytes", "nan", "deep", "twice", "half", "half of a key", "digits", "infinite"],
)
def test_a_malformed_line_is_named(tmp_path: Path, line, says):
    """Line 7, when line 7 is wrong, and only when it is read; as a row of an array, if it ends."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" * 5 + b"\n" + line + b"\n{}\n")
    records = open_records((str(path),))

    assert {} == records[4]
    with pytest.raises(RecordError, match=rf"a\.jsonl, line 7: .*{says}"):
        records[5]
    (tmp_path / "b.jsonl").write_bytes(b"[\n{},\n" + line + b", {}]")
    error = RecordError if line.endswith((b"}", b"NaN")) else DataSetError
    with pytest.raises(error, match=rf"b\.json.*({says}|is no JSON value)"):
        _ = open_records((str(tmp_path / "b.jsonl"),), cache=tmp_path)[1]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path):
    """Digests and manifests name the file: in bytes that are no UTF-8, or half a pair."""
    (tmp_path / os.fsdecode(b"\xe9")).mkdir()
    (tmp_path / os.fsdecode(b"\xe9") / "a.jsonl").write_text("{}")
    for name in (os.fsdecode(b"\xe9/*.jsonl"), "\ud83d.jsonl"):
        with pytest.raises(DataSetError, match="has a name or a folder that is no text of UTF-8: rename it"):
            open_records((str(tmp_path / name),))


def test_what_only_looks_like_half_a_character_is_none(tmp_path: Path):
    """A whole pair, and an escaped backslash."""
    (tmp_path / "a.jsonl").write_bytes(b'["\\ud83d\\ude00", "\\\\ud83d"]')

    assert ["\U0001f600", "\\ud83d"] == open_records((str(tmp_path / "a.jsonl"),))[0]


@given(st.lists(st.sampled_from([1, 2, 7, 8, 9, 30]), min_size=1), st.integers(1, 10))
def test_lines_are_found_whatever_is_read_at_once(tmp_path_factory, sizes, chunk):
    """With the digest of their text; those over the limit are refused, with the key."""
    path = tmp_path_factory.mktemp("chunks") / "a.jsonl"
    path.write_text("".join(f"  {'1' * size} \n\n" for size in sizes))
    plain = open_records((str(path),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK", chunk)
        records = open_records((str(path),), max_line_bytes=12)

        assert plain.digest(len(plain)) == records.digest(len(records))
        for index, size in enumerate(sizes):
            if size <= 12:
                assert int("1" * size) == records[index]
                continue
            with pytest.raises(RecordError, match=rf"line {2 * index + 1}: the line has {size} bytes.*max_line_bytes"):
                records[index]


def test_a_long_line_is_never_in_memory_whole(tmp_path: Path):
    """Opening, digesting and refusing a line of 64 MB takes a few MB."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": "')
        for _ in range(64):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{}\n')

    tracemalloc.start()
    try:
        records = pickle.loads(pickle.dumps(open_records((str(path),), max_line_bytes=1000)))  # noqa: S301  # our own bytes
        records.digest(2)
        with pytest.raises(RecordError, match="the line has 64,000,010 bytes, but may have 33,554,432: write images"):
            records[0]
        assert {} == records[1]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


def test_a_pipe_a_folder_and_nothing_are_no_data_files(tmp_path: Path):
    """Each is refused, and not waited for."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, says in (
        ("pipe.jsonl", "is a pipe or a device: name"),
        ("", r"is no folder of datasets\.save_to_disk: name"),
        ("gone.jsonl", r"gone\.jsonl cannot be read"),
    ):
        with pytest.raises(DataSetError, match=says):
            open_records((str(tmp_path / name),))
