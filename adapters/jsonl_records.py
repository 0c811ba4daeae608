"""JSONL files -> records, addressed by position, with the line they stand on."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import DataSetError, RecordError

_NOTHING = hashlib.sha256()


class JsonlRecords:
    """Records of one or more files, in order; blank lines are no records."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        """
        Find every record's place, in one pass.

        Raises:
            DataSetError: A file cannot be read, or holds no record.
        """
        self.paths = [Path(path) for path in paths]
        spans = []
        for number, path in enumerate(self.paths):
            found = _scan(path)
            if not len(found):
                message = f"{path} holds no record: the data set is empty"
                raise DataSetError(message)
            spans.append(np.column_stack([np.full(len(found), number), found]))
        self._spans = np.concatenate(spans)
        """File, first byte, end, line; shape (num_records, 4)."""
        self._maps: dict[int, mmap.mmap] = {}
        self._digest, self._digested = _NOTHING.copy(), range(0)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Any:
        """Return the JSON value of record *index*; RecordError naming file and line."""
        path, line = self.where(index)
        try:
            return json.loads(self._text(index).decode("utf-8-sig"), parse_constant=_no_constant)
        except UnicodeDecodeError:
            raise RecordError(path, line, "is not UTF-8 text") from None
        except ValueError as error:
            raise RecordError(path, line, f"is no valid JSON: {error}") from None
        except RecursionError:
            raise RecordError(path, line, "is no usable JSON: it is nested too deeply") from None

    def digest(self, count: int, *, start: int = 0) -> str:
        """
        Return the SHA-256 of *count* records from *start* on: their text, and the folders that their media start at.

        Other rows leave it as it is. Asked for rising counts, it reads each record once.
        """
        if start != self._digested.start or start + count < self._digested.stop:
            self._digest, self._digested = _NOTHING.copy(), range(start, start)
        for index in range(self._digested.stop, start + count):
            if index == start or self._spans[index, 0] != self._spans[index - 1, 0]:
                self._digest.update(f"{self.folder(index).resolve()}\n".encode())
            self._digest.update(self._text(index) + b"\n")
        self._digested = range(start, start + count)
        return self._digest.hexdigest()

    def where(self, index: int) -> tuple[str, int]:
        """Return the file and the line of record *index*."""
        return str(self.paths[int(self._spans[index, 0])]), int(self._spans[index, 3])

    def folder(self, index: int) -> Path:
        """Return the folder that relative media of record *index* start at."""
        return self.paths[int(self._spans[index, 0])].parent

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_spans": self._spans}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _maps={}, _digest=_NOTHING.copy(), _digested=range(0))

    def _text(self, index: int) -> bytes:
        number, start, end, _ = self._spans[index].tolist()
        if number not in self._maps:
            with self.paths[number].open("rb") as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[number][start:end].strip()


def rebased(record: Any, folder: Path, onto: Path) -> Any:
    """Return a record of a file in *folder* as one in *onto* has to read: with the same images."""
    images = record.get("images") if isinstance(record, dict) else None
    if not images:
        return record
    paths = [images] if isinstance(images, str) else images
    return {**record, "images": [os.path.relpath(folder / image, onto) for image in paths]}


def _no_constant(name: str) -> None:
    message = f"{name} is no JSON number"
    raise ValueError(message)


def _scan(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return first byte, end and line of every record."""
    rows: list[tuple[int, int, int]] = []
    try:
        with path.open("rb") as file:
            start = 0
            for line, text in enumerate(file, 1):
                if text.strip():
                    rows.append((start, start + len(text), line))
                start += len(text)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): name an existing JSONL file"
        raise DataSetError(message) from None
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
