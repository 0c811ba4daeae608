"""JSONL files -> records, addressed by position, with the line they stand on."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adapters.progress import BRIEF_S, progress
from core.errors import DataSetError, RecordError, counted
from core.samples import Place

_NOTHING = hashlib.sha256()

_CHUNK = 2**20
"""Bytes of a long line that are in memory at once."""

_MEDIA_TAG = re.compile(rb"(?:<|\\u003[cC])(?:video|audio)(?:>|\\u003[eE])")
"""`<video>` or `<audio>`, as JSON may write it."""


class JsonlRecords:
    """Records of one or more files, in order; blank lines are no records."""

    def __init__(self, paths: tuple[str, ...], *, max_line_bytes: int | None = None) -> None:
        """
        Find every record's place, in one pass.

        Args:
            paths: Of the files.

            max_line_bytes: A record on a longer line is refused when it is asked for, and never
            read; None reads all.

        Raises:
            DataSetError: A file cannot be read, or holds no record.
        """
        self.paths = [Path(path) for path in paths]
        self.max_line_bytes = max_line_bytes
        self.num_with_media_tags = 0
        """Records that say <video> or <audio>."""
        spans = []
        for number, path in enumerate(self.paths):
            found, with_tags = _scan(path)
            if not len(found):
                message = f"{path} holds no record: the data set is empty"
                raise DataSetError(message)
            spans.append(np.column_stack([np.full(len(found), number), found]))
            self.num_with_media_tags += with_tags
        self._spans = np.concatenate(spans)
        """File, first byte, end, line; shape (num_records, 4)."""
        self._maps: dict[int, mmap.mmap] = {}
        self._digest, self._digested = _NOTHING.copy(), range(0)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Any:
        """Return the JSON value of record *index*; RecordError naming file and line."""
        place = str(self.where(index))
        size = int(self._spans[index, 2] - self._spans[index, 1])
        if self.max_line_bytes is not None and size > self.max_line_bytes:
            reason = (
                f"the line has {counted(size, 'byte')}, but may have {self.max_line_bytes:,}: shorten it, or raise "
                "custom.max_line_bytes"
            )
            raise RecordError(place, reason)
        text = b"".join(self._text(index))
        try:
            value = json.loads(
                text.decode("utf-8-sig"),
                parse_constant=_no_constant,
                parse_int=_whole_number,
                parse_float=_number,
                object_pairs_hook=_unique,
            )
            if b"\\ud" in text or b"\\uD" in text:
                json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start]).strip("'")
            reason = f"has {half} without its other half, which is no character: write the whole pair, or remove it"
            raise RecordError(place, reason) from None
        except UnicodeDecodeError:
            raise RecordError(place, "is not UTF-8 text") from None
        except _UnreadableNumberError as error:
            raise RecordError(place, str(error)) from None
        except ValueError as error:
            raise RecordError(place, f"is no valid JSON: {error}") from None
        except RecursionError:
            raise RecordError(place, "is no usable JSON: it is nested too deeply") from None
        return value

    def digest(self, count: int, *, start: int = 0) -> str:
        """
        Return the SHA-256 of *count* records from *start* on: their text, and the folders that
        their media start at.

        Other rows leave it as it is. Asked for rising counts, it reads each record once.
        """
        if start != self._digested.start or start + count < self._digested.stop:
            self._digest, self._digested = _NOTHING.copy(), range(start, start)
        left = range(self._digested.stop, start + count)
        for index in progress(left, desc="hashing the data", unit=" records", leave=False, delay=BRIEF_S):
            if index == start or self._spans[index, 0] != self._spans[index - 1, 0]:
                self._digest.update(f"{Path(self.folder(index)).resolve()}\n".encode())
            for part in self._text(index):
                self._digest.update(part)
            self._digest.update(b"\n")
        self._digested = range(start, start + count)
        return self._digest.hexdigest()

    def where(self, index: int) -> Place:
        """Return the file and the line of record *index*."""
        return Place(str(self.paths[int(self._spans[index, 0])]), int(self._spans[index, 3]))

    def folder(self, index: int) -> str:
        """Return the folder that relative media of record *index* start at."""
        return str(self.paths[int(self._spans[index, 0])].parent)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("paths", "max_line_bytes", "num_with_media_tags", "_spans")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _maps={}, _digest=_NOTHING.copy(), _digested=range(0))

    def _text(self, index: int) -> Iterator[bytes]:
        """Yield the record's bytes in parts, without the blanks around it."""
        number, start, end, _ = self._spans[index].tolist()
        if number not in self._maps:
            with self.paths[number].open("rb") as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        held = self._maps[number]
        while held[start : start + 1].isspace():
            start += 1
        while held[end - 1 : end].isspace():
            end -= 1
        for place in range(start, end, _CHUNK):
            yield held[place : min(place + _CHUNK, end)]


class _UnreadableNumberError(Exception):
    """A number that is JSON, and that no program reads as it is written."""


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = (
            f"has a number of {len(text.removeprefix('-')):,} digits, which cannot be read: write it as text, in quotes"
        )
        raise _UnreadableNumberError(message) from None


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        message = f"has the number {text[:40]}, which is too large to be read: write it as text, in quotes"
        raise _UnreadableNumberError(message)
    return number


def _no_constant(name: str) -> None:
    message = f"{name} is no JSON number"
    raise ValueError(message)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def require_file(path: Path) -> int:
    """
    Return the size of a data file in bytes.

    Raises:
        DataSetError: There is no file, or it may not be looked at.
    """
    try:
        # A pipe would wait for a writer, and could be read once.
        if path.exists() and not path.is_file():
            message = f"{path} is a folder, a pipe or a device: name a JSONL file"
            raise DataSetError(message)
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataSetError:
    return DataSetError(f"{path} cannot be read ({error.strerror}): name an existing JSONL file")


def _scan(path: Path) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """
    Return first byte, end and line of every record, and how many say <video> or <audio>; no line is
    read whole.
    """
    rows: list[tuple[int, int, int]] = []
    num_with_tags = 0
    size = require_file(path)
    bar = progress(total=size, desc=f"reading {path.name}", unit=" bytes", leave=False, delay=BRIEF_S)
    try:
        with path.open("rb") as file, bar:
            start, line = 0, 0
            while text := file.readline(_CHUNK):
                line, end = line + 1, start + len(text)
                says, tagged = not text.isspace(), _is_tagged(text)
                while len(text) == _CHUNK and not text.endswith(b"\n"):
                    text = file.readline(_CHUNK)
                    end, says, tagged = end + len(text), says or bool(text.strip()), tagged or _is_tagged(text)
                if says:
                    rows.append((start, end, line))
                    num_with_tags += tagged
                bar.update(end - start)
                start = end
    except OSError as error:
        raise _unreadable(path, error) from None
    return np.array(rows, dtype=np.int64).reshape(-1, 3), num_with_tags


def _is_tagged(text: bytes) -> bool:
    return (b"video" in text or b"audio" in text) and _MEDIA_TAG.search(text) is not None
