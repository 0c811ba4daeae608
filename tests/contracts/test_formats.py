"""The same records are the same data set, whatever format their files have."""

import csv
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.samples import data_files
from packplan.adapters.samples.data_files import file_faults, open_records
from packplan.adapters.samples.formats import arrow_rows, record_file, rewriting
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


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def parquet(records) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=3)
    return sink.getvalue()


def arrow(records, new=pa.ipc.new_stream) -> bytes:
    sink, table = io.BytesIO(), records if isinstance(records, pa.Table) else pa.Table.from_pylist(records)
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


FORMATS = {
    "a.jsonl": lines,
    "a.json": array,
    "a.jsonl.gz": lambda records: gzip.compress(lines(records)),
    "a.json.gz": lambda records: gzip.compress(array(records)),
    "a.jsonl.zst": lambda records: zst(lines(records)),
    "a.json.zst": lambda records: zst(array(records)),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "b.arrow": lambda records: arrow(records, pa.ipc.new_file),
}
"""Name of a file -> how records are written to it."""


def table(records) -> bytes:
    """Rows of texts alone, as CSV."""
    return "".join(f"{','.join(row)}\n" for row in (records[0].keys(), *map(dict.values, records))).encode()


COPIED = ["a.json", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json.zst", "a.parquet"]

every_format = pytest.mark.parametrize("name", FORMATS)


def write(folder: Path, name: str, records=RECORDS) -> Path:
    path = folder / name
    path.write_bytes((table if name == "a.csv" else FORMATS[name])(records))
    return path


def opened(path: Path, **options):
    return open_records((str(path),), cache=path.parent / "cache", **options)


def read_file(path: Path) -> Path:
    """The file that is read in the place of another: its copy, where it has one."""
    return next(iter(copies(path.parent)), path)


def copies(folder: Path) -> list[Path]:
    """All copies, by name."""
    return sorted(path for path in folder.glob("cache/*") if path.suffix in {".jsonl", ".arrow"})


def plain(record):
    """A record without what it does not have."""
    return {key: value for key, value in record.items() if value is not None}


@every_format
def test_every_record_comes_back_from_its_place(tmp_path, name):
    """In any order; in another process too; each place names the file and the row or line."""
    path = write(tmp_path, name)

    records = pickle.loads(pickle.dumps(opened(path)))  # noqa: S301  # our own bytes

    assert [*map(plain, RECORDS)] == [*map(plain, records)]
    assert plain(RECORDS[5]) == plain(records[5])
    unit = "line" if "jsonl" in name else "row"
    assert f"{path}, {unit} 6" == str(records.location(5))
    assert str(tmp_path) == records.folder(5)
    with pytest.raises(IndexError):
        records[len(records)]


@every_format
def test_equal_records_have_one_digest_in_every_format(tmp_path, name):
    """Any count, in any order; another value, or another folder of media, is another one."""
    (tmp_path / "plain.jsonl").write_bytes(lines(RECORDS))
    reference, records = opened(tmp_path / "plain.jsonl"), opened(write(tmp_path, name))

    for count in (3, 7, 1, 4):
        assert reference.digest(count) == records.digest(count)
    other = write(tmp_path, name, [*RECORDS[:6], {**RECORDS[6], "id": 7}])
    assert records.digest(6) == opened(other).digest(6)
    assert reference.digest(7) != opened(other).digest(7)
    (tmp_path / "folder").mkdir()
    assert records.digest(7) != opened(write(tmp_path / "folder", name)).digest(7)


@pytest.fixture
def unsettled(monkeypatch):
    """Facts of a file are kept, however small the file, and however late it changed."""
    monkeypatch.setattr(record_file, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(record_file, "SETTLED_NS", -(10**18))


def faults(path: Path) -> list[str]:
    return [reason for _, reason in data_files.copy_faults((str(path),), cache=path.parent / "cache")]


@every_format
def test_a_copy_that_is_not_what_its_file_holds_is_found(tmp_path, name):
    """A file that is read where it is has none."""
    path = write(tmp_path, name)
    opened(path)
    assert [] == faults(path)
    assert (name in COPIED) == bool(copies(tmp_path))
    for held in copies(tmp_path):
        held.write_bytes(held.read_bytes().replace(b"a.png", b"b.png"))
        assert [f"its copy was changed: delete {held}, and build again"] == faults(path)


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.usefixtures("unsettled")
def test_a_file_that_changed_unseen_is_found(tmp_path, name, monkeypatch):
    """Where its size and times are what they were, a start takes its copy; verifying reads it."""
    path = write(tmp_path, name)
    opened(path)
    first = record_file.file_state(path)
    monkeypatch.setattr(record_file, "file_state", lambda _: first)
    write(tmp_path, name, RECORDS[:3])

    assert len(RECORDS) == len(opened(path))
    assert ["the file is another one than its copy"] == [reason[:37] for reason in faults(path)]


@every_format
@pytest.mark.parametrize("is_sent", [False, True], ids=["here", "in another process"])
def test_a_record_that_changed_after_it_was_digested_is_refused_by_name(tmp_path, name, is_sent):
    """Size and times stay; other records come back as they were; a changed copy is named."""
    rows = [{"query": f"text {number}", "response": "a"} for number in range(7)]
    path = write(tmp_path, name, rows)
    records = opened(path)
    records.digest(7)
    held = read_file(path)
    before, changed = held.stat(), held.read_bytes().replace(b"text 3", b"text B")
    with held.open("r+b") as file:
        file.write(changed)
    os.utime(held, ns=(before.st_atime_ns, before.st_mtime_ns))
    if is_sent:
        records = pickle.loads(pickle.dumps(records))  # noqa: S301  # our own bytes

    with pytest.raises(StaleError, match=re.escape(f"sample 3 ({records.location(3)})")) as raised:
        records.read(3)
    assert (name in COPIED) == (f"delete {held}" in str(raised.value))
    assert (name in COPIED) != (f"{held} has changed since this run opened it" in str(raised.value))
    assert [rows[index] for index in (0, 1, 2, 4, 5, 6)] == [records.read(index)[0] for index in (0, 1, 2, 4, 5, 6)]


@every_format
def test_a_file_that_is_cut_off_gives_no_other_record(tmp_path, name):
    """At any byte: it is refused by name; lines before the cut are what they were."""
    whole = FORMATS[name](RECORDS)
    path = tmp_path / name
    for end in range(0, len(whole) - 1, max(1, len(whole) // 41)):
        path.write_bytes(whole[:end])
        try:
            records = opened(path)
        except DataSetError as error:
            assert name in str(error)  # noqa: PT017
            continue
        assert name in {"a.jsonl", "a.arrow", "b.arrow"}, end
        found = []
        for index in range(len(records)):
            try:
                found.append(plain(records[index]))
            except RecordError as error:
                assert name in str(error)  # noqa: PT017
        assert [*map(plain, RECORDS)][: len(found)] == found
        assert len(found) < len(RECORDS) or name == "a.arrow"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_an_archive_that_is_cut_off_says_after_which_line(tmp_path, name):
    """Though all lines before are whole."""
    rows = [{"t": hashlib.sha256(str(number).encode()).hexdigest()} for number in range(2_000)]
    whole = FORMATS[name](rows)
    (tmp_path / name).write_bytes(whole[: len(whole) * 9 // 10])

    with pytest.raises(DataSetError, match=r"line 1,\d\d\d: the archive cannot be read on \(Truncated"):
        opened(tmp_path / name)


@pytest.mark.parametrize("name", [*COPIED, "a.arrow", "b.arrow"])
def test_a_damaged_byte_never_ends_the_process(tmp_path, name):
    """Anywhere in the file: an error that names it, or records; in one process for all."""
    whole = FORMATS[name](RECORDS)
    path = tmp_path / name
    for place in range(0, len(whole), max(1, len(whole) // 61)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            records = opened(path)
            records.digest(len(records))
            list(records)
        except PackplanError as error:
            assert name in str(error)  # noqa: PT017


def test_a_folder_of_datasets_is_a_data_set(tmp_path):
    """What `save_to_disk` wrote, in several files; a folder of splits names them."""
    import datasets

    rows = datasets.Dataset.from_list(RECORDS)
    rows.save_to_disk(tmp_path / "set", num_shards=2)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    (tmp_path / "set.jsonl").write_bytes(lines(RECORDS))

    records = opened(tmp_path / "set")

    assert [*map(plain, RECORDS)] == list(records)
    assert str(tmp_path / "set") == records.folder(0)
    assert f"{tmp_path / 'set'}, row 7" == str(records.location(6))
    assert 7 == len(opened(tmp_path / "both" / "train"))
    (reason,) = file_faults([str(tmp_path / "both")])
    assert "both holds several splits: name one of its folders, test, train" in reason
    outside = '{"_data_files": [{"filename": "../set.jsonl"}]}'
    for state, says in ((outside, "names files outside of its folder"), ("[]", "none that datasets")):
        (tmp_path / "set" / "state.json").write_text(state)
        with pytest.raises(DataSetError, match=says):
            opened(tmp_path / "set")


def test_a_folder_of_shards_is_a_data_set(tmp_path):
    """By name; one that holds several is refused, and names them."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, rows in (("train-00001-of-00002", RECORDS[3:6]), ("train-00000-of-00002", RECORDS[:3])):
        (tmp_path / "set" / "data" / f"{name}.parquet").write_bytes(parquet(rows))

    assert [*map(plain, RECORDS[:6])] == list(opened(tmp_path / "set"))
    (tmp_path / "set" / "data" / "test-00000-of-00001.parquet").write_bytes(parquet(RECORDS))
    with pytest.raises(DataSetError, match=r"several data sets: name one of them, data/test\*.parquet, data/train\*"):
        opened(tmp_path / "set")


@given(st.lists(st.lists(st.text(alphabet='a,"\n\t é', max_size=4), min_size=2, max_size=2), min_size=1, max_size=4))
def test_a_table_of_text_comes_back_as_the_csv_module_wrote_it(tmp_path_factory, rows):
    """Quotes, commas and line ends in a field; with tabs too; an empty field is none."""
    folder = tmp_path_factory.mktemp("csv")
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerow(["query", "response"])
            csv.writer(file, delimiter=delimiter).writerows(rows)

        written = [zip(("query", "response"), row, strict=True) for row in rows]
        records = pickle.loads(pickle.dumps(opened(folder / name)))  # noqa: S301  # our own bytes
        assert [{key: field for key, field in record if field} for record in written] == list(records)


@given(st.lists(json_values, min_size=1, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_an_array_of_anything_is_found_as_the_json_module_reads_it(tmp_path_factory, values, indent, is_plain):
    """Brackets, quotes and backslashes in texts; with blanks or not."""
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=is_plain), "utf-8")

    assert values == list(opened(path))


def test_a_line_end_in_a_text_of_an_array_is_refused_by_its_row(tmp_path):
    """Though the copy has a row a line; line ends between values are none of it."""
    (tmp_path / "a.json").write_bytes(b'[{"a":\r\n 0}, {"a": "b\nc"},\n{"a": 2}]')
    records = opened(tmp_path / "a.json")

    assert [{"a": 0}, {"a": 2}] == [records[0], records[2]]
    with pytest.raises(RecordError, match=r"a\.json, row 2: is no valid JSON: Invalid control character"):
        records[1]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.csv", b'a,b\n1,2\n"x,3\n4,5\n', r"row 2: is no row of a table \(unexpected end of data\)"),
        ("a.csv", b'a,b\n1,2\n"x"y,3\n', r"row 2: is no row of a table \(',' expected after '\"'\)"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "row 2: has 3 fields, but the header names 2"),
        ("a.csv", b"a,b\n1,\xff\n", "is not UTF-8"),
        ("a.json", b'[{"a": "\xff"}]', "is not UTF-8"),
        ("a.csv", b"a,a\n1,2\n", "names the column 'a' twice"),
        ("a.csv", b"a,\xff\n1,2\n", "is not UTF-8"),
        ("a.csv", b"a,b\n", "holds no record"),
        ("a.csv", b"", "holds no record"),
        ("a.json", b'[{"a": 1}, {"a": "x', r"row 2: is no JSON value \(Unterminated string"),
        ("a.json", b'[{"a": 1}, {"a": [', r"row 2: is no JSON value \(Expecting value\): the file may be cut off"),
        ("a.json", b'[{"a": 1}, ', r"row 2: is no JSON value \(Expecting value\)"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "row 1: is not followed by a comma"),
        ("a.json", b'[{"a": 1}, ]', "row 1: is the last of the array, but a comma follows it"),
        ("a.json", b'[{"a": 1}] 2', "row 1: is the last of the array, but more follows"),
        ("a.json", b"[" * 100_000, "row 1: is nested too deeply"),
        ("a.json", b"[]", "holds no record"),
        ("a.jsonl", b"\n  \n", "holds no record"),
        ("a.zip", b"PK\x03\x04\x14\0xx", "is no text, and of no format that is read: unpack it"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "is no text, .*unpack it"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "is no text"),
        ("a.arrow", b"{}\n", "is damaged, or no Arrow file"),
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


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns_of_one_name_are_refused(tmp_path, name):
    """One of them would be read, in silence."""
    twins, path = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["query", "query"]), tmp_path / name
    if name == "a.parquet":
        pq.write_table(twins, path)
    else:
        path.write_bytes(arrow(twins))

    with pytest.raises(DataSetError, match=rf"{name} has two columns 'query'"):
        opened(path)


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.usefixtures("unsettled")
def test_a_copy_is_made_once_and_knows_its_file(tmp_path, name):
    """A second start does not write it again; other content is another copy."""
    path = write(tmp_path, name)
    digest = opened(path).digest(7)
    (copy,) = copies(tmp_path)
    written = copy.stat()

    assert digest == opened(path).digest(7)
    assert written == copies(tmp_path)[0].stat()
    times = path.stat()
    write(tmp_path, name, RECORDS[:3])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert 3 == len(opened(path))
    path.rename(tmp_path / f"moved-{name}")
    assert 3 == len(opened(tmp_path / f"moved-{name}"))
    assert 2 == len(copies(tmp_path))


@pytest.mark.parametrize("name", COPIED)
def test_a_writer_that_ends_early_leaves_no_copy(tmp_path, name, monkeypatch):
    """Killed, or on a full disk, which is named: the next start makes it, whatever was left."""
    path = write(tmp_path, name)
    with pytest.raises(DataSetError, match="unpack or convert it"):
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
    path, written = write(tmp_path, "a.parquet"), []
    plain_write = rewriting._rewrite_parquet
    monkeypatch.setattr(rewriting, "_rewrite_parquet", lambda *args: (written.append(1), plain_write(*args)))

    with ThreadPoolExecutor(4) as pool:
        digests = {*pool.map(lambda _: opened(path).digest(7), range(4))}

    assert 1 == len(digests) == len(written)


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
        assert [index - cut * (index >= cut) + 1 for index in kept] == [
            records.location(index).number for index in kept
        ]


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


def resident_bytes(path: Path) -> int:
    """How much of a file this process maps, and holds."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    held = [one for one in maps if f"{path.resolve()}\n" in one]
    return 1024 * sum(int(line.split()[1]) for one in held for line in one.splitlines() if line.startswith("Rss:"))


CACHED = ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.arrow", "a.parquet"]


@pytest.mark.parametrize("name", [*CACHED, "b.arrow"])
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
    for row in np.random.default_rng(0).permutation(len(rows)).tolist():
        assert rows[row] == records[row]

    assert where.stat().st_size > 20_000_000
    assert held < 100 * len(rows) or name.endswith(".arrow")  # whose batches have two rows here
    assert peak < 12_000_000 or name == "a.json"
    assert max(after_opening, resident_bytes(where)) < 3_000_000


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.usefixtures("unsettled")
def test_a_later_start_has_the_same_digests_records_and_places(tmp_path, name):
    """By what is cached; another file, or a damaged cache, is read again."""
    rows = [{"t": f"text {number}", "n": f"{number}"} for number in range(50)]
    path = write(tmp_path, name, rows)
    first = opened(path)
    digest = first.digest(50)

    again = opened(path)
    assert (digest, rows) == (again.digest(50), list(again))
    assert [*map(first.location, range(50))] == [*map(again.location, range(50))]
    held = next((tmp_path / "cache").glob("*-digests.bin"))
    held.write_bytes(held.read_bytes()[:-1] + b"?")
    assert digest == opened(path).digest(50)
    write(tmp_path, name, [*rows[:25], {"t": "text 2S", "n": "25"}, *rows[26:]])
    assert digest != opened(path).digest(50)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.usefixtures("unsettled")
def test_a_change_that_size_and_times_hide_is_found_where_a_record_is_read(tmp_path, name, monkeypatch):
    """As a sample, or by verification, which names it; a later start reads no record before."""
    rows = [{"t": f"text {number}", "n": f"{number}"} for number in range(10, 60)]
    path = write(tmp_path, name, rows)
    before = opened(path).digest(50)
    assert [] == faults(path)
    text = read_file(path)
    as_it_was = record_file.file_state(text)
    monkeypatch.setattr(record_file, "file_state", lambda _: as_it_was)

    text.write_bytes(text.read_bytes().replace(b"text 51", b"text 5l"))

    records = opened(path)
    assert before == records.digest(50)
    (reason,) = faults(path)
    assert f"{records.location(41).unit} {records.location(41).number} is another one" in reason
    assert rows[40] == records.read(40)[0]
    cause = f"Its copy was changed: delete {text}" if text != path else "content planned"
    with pytest.raises(StaleError, match=cause):
        records.read(41)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_table_may_be_compressed_and_hold_long_fields(tmp_path, name):
    """Longer than the csv module reads by itself."""
    records = [{"text": "a" * 200_000}, {"text": "b"}]
    written = table(records)
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith("gz") else written)

    assert records == [plain(record) for record in opened(tmp_path / name)]
