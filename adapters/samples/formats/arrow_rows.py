"""Reads rows of memory-mapped Arrow files, from `datasets.save_to_disk` or converted Parquet."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from packplan.adapters.samples.formats.record_file import RecordFile
from packplan.core.errors import DataSetError
from packplan.core.samples.identity import digest_record, digest_unreadable

MAX_UNPACKED = 2**26
"""
Largest number of bytes that opening Arrow files may allocate; compressed files need more, and are
refused.
"""

MOST_HELD = 2**25
"""Number of bytes read from a mapped file after which its pages are released."""

READ_AROUND = 2**21
"""Largest number of cached bytes that the system maps around a byte that is read."""

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_arrow_folder(path: Path) -> bool:
    """
    Return whether `datasets.save_to_disk` wrote a folder; DataSetError if it has several splits.
    """
    if (path / _SPLITS).is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if (entry / _STATE).is_file()))
        raise DataSetError(f"{path} has several splits: name one of its folders, {splits}")
    return (path / _STATE).is_file()


def list_arrow_files(path: Path) -> list[Path]:
    """Return the Arrow files of a `datasets.save_to_disk` folder, in row order."""
    try:
        names = [entry["filename"] for entry in json.loads((path / _STATE).read_text(encoding="utf-8"))["_data_files"]]
        parts = [path / name for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        message = f"{path / _STATE} was not written by datasets.save_to_disk: save the data set again"
        raise DataSetError(message) from None
    if any(part.parent != path for part in parts):
        raise DataSetError(f"{path / _STATE} names files outside of its folder: save the data set again")
    return parts


class ArrowFile(RecordFile):
    """Rows of one or more consecutive Arrow files; messages count rows from 1."""

    def _open(self, _: object) -> None:
        self._ends = np.cumsum([0, *(one.batch.num_rows for one in self._batches)])

    @cached_property
    def _batches(self) -> list[_MappedBatch]:
        import pyarrow as pa

        found: list[_MappedBatch] = []
        allocated, part = pa.total_allocated_bytes(), self.parts[0]
        try:
            for part in self.parts:
                found += self._open_part(part, allocated)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataSetError(f"{self.name}: {part.name} is damaged, or is not Arrow ({_reason(error)})") from None
        return found

    def _open_part(self, part: Path, allocated_before: int) -> Iterator[_MappedBatch]:
        """
        Map an Arrow file, and yield its batches; DataSetError if it is compressed, or if two
        columns have the same name.
        """
        import pyarrow as pa

        mapped = MappedFile(part)
        for number, batch in enumerate(_read_batches(mapped)):
            if not number:
                _refuse_duplicate_columns(self.name, batch.schema.names)
            if pa.total_allocated_bytes() - allocated_before > MAX_UNPACKED:
                message = f"{self.name}: {part.name} is compressed, which cannot be read row by row: save it as Parquet"
                raise DataSetError(message)
            batch.validate()
            mapped.count_read(batch.nbytes)
            yield _MappedBatch(batch, mapped)

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in super().__getstate__().items() if name != "_batches"}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _read_value(self, row: int) -> Any:
        import pyarrow as pa

        number = int(np.searchsorted(self._ends, row, side="right")) - 1
        held = self._batches[number]
        try:
            held.validate()
            return drop_nulls(held.row(row - int(self._ends[number])))
        except (pa.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise ValueError(f"the row is damaged, so copy the file again: {_reason(error)}") from None

    def _read_digest(self, row: int) -> bytes:
        try:
            return digest_record(self._read_value(row))
        except ValueError as error:
            return digest_unreadable([str(error).encode()])


class MappedFile:
    """
    Memory-mapped content of a file, with a limit on its resident pages.

    Mapped pages count as memory of the process, although the system can reclaim them. A run that
    reads in shuffled order would eventually map the whole file. Released pages stay in the system's
    page cache, and are mapped again when they are read.
    """

    def __init__(self, path: Path) -> None:
        """Map a file; OSError if it cannot be read, ValueError if it is empty."""
        with path.open("rb") as file:
            self.bytes: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._held = 0

    def count_read(self, num_bytes: int) -> None:
        """Add to the number of bytes read; after each `MOST_HELD` bytes, release mapped pages."""
        self._held += num_bytes
        if self._held > MOST_HELD:
            self.bytes.madvise(mmap.MADV_DONTNEED)
            self._held = 0


class _MappedBatch:
    """Record batch of an Arrow file, mapped into memory."""

    def __init__(self, batch: Any, mapped: MappedFile) -> None:
        self.batch, self._mapped, self._size = batch, mapped, batch.nbytes
        self._num_places = sum(len(column.buffers()) for column in batch.columns)
        self._is_sound = False

    def validate(self) -> None:
        """Check all offsets and texts at the first call; ArrowException if the batch is damaged."""
        if not self._is_sound:
            self.batch.validate(full=True)
            self._mapped.count_read(self._size)
            self._is_sound = True

    def row(self, number: int) -> Any:
        """Return row *number* of the batch as a dict of Python values."""
        value = self.batch.slice(number, 1).to_pylist()[0]
        row_bytes = self._size // self.batch.num_rows
        self._mapped.count_read(min(row_bytes + self._num_places * READ_AROUND, self._size + 2 * READ_AROUND))
        return value


def _read_batches(mapped: MappedFile) -> Iterator[Any]:
    """Yield the record batches of a memory-mapped Arrow file or stream, without a copy."""
    import pyarrow as pa

    held = pa.py_buffer(mapped.bytes)
    if mapped.bytes[:6] == b"ARROW1":
        file = pa.ipc.open_file(held)
        yield from (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        yield from pa.ipc.open_stream(held)


def _refuse_duplicate_columns(name: str, columns: list[str]) -> None:
    """Raise DataSetError if columns share a name, since only the last would be read."""
    if twins := [column for number, column in enumerate(columns) if column in columns[:number]]:
        raise DataSetError(f"{name} has two columns {twins[0]!r}, and one would be ignored: rename one")


def _reason(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def drop_nulls(value: Any) -> Any:
    """
    Return a value without null entries of objects, since Arrow stores null for an absent key.
    """
    if isinstance(value, dict):
        return {key: drop_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [drop_nulls(held) for held in value]
    return value
