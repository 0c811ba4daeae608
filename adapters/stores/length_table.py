"""Stores measurements of records in a Parquet table that other tools can read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packplan.adapters.files import publish_file, wrap_write_errors
from packplan.core.errors import ArgumentError, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import StoredRows
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, DataFile, KnownLengths, column, num_media

SCHEMA = "packplan length table 1"

_ABOUT = b"packplan_lengths"
"""Key of the manifest in the metadata of the table's schema."""

_FLAGS = ("cut", "bad")
"""Boolean columns of the file."""


def write_length_table(
    stored: StoredRows, identities: Iterable[str], path: Path, *, key: Fingerprint, files: Sequence[DataFile]
) -> None:
    """
    Write measurements to a Parquet file, one row for each record.

    If writing fails, no partial file is left.

    The columns are `index`, `sha256` (identity of the record), the fields of `Measurement`, and
    `media` (facts of each image and video).

    Args:
        stored: Measurements of all records.
        identities: Identity of each record, as in `KnownLengths.identities`.
        path: Parquet file to write; an existing file is replaced.
        key: Fingerprint of all inputs of the measurements except the data.
        files: Data files of the records.

    Raises:
        OutputError: The file cannot be written.
    """
    table = stored.table
    facts = pa.StructArray.from_arrays(list(np.ascontiguousarray(stored.media.T)), list(MEDIA_COLUMNS))
    ends = np.concatenate([[0], np.cumsum(num_media(table))]).astype(np.int32)
    columns: dict[str, Any] = {"index": np.arange(len(table)), "sha256": pa.array(identities, pa.string())}
    for name in COLUMNS:
        values = column(table, name)
        columns[name] = values != 0 if name in _FLAGS else values
    columns["media"] = pa.ListArray.from_arrays(ends, facts)
    about = {
        "schema": SCHEMA,
        "fingerprint": dict(key.inputs),
        "measured_in_full": stored.in_full,
        "files": [attrs.asdict(one) for one in files],
    }
    written = pa.table(columns).replace_schema_metadata({_ABOUT: json.dumps(about)})
    with wrap_write_errors(path), publish_file(path) as file:
        pq.write_table(written, file, write_page_checksum=True)


def read_length_table_key(path: Path) -> Fingerprint:
    """Return the fingerprint in a table's metadata; ArgumentError if Packplan did not write it."""
    return Fingerprint(_read_header(path)["fingerprint"])


def read_length_table(path: Path) -> KnownLengths:
    """
    Return the measurements in a table that `write_length_table` wrote.

    Raises:
        ArgumentError: The file is missing, damaged or not a table in the format of this version.
    """
    _read_header(path)
    try:
        read = pq.read_table(path, page_checksum_verification=True)
        media = read.column("media").combine_chunks()
        numbers, facts = np.diff(media.offsets.to_numpy()), media.flatten()
        known = KnownLengths(
            read.column("sha256").to_numpy().astype("S64"),
            np.stack([_to_int32(read.column(name)) for name in COLUMNS], axis=1),
            np.stack([facts.field(name).to_numpy() for name in MEDIA_COLUMNS], axis=1),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _table_error(path, f"cannot be read: {error}") from None
    if np.any(numbers != num_media(known.table)):
        raise _table_error(path, "has more or fewer entries in the column media than images and videos: measure again")
    # A record that is not bad has at least one token that is not supervised.
    lengths, supervised, bad = (column(known.table, name) for name in ("length", "supervised", "bad"))
    wrong = (known.table < 0).any(axis=1) | ((bad == 0) & (lengths <= supervised))
    if wrong.any():
        row = int(np.argmax(wrong))
        said = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS, known.table[row].tolist(), strict=True))
        raise _table_error(path, f"has no valid measurement in row {row}, counted from 0 ({said}): measure again")
    return known


def _to_int32(values: pa.ChunkedArray) -> NDArray[np.int32]:
    """Return a column as int32; ValueError for a null, a fraction or a number out of range."""
    if values.null_count:
        raise ValueError(f"it has {counted(values.null_count, 'null')} in place of numbers")
    return np.asarray(values.cast(pa.int32()), dtype=np.int32)


def _read_header(path: Path) -> Mapping[str, Any]:
    """Return the manifest in a table's metadata; ArgumentError if the file has none."""
    try:
        about: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[_ABOUT])
    except FileNotFoundError:
        raise _table_error(path, "does not exist") from None
    except (OSError, ValueError, KeyError):
        raise _table_error(path, "is not a table of lengths that packplan measure wrote") from None
    if about.get("schema") != SCHEMA:
        raise _table_error(path, f"has another format than this version of Packplan reads ({SCHEMA}): measure again")
    return about


def _table_error(path: Path, reason: str) -> ArgumentError:
    return ArgumentError("host", f"{path} {reason}", {"path": str(path)})
