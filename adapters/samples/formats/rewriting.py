"""
Copies files that allow no random access: Parquet becomes Arrow, other formats become JSON Lines.

Each line of a copy is one line of the original file, or one row of its array or table. So messages
can name the place in the original. A copy is named by the digest of the original. It is published
by a rename, so that a reader finds a whole copy or none. The digest is cached, so that a later
start need not read an unchanged file.
"""

import contextlib
import csv
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.record_file import FileCache
from packplan.core.errors import DataSetError, counted

log = logging.getLogger(__name__)

_SCHEMA = "packplan.copy/3"
"""Schema of copies; increase its number with each change of their content."""

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
"""First bytes of gzip, Zstandard and Parquet files."""

DELIMITERS = {"csv": ",", "tsv": "\t"}
"""Delimiter between the fields of a table, by the kind of the table."""

MOST_CHARACTERS = 2**27
"""Largest number of characters in a field of a table."""

_COMPRESSIONS = {GZIP: "gzip", ZSTD: "zstd"}
"""pyarrow's name of each compression, by the first bytes of a compressed file."""

_FEED = 2**14
"""Bytes that are decompressed at once; a fault is reported at the first line of such a block."""

_CHUNK = 2**20

_HEAD = 4096

_MAX_BATCH_ROWS = 1000
"""Largest number of rows in a batch of rewritten Parquet; `_BATCH_BYTES` is another limit."""

_BATCH_BYTES = 2**23

_VALUES = json.JSONDecoder(strict=False, parse_int=str, parse_float=str, parse_constant=str)
"""Lenient decoder that only finds the end of each value; records are validated when read."""

_BLANKS = re.compile(r"[ \t\r\n]*")

_LINE_ENDS = str.maketrans("\r\n", "\t\t")
"""Replaces line ends by tabs: both are blanks between JSON values, and invalid inside strings."""

csv.field_size_limit(MOST_CHARACTERS)


def make_copy(path: Path, cache: Path | None, *, kind: str, name: str) -> Path:
    """
    Return the path of a file's copy in a format with random access, and write it if needed.

    Args:
        path: File to copy.
        cache: Folder of copies; None refuses to copy the file.
        kind: Format of the file, which is `lines`, `array`, `parquet`, or a key of `DELIMITERS`.
        name: Name of the file in messages.

    Raises:
        DataSetError: The file is damaged, or *cache* is None.
        OutputError: The copy cannot be written, for example on a full disk.
    """
    if cache is None:
        raise DataSetError(f"{name} cannot be read in random order: unpack it, or convert it to JSON Lines")
    files.make_folder(cache)
    key = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with files.hold_lock(cache / f"{key}.lock", f"for a copy of {path.name}"):
        copy = cache / f"{_cached_digest(path, cache)[:32]}-{kind}.{'arrow' if kind == 'parquet' else 'jsonl'}"
    with files.hold_lock(copy.with_suffix(".lock"), f"for a copy of {path.name}"):
        if not (copy.is_file() and copy.with_suffix(".json").is_file()):
            log.info("%s is copied once, so that its records can be read in random order: %s", name, copy)
            with files.wrap_write_errors(copy):
                for left in cache.glob(f".{copy.name}.*"):  # left by a writer that was killed
                    left.unlink()
                with files.publish_file(copy) as file:
                    if kind == "parquet":
                        _rewrite_parquet(path, file, name)
                    else:
                        file.writelines(_jsonl_blocks(path, kind, name))
            files.write_manifest(copy.with_suffix(".json"), {"schema": _SCHEMA, "sha256": _compute_digest(copy)})
    return copy


def copy_fault(path: Path, copy: Path) -> str | None:
    """Return a message if a file or its copy has changed, else None; both are read in full."""
    if not copy.name.startswith(_compute_digest(path)[:32]):
        return "the file has changed since its copy was made, although its size and times are the same"
    written = files.read_manifest(copy.with_suffix(".json"), _SCHEMA)
    return None if written and written["sha256"] == _compute_digest(copy) else "its copy was changed"


def read_head(path: Path) -> tuple[bytes, bool]:
    """
    Return a file's first 4,096 bytes after decompression, and whether the file is compressed.

    If a compressed file is damaged, no bytes are returned.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.startswith((GZIP, ZSTD)):
        return head, False
    # The fault of a damaged file is reported when the whole file is read.
    with contextlib.suppress(OSError), _open_decompressed(path) as opened:
        return opened.read(_HEAD), True
    return b"", True


def _cached_digest(path: Path, cache: Path) -> str:
    """Return a file's SHA-256 from a cache, or compute it; DataSetError if the file changes."""
    cached = FileCache(cache, [path], kind="content")
    if (arrays := cached.load()) is not None:
        return arrays["sha256"].tobytes().hex()
    sha256 = _compute_digest(path)
    if cached.file_changed():
        raise DataSetError(f"{path} changed while it was read: start again when the file is complete")
    cached.save({"sha256": np.frombuffer(bytes.fromhex(sha256), np.uint8)})
    return sha256


def _compute_digest(path: Path) -> str:
    """Read a whole file, with a progress bar, and return its SHA-256 in hex."""
    size = path.stat().st_size
    with progress(total=size, desc=f"reading {path.name}", unit=" bytes", leave=False, delay=BRIEF_S) as bar:
        return files.hash_file(path, bar)


def _jsonl_blocks(path: Path, kind: str, name: str) -> Iterator[bytes]:
    """Yield a file's records as blocks of JSON Lines; DataSetError if the file is damaged."""
    number, opened = 1, _open_decompressed(path)
    bar = progress(desc=f"rewriting {path.name}", unit=" bytes", delay=BRIEF_S, leave=False)
    try:
        with opened, bar:
            parts = iter(partial(opened.read, _FEED), b"")
            if kind != "lines":
                text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
                rows = _array_rows(text.read(), name) if kind == "array" else _table_rows(text, name, DELIMITERS[kind])
                parts = (row.encode() + b"\n" for row in rows)
            for part in parts:
                number += part.count(b"\n")
                bar.update(len(part))
                yield part
    except UnicodeDecodeError:
        raise DataSetError(f"{name} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        if error.errno:  # the disk's, not the archive's
            raise
        unit = "line" if kind == "lines" else "row"
        message = f"{name}, {unit} {number:,}: the rest of the file cannot be read ({error}): get the whole file again"
        raise DataSetError(message) from None


def _array_rows(text: str, name: str) -> Iterator[str]:
    """Yield each value of a JSON array as a line; DataSetError if the array is incomplete."""
    place, row = _skip_blanks(text, text.index("[") + 1), 0
    while not text.startswith("]", place):
        row += 1
        try:
            end = _VALUES.raw_decode(text, place)[1]
        except json.JSONDecodeError as error:
            _refuse_row(name, row, f"is not a JSON value ({error.msg}): the file may be truncated")
        except RecursionError:
            _refuse_row(name, row, "is nested too deeply")
        yield text[place:end].translate(_LINE_ENDS)
        place = _skip_blanks(text, end)
        if text.startswith(",", place):
            place = _skip_blanks(text, place + 1)
            if text.startswith("]", place):
                _refuse_row(name, row, "is the last of the array, but a comma follows it: remove the comma")
        elif not text.startswith("]", place):
            _refuse_row(name, row, "is not followed by a comma or the end of the array: the file may be truncated")
    if _skip_blanks(text, place + 1) < len(text):
        _refuse_row(name, row, "is the last of the array, but more text follows the array: remove that text")


def _skip_blanks(text: str, place: int) -> int:
    """Return the position of the first non-blank character of *text* from *place* on."""
    return _BLANKS.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too


def _refuse_row(name: str, row: int, reason: str) -> NoReturn:
    raise DataSetError(f"{name}, row {row} {reason}")


def _table_rows(text: io.TextIOWrapper, name: str, delimiter: str) -> Iterator[str]:
    """
    Yield each row of a CSV or TSV table as a JSON object without empty fields.

    DataSetError is raised if a row has more or fewer fields than the header.
    """
    columns, number = None, 0
    try:
        for fields in csv.reader(text, delimiter=delimiter, strict=True):
            if columns is None:
                columns = [field.strip() for field in fields]
                if twice := next((column for column in columns if column and columns.count(column) > 1), None):
                    raise DataSetError(f"{name} names the column {twice!r} twice in its header: rename one")
            elif fields:
                number += 1
                if len(fields) != len(columns):
                    reason = f"has {counted(len(fields), 'field')}, but the header names {len(columns)}"
                    _refuse_row(name, number, f"{reason}: put quotes around each text that contains the delimiter")
                row = {column: field for column, field in zip(columns, fields, strict=True) if field}
                yield json.dumps(row, ensure_ascii=False)
    except csv.Error as error:
        _refuse_row(name, number + 1, f"is not a row of a table ({error}): a closing quote may be missing")


def _open_decompressed(path: Path) -> Any:
    """
    Open a file for reading, and decompress it if it begins like a gzip or Zstandard file.

    Reading damaged compressed data raises an OSError without errno.
    """
    import pyarrow as pa

    file = path.open("rb")
    head = file.read(len(ZSTD))
    file.seek(0)
    compression = next((name for start, name in _COMPRESSIONS.items() if head.startswith(start)), None)
    return file if compression is None else pa.CompressedInputStream(file, compression)


def _rewrite_parquet(path: Path, file: BinaryIO, name: str) -> None:
    """Write the rows of a Parquet file to *file* as an Arrow stream; DataSetError if damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = 0
    try:
        source = pq.ParquetFile(path, memory_map=False, buffer_size=_CHUNK, pre_buffer=False)
        total = source.metadata.num_rows
        size = sum(source.metadata.row_group(number).total_byte_size for number in range(source.num_row_groups))
        rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * total // max(size, 1)))
        bar = progress(total=total, desc=f"rewriting {path.name}", unit=" rows", delay=BRIEF_S, leave=False)
        with bar, pa.ipc.new_stream(file, source.schema_arrow) as writer:
            for batch in source.iter_batches(batch_size=rows, use_threads=False):
                batch.validate(full=True)
                writer.write_batch(batch)
                done += batch.num_rows
                bar.update(batch.num_rows)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None):  # the disk's, not the file's
            raise
        message = f"{name}, row {done + 1}: the file is damaged, or not Parquet ({str(error).splitlines()[0][:200]})"
        raise DataSetError(message) from None
