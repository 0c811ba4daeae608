"""
JSON Lines, whose records stand at known bytes: read when asked for, and parsed with everything
refused that would be read otherwise.
"""

import json
import math
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.record_file import FileCache, FileName, RecordFile
from packplan.core.errors import DataSetError, RecordError, counted
from packplan.core.samples.identity import digest_record, digest_unreadable
from packplan.core.samples.tables import RecordLocation

CHUNK = 2**20
"""Bytes of a long record that are in memory at once."""

LONGEST_PARSED = 2**25
"""
Bytes of a record beyond which it is never parsed: it is refused, and its digest is that of its
text.
"""


class LinesFile(RecordFile):
    """
    Records of one file by their bytes, a record a line; blank lines are no records.

    Attributes:
        spans: First byte, end, and number of the line, of each record; shape (num_records, 3).
    """

    def __init__(
        self, path: Path, *, named: FileName, max_bytes: int | None, cache: Path | None, unit: str = "line"
    ) -> None:
        """
        Find every record's place, in one pass, unless that is kept from an earlier start.

        Args:
            path: File of the text.
            named: Name and folder of the file.
            max_bytes: A record of more text is refused when it is asked for; None reads all.
            cache: Folder where what was found is kept; None keeps nothing.
            unit: Name of a record's place: a copy of an array or a table has a row a line.

        Raises:
            DataSetError: The file cannot be read as what it is.
        """
        self.path, self.named, self.max_bytes, self.unit = path, named, max_bytes, unit
        self._descriptor: int | None = None
        try:
            self._kept = FileCache(cache, [path], kind=type(self).__name__, is_copy=named.copy is not None)
            if (found := self._kept.load()) is None:
                self.spans = self._scan()
            else:
                self._restore(found[1])
        except OSError as error:
            message = f"{self.named.name} cannot be read ({error.strerror}): name an existing data file"
            raise DataSetError(message) from None

    def _restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.spans = arrays["spans"].reshape(-1, 3)
        super()._restore(arrays)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"spans": self.spans.reshape(-1)}

    def cache_fault(self) -> str | None:
        """Return the difference of all of the file from the kept facts; None if there is none."""
        if self._is_kept and not np.array_equal(self._scan(), self.spans):
            return f"its records stand in other places than {self._kept.path} says: delete that, and build again"
        return super().cache_fault()

    def _scan(self) -> NDArray[np.int64]:
        """Return the spans; no line is read whole."""
        found = array("q")
        bar = progress(desc=f"reading {self.path.name}", unit=" bytes", leave=False, delay=BRIEF_S)
        with self.path.open("rb") as file, bar:
            bar.total = os.fstat(file.fileno()).st_size
            start, line = 0, 0
            while text := file.readline(CHUNK):
                line, end, says = line + 1, start + len(text), not text.isspace()
                while len(text) == CHUNK and not text.endswith(b"\n"):
                    text = file.readline(CHUNK)
                    end, says = end + len(text), says or bool(text.strip())
                if says:
                    found.extend((start, end, line))  # 24 bytes each, where tuples of numbers take 170
                bar.update(end - start)
                start = end
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.spans)

    def _read_value(self, row: int) -> Any:
        where, size = str(self.location(row)), self._num_bytes(row)
        if self.max_bytes is not None and size > LONGEST_PARSED:
            several = "write each record on one line if it holds several, and" if len(self) == 1 else "write"
            reason = f"the {self.unit} has {counted(size, 'byte')}, but may have {LONGEST_PARSED:,}"
            raise RecordError(where, f"{reason}: {several} images to files")
        return read_value(b"".join(self._read_text(row)), where)

    def location(self, row: int) -> RecordLocation:
        """Return the place of a record."""
        return RecordLocation(self.named.name, int(self.spans[row, 2]), self.unit)

    def _read_digest(self, row: int) -> bytes:
        if self._num_bytes(row) > LONGEST_PARSED:
            return digest_unreadable(self._read_text(row))
        text = b"".join(self._read_text(row))
        try:
            return digest_record(read_value(text, ""))
        except RecordError:
            return digest_unreadable([text])

    def digest_value(self, row: int, value: Any) -> bytes:
        """Return the digest of a record that was read."""
        return self._read_digest(row) if self._num_bytes(row) > LONGEST_PARSED else digest_record(value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def _num_bytes(self, row: int) -> int:
        return int(self.spans[row, 1] - self.spans[row, 0])

    def _read_text(self, row: int) -> Iterator[bytes]:
        """Yield a record's bytes in parts, without the blanks around it."""
        start, end = self.spans[row, :2].tolist()
        if end - start <= CHUNK:
            yield self._read_bytes(start, end).strip()
            return
        while self._read_bytes(start, start + 1).isspace():
            start += 1
        while self._read_bytes(end - 1, end).isspace():
            end -= 1
        for place in range(start, end, CHUNK):
            yield self._read_bytes(place, min(place + CHUNK, end))

    def _read_bytes(self, start: int, end: int) -> bytes:
        """Return bytes of the file; nothing of it stays in memory."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
        # At a place, since processes that were forked share the file's own position.
        return os.pread(self._descriptor, end - start, start)


def read_value(text: bytes, where: str) -> Any:
    """Return the JSON value of a record's text; RecordError, at *where*, if there is none."""
    try:
        value = json.loads(
            text.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            object_pairs_hook=_to_object,
        )
        # One byte is found much sooner than three are, in images of a megabyte.
        if b"\\" in text and (b"\\ud" in text or b"\\uD" in text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        reason = f"has {half} without its other half, which is no character: write the whole pair, or remove it"
        raise RecordError(where, reason) from None
    except UnicodeDecodeError:
        raise RecordError(where, "is not UTF-8 text") from None
    except ValueError as error:
        raise RecordError(where, f"is no valid JSON: {error}") from None
    except RecursionError:
        raise RecordError(where, "is no usable JSON: it is nested too deeply") from None
    return value


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        message = f"the number {text[:40]} is too large: write it as text, in quotes"
        raise ValueError(message)
    return number


def _refuse_constant(name: str) -> None:
    message = f"{name} is no JSON number"
    raise ValueError(message)


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """
    Return an object's keys and values; ValueError if a key is there twice, of which JSON would keep
    the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        # In one pass: counting each name would take hours in a long line.
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        message = f"the key {twice!r} is written twice in one object"
        raise ValueError(message)
    return found
