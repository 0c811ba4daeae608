"""The same records are the same data set, whatever format their files have."""

import csv
import gc
import gzip
import hashlib
import inspect
import io
import json
import os
import pickle
import re
import resource
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packplan.adapters.samples import data_files
from packplan.adapters.samples.data_files import file_faults, open_records
from packplan.adapters.samples.formats import arrow_rows, record_file, rewriting
from packplan.adapters.samples.formats import lines as json_lines
from packplan.core.errors import DataSetError, OutputError, PackplanError, RecordError, StaleError
from tests.records import json_values

MESSAGES = [
    {"role": "user", "content": '“Ünïcode”, \n"quoted" and a null: \0'},
    {"role": "assistant", "content": "a,b"},
]

RECORDS = [
    {"messages": MESSAGES, "images": ["a.png", "b.png"], "id": number, "note": "x" * number or None}
    for number in range(7)
]


def lines(records) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def array(records) -> bytes:
    return json.dumps(records, indent=1, ensure_ascii=False).encode()


def table(records) -> bytes:
    """Return rows of texts alone, as CSV."""
    return "".join(f"{','.join(row)}\n" for row in (records[0].keys(), *map(dict.values, records))).encode()


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def columns(records) -> pa.Table:
    return records if isinstance(records, pa.Table) else pa.Table.from_pylist(records)


def parquet(records) -> bytes:
    pq.write_table(columns(records), sink := io.BytesIO(), row_group_size=3)
    return sink.getvalue()


def arrow(records, new=pa.ipc.new_stream) -> bytes:
    with new(sink := io.BytesIO(), columns(records).schema) as writer:
        writer.write_table(columns(records), max_chunksize=2)
    return sink.getvalue()


FORMATS = {
    "a.jsonl": lines, "a.json": array, "a.jsonl.gz": lambda records: gzip.compress(lines(records), mtime=0),
    "a.json.gz": lambda records: gzip.compress(array(records)), "a.jsonl.zst": lambda records: zst(lines(records)),
    "a.json.zst": lambda records: zst(array(records)), "a.parquet": parquet, "a.arrow": arrow,
    "b.arrow": lambda records: arrow(records, pa.ipc.new_file),
}  # fmt: skip
"""Name of a file -> how records are written to it."""

DIRECT = {"a.jsonl", "a.arrow", "b.arrow"}
"""Files that are read where they are; of others, a copy is read."""

CACHED = ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.arrow", "a.parquet"]

each_format = pytest.mark.parametrize("name", FORMATS)


def write(folder: Path, name: str, records=RECORDS) -> Path:
    path = folder / name
    path.write_bytes((FORMATS | {"a.csv": table})[name](records))
    return path


def opened(path: Path, **options):
    return open_records((str(path),), cache=path.parent / "cache", **options)


def sent(records):
    """Return records as another process gets them."""
    return pickle.loads(pickle.dumps(records))  # noqa: S301  # our own bytes


def read_file(path: Path) -> Path:
    """Return the file that is read in the place of another: its copy, where it has one."""
    return next(iter(copies(path.parent)), path)


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("cache/*") if path.suffix in {".jsonl", ".arrow"})


def plain(record):
    """Return a record without what it does not have."""
    return {key: value for key, value in record.items() if value is not None}


def test_each_format_that_is_detected_has_a_file_here(tmp_path):
    """A new one needs a writer in `rewriting`, and a file in FORMATS for the tests below."""
    returned = re.findall("return (.*)", inspect.getsource(data_files._detect_format))
    found = {data_files._detect_format(write(tmp_path, name), name)[0] for name in FORMATS}

    assert found == {*re.findall(r'"(\w+)"', str(returned))}


@each_format
def test_equal_records_are_one_data_set_in_every_format(tmp_path, name):
    """In any order, in another process too; another value or folder of media is another digest."""
    (tmp_path / "plain.jsonl").write_bytes(lines(RECORDS))
    path = write(tmp_path, name)
    reference, records = opened(tmp_path / "plain.jsonl"), sent(opened(path))

    assert [*map(plain, RECORDS)] == [*map(plain, records)]
    assert plain(RECORDS[5]) == plain(records[5])
    assert (f"{path}, {'line' if 'jsonl' in name else 'row'} 6", str(tmp_path)) == (
        str(records.location(5)), records.media_folder(5)
    )  # fmt: skip
    with pytest.raises(IndexError):
        records[len(records)]
    for count in (3, 7, 1, 4):
        assert reference.digest(count) == records.digest(count)
    other = opened(write(tmp_path, name, [*RECORDS[:6], {**RECORDS[6], "id": 7}]))
    assert (records.digest(6), records.digest(7) != other.digest(7)) == (other.digest(6), True)
    (tmp_path / "folder").mkdir()
    assert records.digest(7) != opened(write(tmp_path / "folder", name)).digest(7)


@pytest.fixture
def unsettled(monkeypatch):
    """Keep facts of a file, however small it is, and however late it changed."""
    monkeypatch.setattr(record_file, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(record_file, "SETTLED_NS", -(10**18))


def test_a_file_that_was_just_written_is_not_cached(tmp_path, monkeypatch):
    """Whatever its own time says: a change within the same moment would go unseen."""
    monkeypatch.setattr(record_file, "MIN_CACHED_BYTES", 0)
    os.utime(path := write(tmp_path, "a.jsonl"), (0, 0))
    opened(path).digest(len(RECORDS))
    assert [] == [*tmp_path.glob("cache/*-records.json")]


@pytest.fixture
def hide_change(monkeypatch):
    """Return a function that lets a file's size and times be for ever what they are now."""

    def hide(path: Path) -> None:
        state = record_file.file_state(path)
        monkeypatch.setattr(record_file, "file_state", lambda _: state)

    return hide


def faults(path: Path) -> list[str]:
    return [reason for _, reason in data_files.copy_faults((str(path),), cache=path.parent / "cache")]


@each_format
@pytest.mark.usefixtures("unsettled")
def test_a_copy_is_made_once_and_is_what_its_file_holds(tmp_path, name, hide_change):
    """Other content is another copy; verifying finds that a copy, or a file unseen, has changed."""
    path = write(tmp_path, name)
    digest = opened(path).digest(7)
    made = copies(tmp_path)
    assert ([], len(made)) == (faults(path), name not in DIRECT)
    for copy in made:
        written = copy.stat()
        assert digest == opened(path).digest(7)
        assert written == copies(tmp_path)[0].stat()
        times = path.stat()
        write(tmp_path, name, RECORDS[:3])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert 3 == len(opened(path))
        path = path.rename(tmp_path / f"moved-{name}")
        assert (3, 2) == (len(opened(path)), len(copies(tmp_path)))
        (small,) = {*copies(tmp_path)} - {copy}
        whole = small.read_bytes()
        small.write_bytes(whole.replace(b"a.png", b"b.png"))
        assert [f"its copy was changed: delete {small}, and build the plan again"] == faults(path)
        small.write_bytes(whole)
        hide_change(path)
        path.write_bytes(FORMATS[name](RECORDS))
        assert 3 == len(opened(path))
        assert ["the file has changed since its copy"] == [reason[:35] for reason in faults(path)]


@each_format
def test_a_record_that_changed_after_it_was_digested_is_refused_by_name(tmp_path, name):
    """Size and times stay; other records come back as they were; a changed copy is named."""
    rows = [{"query": f"text {number}", "response": "a"} for number in range(7)]
    records, other = opened(path := write(tmp_path, name, rows)), opened(path)
    assert rows == [records.read_checked(index) for index in range(7)]
    other.add_digests(range(7), records.known_digests(range(7)))
    held = read_file(path)
    before, changed = held.stat(), held.read_bytes().replace(b"text 3", b"text B")
    with held.open("r+b") as file:
        file.write(changed)
    os.utime(held, ns=(before.st_atime_ns, before.st_mtime_ns))

    cause = f"{held} has changed since this run opened it" if name in DIRECT else f"delete {held}"
    for here in (sent(records), records, other):
        with pytest.raises(StaleError, match=re.escape(f"sample 3 ({records.location(3)})")) as raised:
            here.read_checked(3)
        assert cause in str(raised.value)
        assert rows[:3] + rows[4:] == [here.read_checked(index) for index in (0, 1, 2, 4, 5, 6)]


@pytest.mark.covers
def test_a_file_that_changes_after_it_was_opened_says_so(tmp_path):
    """Also where the places of its records hold no JSON now, or the file is gone."""
    for change in (lambda path: path.write_text('{"b": 1}\n' * 9), Path.unlink):
        (tmp_path / "a.jsonl").write_text('{"b": "text"}\n' * 3)
        records = opened(tmp_path / "a.jsonl")
        change(tmp_path / "a.jsonl")

        with pytest.raises(StaleError, match=r"a\.jsonl has changed since this run opened it: "):
            records.read_checked(1)


@each_format
def test_a_damaged_file_is_refused_by_name_or_gives_records(tmp_path, name):
    """Cut off at any byte, none but those it held; with any byte changed, no end of the process."""
    whole, path = FORMATS[name](RECORDS), tmp_path / name
    cuts = [whole[:end] for end in range(0, len(whole) - 1, max(1, len(whole) // 41))]
    flips = [
        whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        for place in range(0, len(whole), max(1, len(whole) // 41))
    ]
    for content in (*cuts, *flips):
        path.write_bytes(content)
        found = []
        try:
            records = opened(path)
            records.digest(len(records))
            found.extend(map(plain, records))
        except PackplanError as error:
            assert name in str(error)  # noqa: PT017
        if len(content) < len(whole):
            assert [*map(plain, RECORDS)][: len(found)] == found
            assert not found or name in DIRECT
            assert len(found) < len(RECORDS) or name == "a.arrow"


def test_a_folder_is_a_data_set(tmp_path, monkeypatch):
    """What `save_to_disk` wrote, in several files, or shards by name; one of several names them."""
    import datasets

    rows = datasets.Dataset.from_list(RECORDS)
    rows.save_to_disk(tmp_path / "set", num_shards=2)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    (tmp_path / "set.jsonl").write_bytes(lines(RECORDS))
    (shards := tmp_path / "hub" / "data").mkdir(parents=True)
    for number, part in (("1", RECORDS[3:]), ("0", RECORDS[:3])):
        (shards / f"train-0000{number}-of-00002.parquet").write_bytes(parquet(part))

    for folder in (tmp_path / "set", tmp_path / "hub", tmp_path / "both" / "train"):
        records = opened(folder)
        assert [*map(plain, RECORDS)] == list(records)
        if folder.name != "hub":
            assert (str(folder), f"{folder}, row 7") == (records.media_folder(0), str(records.location(6)))
    (reason,) = file_faults([str(tmp_path / "both")])
    assert "both has several splits: name one of its folders, test, train" in reason
    (shards / "test-00000-of-00001.parquet").write_bytes(parquet(RECORDS))
    with pytest.raises(DataSetError, match=r"several data sets: name one of data/test\*.parquet, data/train\*"):
        opened(tmp_path / "hub")
    monkeypatch.setattr(data_files, "_MOST_ENTRIES", 3)
    with pytest.raises(DataSetError, match=r"hub has more than 3 files and folders, .*: name its data files"):
        opened(tmp_path / "hub")
    outside = '{"_data_files": [{"filename": "../set.jsonl"}]}'
    for state, says in ((outside, "names files outside of its folder"), ("[]", "was not written by datasets")):
        (tmp_path / "set" / "state.json").write_text(state)
        with pytest.raises(DataSetError, match=says):
            opened(tmp_path / "set")


@given(st.lists(st.lists(st.text(alphabet='a,"\n\t é', max_size=4), min_size=2, max_size=2), min_size=1, max_size=4))
@example([["a" * 200_000, "longer than the csv module reads by itself"]])
def test_a_table_of_text_comes_back_as_the_csv_module_wrote_it(tmp_path_factory, rows):
    """Quotes, commas and line ends in a field; with tabs, or compressed; an empty field is none."""
    folder = tmp_path_factory.mktemp("csv")
    written = [{key: field for key, field in zip(("query", "response"), row, strict=True) if field} for row in rows]
    kinds = {f"a.{kind}": delimiter for kind, delimiter in rewriting.DELIMITERS.items()}
    for name, delimiter in (kinds | {"b.csv.gz": ","}).items():
        file = io.StringIO(newline="")
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerow(["query", "response"])
        csv.writer(file, delimiter=delimiter).writerows(rows)
        text = file.getvalue().encode("utf-8-sig")
        (folder / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        assert written == list(sent(opened(folder / name)))


@given(
    st.lists(st.tuples(json_values, st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"])), min_size=1, max_size=4),
    st.sampled_from(["", "\ufeff"]), st.sampled_from([None, 1]), st.booleans(),
)  # fmt: skip
def test_json_of_anything_comes_back_as_the_json_module_wrote_it(tmp_path_factory, rows, mark, indent, is_plain):
    """From an array, with blanks or not, and from lines, each at its number."""
    folder, values = tmp_path_factory.mktemp("json"), [value for value, _ in rows]
    (folder / "a.json").write_text(json.dumps(values, indent=indent, ensure_ascii=is_plain), "utf-8")
    assert values == list(opened(folder / "a.json"))

    text = mark + "".join(f"{json.dumps({'a': value})}{end}" for value, end in rows)
    (folder / "a.jsonl").write_text(text, newline="")
    records = sent(opened(folder / "a.jsonl"))
    assert [{"a": value} for value in values] == list(records)
    for index in reversed(range(len(records))):
        line = text.encode().split(b"\n")[records.location(index).number - 1]
        assert records[index] == json.loads(line)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"NaN", "NaN is not a JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": [{"b": 1, "c": 2, "b": 3}]}', "the key 'b' is written twice"),
        (b'{"a": "\\ud83d"}', r"has the unpaired surrogate \\ud83d"),
        (b'{"\\uDC00": 1}', r"has the unpaired surrogate \\udc00"),
        (
            b'{"a": -' + b"9" * 5000 + b"}",
            "not valid JSON: a number with more than 4,300 digits is too large: write it as text",
        ),
        (b'{"a": 1e999}', "the number 1e999 is too large: write it as text"),
    ],
    ids=["torn", "bytes", "nan", "deep", "twice", "half", "half of a key", "digits", "infinite"],
)
def test_a_malformed_record_is_named(tmp_path, line, says):
    """Line 7, when line 7 is wrong, and only when it is read; as a row of an array, if it ends."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" * 4 + b'["\\ud83d\\ude00", "\\\\ud83d"]\n\n' + line + b"\n{}\n")
    records = opened(path)
    assert ["\U0001f600", "\\ud83d"] == records[4]
    with pytest.raises(RecordError, match=rf"a\.jsonl, line 7: .*{says}"):
        records[5]
    path.write_bytes(b"[\n{},\r\n" + line + b", {}]")
    error = RecordError if line.endswith((b"}", b"NaN")) else DataSetError
    with pytest.raises(error, match=rf"a\.jsonl.*({says}|is not a JSON value)"):
        opened(path)[1]


def test_a_line_end_in_a_text_of_an_array_is_refused_by_its_row(tmp_path):
    """Though the copy has a row a line; line ends between values are none of it."""
    (tmp_path / "a.json").write_bytes(b'[{"a":\r\n 0}, {"a": "b\nc"},\n{"a": 2}]')
    records = opened(tmp_path / "a.json")

    assert [{"a": 0}, {"a": 2}] == [records[0], records[2]]
    with pytest.raises(RecordError, match=r"a\.json, row 2: the record is not valid JSON: Invalid control character"):
        records[1]


TWINS = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["query", "query"])

RANDOM = lines([{"t": hashlib.sha256(str(number).encode()).hexdigest()} for number in range(2_000)])


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.csv", b'a,b\n1,2\n"x,3\n4,5\n', r"row 2 is not a row of a table \(unexpected end of data\)"),
        ("a.csv", b'a,b\n1,2\n"x"y,3\n', r"row 2 is not a row of a table \(',' expected after '\"'\)"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "row 2 has 3 fields, but the header names 2"),
        ("a.csv", b"a,b\n1,\xff\n", "is not UTF-8"),
        ("a.json", b'[{"a": "\xff"}]', "is not UTF-8"),
        ("a.csv", b"a,a\n1,2\n", "names the column 'a' twice"),
        ("a.csv", b"a,b\n", "holds no record"),
        ("a.csv", b"", "holds no record"),
        ("a.json", b'[{"a": 1}, {"a": "x', r"row 2 is not a JSON value \(Unterminated string"),
        ("a.json", b'[{"a": 1}, {"a": [', r"row 2 is not a JSON value \(Expecting value\): the file may be truncated"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "row 1 is not followed by a comma"),
        ("a.json", b'[{"a": 1}, ]', "row 1 is the last of the array, but a comma follows it"),
        ("a.json", b'[{"a": 1}] 2', "row 1 is the last of the array, but more text follows"),
        ("a.json", b"[" * 100_000, "row 1 is nested too deeply"),
        ("a.json", b"[]", "holds no record"),
        ("a.jsonl", b"\n  \n", "holds no record"),
        ("a.zip", b"PK\x03\x04\x14\0xx", "is neither text nor in a supported format"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "is neither text nor .*unpack it"),
        *(
            (f"a.jsonl.{end}", pack(RANDOM)[:60_000], r"line 1,\d\d\d: the rest of the file cannot be read \(Truncated")
            for end, pack in (("gz", gzip.compress), ("zst", zst))
        ),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "is neither text"),
        ("a.arrow", b"{}\n", "is damaged, or is not Arrow"),
        *((name, FORMATS[name](TWINS), "has two columns 'query'") for name in ("a.parquet", "a.arrow")),
    ],
)
def test_what_is_no_data_file_is_refused_for_what_it_is(tmp_path, name, data, says):
    """By its name and its row; what is no text by its first bytes, whatever its name says."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataSetError, match=rf"{name}.*{says}"):
        opened(tmp_path / name)


def test_a_pattern_names_files_in_order(tmp_path):
    """By name; one that matches nothing, or the same data twice, is refused."""
    for number in (2, 10, 1):
        (tmp_path / f"{number}.jsonl").write_text(f"{number}\n")

    assert [1, 10, 2] == list(open_records((f"{tmp_path}/*.jsonl",)))
    assert [f"{tmp_path}/*.csv matches no file: name existing data files"] == list(file_faults([f"{tmp_path}/*.csv"]))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(b"1\n"))
    packed = str(tmp_path / "1.jsonl.gz")
    for names in ((f"{tmp_path}/*",), (packed, f"{tmp_path}/1.jsonl"), (f"{tmp_path}/*.jsonl", packed)):
        with pytest.raises(DataSetError, match=r"1\.jsonl and .*1\.jsonl\.gz are the same data"):
            open_records(names, cache=tmp_path / "cache")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "2.jsonl")
    for twin in ("2.jsonl", "../" + tmp_path.name + "/2.jsonl", "link.jsonl"):
        with pytest.raises(DataSetError, match=r"is named twice, once as .*/2\.jsonl: its records would"):
            open_records((f"{tmp_path}/2.jsonl", f"{tmp_path}/{twin}"))
    (tmp_path / "[x].jsonl").write_text("7\n")
    assert 7 == open_records((f"{tmp_path}/[x].jsonl",))[0]


NO_TEXT = "has a name or a folder that is not valid UTF-8: rename it"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pipe.jsonl", "is a pipe or a device: name"),
        ("", r"was not written by datasets\.save_to_disk: name"),
        ("gone.jsonl", r"gone\.jsonl cannot be read"),
        ("a.jsonl#100", r"#100 is ms-swift's notation for .*: name the file, or .* a mix .*, count: 100"),
        (os.fsdecode(b"\xe9/*.jsonl"), NO_TEXT),
        ("\ud83d.jsonl", NO_TEXT),
    ],
    ids=ascii,
)
def test_what_names_no_data_file_is_refused_and_not_waited_for(tmp_path, name, says):
    """A pipe, a folder, nothing; and a name that no digest or manifest can hold."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (folder := tmp_path / os.fsdecode(b"\xe9")).mkdir()
    (folder / "a.jsonl").write_text("{}")
    with pytest.raises(DataSetError, match=says):
        open_records((str(tmp_path / name),))


def test_a_writer_that_ends_early_leaves_no_copy(tmp_path, monkeypatch):
    """Killed, or on a full disk, which is named: the next start makes it, whatever was left."""
    path = write(tmp_path, "a.parquet")
    with pytest.raises(DataSetError, match="unpack it, or convert it"):
        open_records((str(path),))
    full = OSError(28, "No space left on device")
    for fault, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (full, OutputError)):
        with monkeypatch.context() as patch, pytest.raises(raised):
            patch.setattr(os, "fsync", Mock(side_effect=fault))
            opened(path)
    assert not copies(tmp_path)
    assert 7 == len(opened(path))
    (copy,) = copies(tmp_path)
    copy.rename(copy.with_name(f".{copy.name}.left.tmp"))

    assert 7 == len(opened(path))
    assert [] == [*tmp_path.glob("cache/.*")]


def test_readers_that_start_together_share_one_copy(tmp_path, monkeypatch):
    """One writes it, as ranks on one disk do; the others wait."""
    path = write(tmp_path, "a.parquet")
    rewrite = Mock(side_effect=rewriting._rewrite_parquet)
    monkeypatch.setattr(rewriting, "_rewrite_parquet", rewrite)

    with ThreadPoolExecutor(4) as pool:
        digests = {*pool.map(lambda _: opened(path).digest(7), range(4))}

    assert 1 == len(digests) == rewrite.call_count


@given(st.data())
def test_a_digest_without_some_records_is_as_if_they_were_not_there(tmp_path_factory, data):
    """It is that of files without them, in any order of asking; indices and places stay."""
    folder = tmp_path_factory.mktemp("left")
    rows = data.draw(st.lists(st.integers(), min_size=2, max_size=12))
    cut = data.draw(st.integers(1, len(rows) - 1))
    (folder / "a.jsonl").write_bytes(lines(rows[:cut]))
    (folder / "b.jsonl").write_bytes(lines(rows[cut:]))
    records = open_records((str(folder / "a.jsonl"), str(folder / "b.jsonl")))

    for _ in range(3):
        out = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1))
        end = data.draw(st.integers(1, len(rows)))
        kept = [index for index in range(end) if index not in out]
        if not kept:
            continue
        (folder / "kept.jsonl").write_bytes(lines([rows[index] for index in kept]))
        alone = open_records((str(folder / "kept.jsonl"),))

        assert alone.digest(len(kept)) == records.digest(end, without=sorted(out))
        assert [alone.record_digest(row) for row in range(len(kept))] == [*map(records.record_digest, kept)]
        assert rows == list(records)
        places = [records.location(index).number for index in kept]
        assert [index - cut * (index >= cut) + 1 for index in kept] == places


@given(st.lists(st.sampled_from([1, 2, 7, 8, 9, 30]), min_size=1), st.integers(1, 10))
def test_lines_are_found_whatever_is_read_at_once(tmp_path_factory, sizes, chunk):
    """With the digest of their text; those over the limit are refused, with the key."""
    path = tmp_path_factory.mktemp("chunks") / "a.jsonl"
    path.write_text("".join(f"  {'1' * size} \n\n" for size in sizes))
    whole = opened(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "CHUNK", chunk)
        records = opened(path, max_line_bytes=12)

        assert whole.digest(len(whole)) == records.digest(len(records))
        for index, size in enumerate(sizes):
            if size <= 12:
                assert int("1" * size) == records[index]
                continue
            with pytest.raises(RecordError, match=rf"line {2 * index + 1}: the line has {size} bytes.*max_line_bytes"):
                records[index]


@pytest.mark.parametrize(
    ("name", "image", "place"),
    [("a.jsonl", f"data:image/png;base64,iVBORw0KGgo{'A' * 901}", "line"), ("a.parquet", b"y" * 900, "row")],
)
def test_a_long_text_is_refused_by_its_place_and_an_image_is_no_text(tmp_path, name, image, place):
    """The digest is that of all the record."""
    rows = [{"t": "x", "i": image}, {"t": "x" * 500, "i": image}]
    records = opened(write(tmp_path, name, rows), max_line_bytes=100)

    assert rows[0] == records[0]
    with pytest.raises(RecordError, match=rf"{place} 2: the {place} has 5\d\d bytes of text.*max_line"):
        records[1]
    assert opened(tmp_path / name).digest(2) == records.digest(2)


def test_a_long_line_is_never_in_memory_whole(tmp_path):
    """Opening, digesting and refusing a line takes a part of its bytes."""
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.writelines([b'{"a": "', *[b"x" * 1_000_000] * 34, b'"}\n{}\n'])

    tracemalloc.start()
    records = sent(opened(tmp_path / "a.jsonl", max_line_bytes=1000))
    records.digest(2)
    with pytest.raises(RecordError, match="has 34,000,010 bytes, but may have at most 33,554,432: write images"):
        records[0]
    assert {} == records[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "a.jsonl").stat().st_size / 4


def test_more_files_than_may_be_open_are_read(tmp_path):
    """Some stay open; the others are opened for each record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A quarter of the limit stays open, beside what other tests have left open in this process.
    limit = (len([*Path("/proc/self/fd").iterdir()]) + 20) * 4 // 3
    records, queries = [], [f"{number}" for number in range(limit)]
    for query in queries:
        (path := tmp_path / f"{query}.jsonl").write_text(f'{{"query": "{query}", "response": "so"}}\n')
        records.append(opened(path))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        assert queries * 2 == [one[0]["query"] for one in records * 2]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(path: Path) -> int:
    """Return how much of a file this process maps, and holds."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    held = [one for one in maps if f"{path.resolve()}\n" in one]
    return 1024 * sum(int(line.split()[1]) for one in held for line in one.splitlines() if line.startswith("Rss:"))


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl.gz", "b.arrow", "a.parquet"])
def test_a_file_takes_little_memory(tmp_path, name, monkeypatch):
    """Rewritten, opened, read in shuffled order; only an array is in memory while it is copied."""
    monkeypatch.setattr(arrow_rows, "MOST_HELD", 2**20)
    rows = [{"query": f"{row}", "response": "a " * 1_000} for row in range(10_000)]
    path = write(tmp_path, name, rows)
    tracemalloc.start()
    opened(path)
    before, peak = tracemalloc.get_traced_memory()
    records = opened(path)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    after_opening = resident_bytes(where := read_file(path))
    for row in np.random.default_rng(0).permutation(len(rows))[:3000].tolist():
        assert rows[row] == records[row]

    size = where.stat().st_size
    assert held < size / 20 or name == "b.arrow"  # whose batches have two rows here
    assert peak < 0.6 * size or name == "a.json"
    assert max(after_opening, resident_bytes(where)) < 0.15 * size


def test_a_file_is_closed_once_nobody_reads_it(tmp_path):
    path = write(tmp_path, "a.jsonl", [{"t": "a"}])

    def is_open() -> bool:
        gc.collect()
        return any(path == link.resolve() for link in Path("/proc/self/fd").iterdir())

    records = opened(path)
    assert [{"t": "a"}] == list(records)
    assert is_open()
    del records
    assert not is_open()


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.usefixtures("unsettled")
def test_a_later_start_knows_a_file_by_what_is_cached(tmp_path, name, hide_change):
    """A damaged cache is read again; a change that times hide is found where a record is read."""
    rows = [{"t": f"text {number}", "n": f"{number}"} for number in range(10, 60)]
    path = write(tmp_path, name, rows)
    first = opened(path)
    digest, again = first.digest(50), opened(path)
    assert (digest, rows) == (again.digest(50), list(again))
    assert [*map(first.location, range(50))] == [*map(again.location, range(50))]
    held = next((tmp_path / "cache").glob("*-digests.bin"))
    held.write_bytes(held.read_bytes()[:-1] + b"?")
    assert digest == opened(path).digest(50)
    write(tmp_path, name, [*rows[:41], {"t": "text 5S", "n": "51"}, *rows[42:]])
    assert digest != opened(path).digest(50)

    write(tmp_path, name, rows)
    assert (digest, []) == (opened(path).digest(50), faults(path))
    text = next((file for file in copies(tmp_path) if b"text 51" in file.read_bytes()), path)
    hide_change(text)
    text.write_bytes(text.read_bytes().replace(b"text 51", b"text 5l"))

    records = opened(path)
    assert digest == records.digest(50)
    (reason,) = faults(path)
    assert f"{records.location(41).unit} {records.location(41).number} differs from its digest" in reason
    assert rows[40] == records.read_checked(40)
    cause = f"; delete {text}: the next run" if text != path else "content was"
    with pytest.raises(StaleError, match=cause):
        records.read_checked(41)
