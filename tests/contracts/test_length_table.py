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
from packplan.adapters.stores.length_table import (
    read_length_table,
    read_length_table_key,
    write_length_table,
)
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
    assert [20, 21, 22] == [row["length"] for row in rows]
    assert [True, False, False] == [row["cut"] for row in rows]
    assert [1, 0, 2] == [len(row["media"]) for row in rows]
    about = json.loads(pq.read_schema(table).metadata[b"packplan_lengths"])
    assert ("data.jsonl", 3, True) == (
        about["files"][0]["file"],
        about["files"][0]["records"],
        about["measured_in_full"],
    )
    assert [[0, 1], [2]] == pp.plan(pq.read_table(table)["length"].to_numpy(), 42).packs.tolist()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("length", 0, r"no measurement in row 1, from 0 \(length 0, supervised 5, .*bad 0\): measure it again"),
        ("supervised", 21, "no measurement in row 1"),
        ("patches", -1, "no measurement in row 1"),
        ("length", None, "it has 1 null where numbers are"),
        ("length", 20.5, "cannot be read: .*20.5"),
        ("length", 2**32 + 21, "cannot be read: .*4294967317"),
    ],
)
def test_a_number_that_no_record_has_is_refused_with_its_row(table, name, value, says):
    """Edited by hand, or by a tool that makes other numbers of them: none is dropped or cut."""
    read = pq.read_table(table)
    values = read[name].to_pylist()
    values[1] = value
    pq.write_table(read.set_column(read.column_names.index(name), name, pa.array(values)), table)

    with pytest.raises(ArgumentError, match=says):
        read_length_table(table)


def test_a_part_of_a_table_is_a_table(table):
    """Rows may be left out, sorted, and written in other parts, by any tool."""
    part = pq.read_table(table).take([2, 1])
    pq.write_table(part, table, row_group_size=1)

    known = read_length_table(table)

    assert [22, 21] == known.table[:, 0].tolist()
    assert 2 == len(known.media)


def test_what_is_no_table_is_named(table, tmp_path):
    """A file of another tool, of another version, one that is damaged, and none."""
    (tmp_path / "text.parquet").write_text("no table")
    pq.write_table(pa.table({"length": [1]}), tmp_path / "plain.parquet")
    other = pq.read_table(table).replace_schema_metadata(
        {b"packplan_lengths": b'{"schema": "packplan length table 0"}'}
    )
    pq.write_table(other, tmp_path / "other.parquet")
    faults = {
        "missing": "does not exist",
        "text": "is no table of lengths",
        "plain": "is no table of lengths",
        "other": "is of another version",
    }
    for name, fault in faults.items():
        for read in (read_length_table, read_length_table_key):
            with pytest.raises(ArgumentError, match=fault):
                read(tmp_path / f"{name}.parquet")


def test_a_damaged_table_is_refused(table):
    """A byte of a column that changed; a column that is gone; facts that do not fit."""
    whole, read = table.read_bytes(), pq.read_table(table)
    chunk = pq.read_metadata(table).row_group(0).column(read.schema.get_field_index("length"))
    last = chunk.data_page_offset + chunk.total_compressed_size - 1
    table.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_length_table(table)

    pq.write_table(read.drop_columns(["patches"]), table)
    with pytest.raises(ArgumentError, match=r"cannot be read: .*patches"):
        read_length_table(table)

    fewer = pa.array([[]] * 3, read.schema.field("media").type)
    pq.write_table(read.set_column(read.schema.get_field_index("media"), "media", fewer), table)
    with pytest.raises(ArgumentError, match="other numbers of images"):
        read_length_table(table)


def test_a_table_appears_whole_or_not_at_all(table, small_disk):
    """What a full disk leaves is what was there."""
    disk = small_disk(4096)
    with pytest.raises(OutputError, match=r"lengths\.parquet"):
        write(disk / "lengths.parquet", [3] * 100)
    assert [] == list(disk.iterdir())
    assert 3 == len(read_length_table(write(table, [0, 0, 0])).table)
