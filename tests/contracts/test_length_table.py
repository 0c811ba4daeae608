"""Tables of lengths: read by other tools and by this one, and refused where they are not whole."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import packplan as pp
from packplan.adapters.stores.length_table import read_length_table, read_length_table_key, write_length_table
from packplan.core.errors import ArgumentError, OutputError
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import StoredRows
from packplan.core.samples.tables import BAD, COLUMNS, DataFile, MeasuredSample, Measurement, MediaFacts, to_tables

KEY = Fingerprint({"template.system": "Be brief.", "template.max_pixels": None})
FILES = (DataFile("data.jsonl", "data.jsonl", "messages", 3),)


def stored(images: list[int]) -> StoredRows:
    """Return measurements of samples with so many images; of bad records for -1."""
    return StoredRows(
        *to_tables(
            MeasuredSample(
                Measurement(20 + number, 5, count, 4 * count, cut=number == 0) if count >= 0 else BAD,
                tuple(MediaFacts(100 + place, 28, 56, -(2**62) + place) for place in range(count)),
            )
            for number, count in enumerate(images)
        ),
        in_full=True,
    )


def write(path, images):
    identities = [f"{number:064x}" for number in range(len(images))]
    write_length_table(stored(images), identities, path, key=KEY, files=FILES)
    return path


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "lengths.parquet", [1, 0, 2])


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=20))
def test_a_table_has_what_was_measured(tmp_path_factory, images):
    """Row by row, under the identities of the records."""
    path = write(tmp_path_factory.mktemp("table") / "lengths.parquet", images)

    known = read_length_table(path)

    whole = stored(images)
    assert np.array_equal(whole.table, known.table)
    assert np.array_equal(whole.media, known.media)
    assert [f"{number:064x}".encode() for number in range(len(images))] == known.identities.tolist()
    assert KEY == read_length_table_key(path)


def test_other_tools_read_a_table(table, tmp_path):
    rows = pq.read_table(table).to_pylist()
    read = datasets.Dataset.from_parquet(str(table), cache_dir=str(tmp_path / "cache"))

    assert rows == read.to_list()
    assert ["index", "sha256", *COLUMNS, "media"] == list(rows[0])
    assert [(20, True, 1), (21, False, 0), (22, False, 2)] == [
        (row["length"], row["cut"], len(row["media"])) for row in rows
    ]
    about = json.loads(pq.read_schema(table).metadata[b"packplan_lengths"])
    (file,) = about["files"]
    assert ("data.jsonl", 3, True) == (file["file"], file["records"], about["measured_in_full"])
    assert [[0, 1], [2]] == pp.plan(pq.read_table(table)["length"].to_numpy(), 42).packs.tolist()


def edit(name, value):
    """Return what changes row 1 of a column."""

    def change(table: pa.Table) -> pa.Table:
        first, _, *others = table[name].to_pylist()
        return table.set_column(table.column_names.index(name), name, pa.array([first, value, *others]))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edit("length", 0), r"no valid measurement in row 1, counted from 0 \(length 0, supervised 5, .*bad 0\): "),
        (edit("supervised", 21), "no valid measurement in row 1"),
        (edit("patches", -1), "no valid measurement in row 1"),
        (edit("length", None), "it has 1 null in place of numbers"),
        (edit("length", 20.5), "cannot be read: .*20.5"),
        (edit("length", 2**32 + 21), "cannot be read: .*4294967317"),
        (lambda table: table.drop_columns(["patches"]), r"cannot be read: .*patches"),
        (lambda table: table.set_column(table.column_names.index("media"), "media",
                                        pa.array([[]] * 3, table.schema.field("media").type)),
         "more or fewer entries"),
        (lambda _: pa.table({"length": [1]}), "is not a table of lengths"),
        (lambda table: table.replace_schema_metadata(
            {b"packplan_lengths": b'{"schema": "packplan length table 0"}'}), "has another format"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_what_was_measured_is_refused(table, change, says):
    """Edited by hand, or by a tool that makes other numbers of them: none is dropped or cut."""
    pq.write_table(change(pq.read_table(table)), table)

    with pytest.raises(ArgumentError, match=says):
        read_length_table(table)
    if " is " in says:
        with pytest.raises(ArgumentError, match=says):
            read_length_table_key(table)


def test_a_part_of_a_table_is_a_table(table):
    """Rows may be left out, sorted, and written in other parts, by any tool."""
    pq.write_table(pq.read_table(table).take([2, 1]), table, row_group_size=1)

    known = read_length_table(table)

    assert [22, 21] == known.table[:, 0].tolist()
    assert 2 == len(known.media)


def test_a_damaged_file_is_no_table(table):
    """A byte of a column that changed; no table, and no file."""
    whole, schema = table.read_bytes(), pq.read_schema(table)
    chunk = pq.read_metadata(table).row_group(0).column(schema.get_field_index("length"))
    last = chunk.data_page_offset + chunk.total_compressed_size - 1
    table.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_length_table(table)

    table.write_text("no table")
    for says in ("is not a table of lengths", "does not exist"):
        for read in (read_length_table, read_length_table_key):
            with pytest.raises(ArgumentError, match=says):
                read(table)
        table.unlink(missing_ok=True)


def test_a_table_appears_whole_or_not_at_all(table, small_disk):
    """What a full disk leaves is what was there."""
    disk = small_disk(4096)
    with pytest.raises(OutputError, match=r"lengths\.parquet"):
        write(disk / "lengths.parquet", [3] * 100)
    assert [] == list(disk.iterdir())
    assert 3 == len(read_length_table(write(table, [0, 0, 0])).table)
