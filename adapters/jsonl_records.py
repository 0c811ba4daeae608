"""JSONL files -> records, addressed by position, with the line they stand on."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import DataSetError, RecordError


class JsonlRecords:
    """Records of one or more files, in order; blank lines are no records."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        """
        Find every record's place, and digest the files, in one pass.

        Raises:
            DataSetError: A file cannot be read, or holds no record.
        """
        self.paths = [Path(path) for path in paths]
        self.digests: list[str] = []
        spans = []
        for number, path in enumerate(self.paths):
            digest, found = _scan(path)
            if not len(found):
                message = f"{path} holds no record: the data set is empty"
                raise DataSetError(message)
            self.digests.append(digest)
            spans.append(np.column_stack([np.full(len(found), number), found]))
        self._spans = np.concatenate(spans)
        """File, first byte, end, line; shape (num_records, 4)."""
        self._maps: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Any:
        """Return the JSON value of record *index*; RecordError naming file and line."""
        number, start, end, line = self._spans[index].tolist()
        path = self.paths[number]
        if number not in self._maps:
            with path.open("rb") as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            return json.loads(self._maps[number][start:end].decode("utf-8-sig"), parse_constant=_no_constant)
        except UnicodeDecodeError:
            raise RecordError(str(path), line, "is not UTF-8 text") from None
        except ValueError as error:
            raise RecordError(str(path), line, f"is no valid JSON: {error}") from None
        except RecursionError:
            raise RecordError(str(path), line, "is no usable JSON: it is nested too deeply") from None

    def where(self, index: int) -> tuple[str, int]:
        """Return the file and the line of record *index*."""
        return str(self.paths[int(self._spans[index, 0])]), int(self._spans[index, 3])

    def folder(self, index: int) -> Path:
        """Return the folder that relative media of record *index* start at."""
        return self.paths[int(self._spans[index, 0])].parent

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}


def _no_constant(name: str) -> None:
    message = f"{name} is no JSON number"
    raise ValueError(message)


def _scan(path: Path) -> tuple[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the file's SHA-256, and first byte, end and line of every record."""
    digest = hashlib.sha256()
    rows: list[tuple[int, int, int]] = []
    try:
        with path.open("rb") as file:
            start = 0
            for line, text in enumerate(file, 1):
                digest.update(text)
                if text.strip():
                    rows.append((start, start + len(text), line))
                start += len(text)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): name an existing JSONL file"
        raise DataSetError(message) from None
    return digest.hexdigest(), np.array(rows, dtype=np.int64).reshape(-1, 3)
