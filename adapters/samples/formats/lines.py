"""Reads records of JSON Lines files at their byte positions, and parses them as strict JSON."""

import json
import math
import os
import resource
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.record_file import RecordFile
from packplan.core.errors import counted
from packplan.core.samples.identity import digest_record, digest_unreadable
from packplan.core.samples.tables import RecordLocation

CHUNK = 2**20
"""Largest number of bytes of a line that are read in one call."""

LONGEST_PARSED = 2**25
"""
Largest size in bytes of a record that is parsed. A larger record is refused. Its digest is computed
from its text, not from its value.
"""


_KEPT: set[int] = set()
"""
File descriptors that stay open, at most a quarter of the process's limit. Other files are opened
for each read.
"""

_TOO_LONG = "a number with more than 4,300 digits is too large: write it as text, in quotes"
"""Reason that replaces Python's message, which names a function of `sys`."""


class LinesFile(RecordFile):
    """
    Records of a JSON Lines file, one in each line that is not blank, read by byte position.

    Attributes:
        spans: Start byte, end byte and line number of each record; int64, shape (num_records, 3).
    """

    unit = "line"

    def _open(self, arrays: Mapping[str, NDArray[Any]] | None) -> None:
        (self.path,) = self.parts
        self._descriptor: int | None = None
        self.spans = self._scan() if arrays is None else arrays["spans"].reshape(-1, 3)

    def _arrays_to_cache(self) -> dict[str, NDArray[Any]]:
        return {"spans": self.spans.reshape(-1), **super()._arrays_to_cache()}

    def cache_fault(self) -> str | None:
        """Read the whole file; return a message if it differs from its cached arrays, else None."""
        if self._is_cached and not np.array_equal(self._scan(), self.spans):
            fact = f"the positions of its records differ from those in {self._cache.path}"
            return f"{fact}: delete that file, and build the plan again"
        return super().cache_fault()

    def _scan(self) -> NDArray[np.int64]:
        """Return start byte, end byte and line number of each record; shape (num_records, 3)."""
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
        start, end, _ = self.spans[row].tolist()
        if end - start > LONGEST_PARSED:
            several = "write each record on a line of its own, and" if len(self) == 1 else "write"
            reason = f"the {self.unit} has {counted(end - start, 'byte')}, but may have at most {LONGEST_PARSED:,}"
            raise ValueError(f"{reason}: {several} images to files")
        return _parse_record(b"".join(self._read_text(start, end)))

    def location(self, row: int) -> RecordLocation:
        """Return the file and line of the record in *row*."""
        return RecordLocation(self.name, int(self.spans[row, 2]), self.unit)

    def _read_digest(self, row: int) -> bytes:
        start, end, _ = self.spans[row].tolist()
        if end - start > LONGEST_PARSED:
            return digest_unreadable(self._read_text(start, end))
        text = b"".join(self._read_text(start, end))
        try:
            return digest_record(_parse_record(text))
        except ValueError:
            return digest_unreadable([text])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_descriptor": None}

    def _read_text(self, start: int, end: int) -> Iterator[bytes]:
        """Yield a record's bytes in blocks, without leading and trailing blanks."""
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
        """Read and return the bytes *start* to *end* - 1, without mapping the file into memory."""
        kept = self._descriptor
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC) if kept is None else kept
        if kept is None and len(_KEPT) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
            self._descriptor = kept = descriptor
            _KEPT.add(descriptor)
            weakref.finalize(self, _close_kept, descriptor)
        try:
            # pread, since forked processes share the descriptor's own position.
            return os.pread(descriptor, end - start, start)
        finally:
            if kept is None:
                os.close(descriptor)


def _close_kept(descriptor: int) -> None:
    """Close a descriptor of `_KEPT` when its file object is collected."""
    _KEPT.discard(descriptor)
    os.close(descriptor)


def _parse_record(text: bytes) -> Any:
    """Parse a record's text as strict JSON; ValueError with the reason if it is invalid."""
    try:
        value = json.loads(
            text.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            object_pairs_hook=_to_unique_object,
        )
        # In images of a megabyte, searching for one byte is much faster than for three.
        if b"\\" in text and (b"\\ud" in text or b"\\uD" in text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        reason = f"the record has the unpaired surrogate {half}: write the whole pair, or remove it"
        raise ValueError(reason) from None
    except UnicodeDecodeError:
        raise ValueError("the record is not UTF-8 text: save the file as UTF-8") from None
    except ValueError as error:
        reason = _TOO_LONG if "sys.set_int_max_str_digits" in str(error) else str(error)
        raise ValueError(f"the record is not valid JSON: {reason}") from None
    except RecursionError:
        raise ValueError("the record is nested too deeply: flatten it") from None
    return value


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large: write it as text, in quotes")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _to_unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """
    Build a dict from keys and values; ValueError for a repeated key, since `dict` would keep only
    the last value.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        # In one pass, since counting each name separately would take hours in a long line.
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r} is written twice in one object: remove one of them")
    return found
