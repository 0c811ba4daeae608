"""
Data files -> records: the one place that knows which format a file has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adapters.samples.jsonl import JsonlRecords, require_file
from core.ports import Records


def open_records(paths: tuple[str, ...], *, max_line_bytes: int | None = None) -> Records:
    """
    Open data files, whose records follow each other.

    Args:
        paths: Names of the files.

        max_line_bytes: A record on a longer line is refused when it is asked for, and never read;
        None reads all.

    Raises:
        DataSetError: A file cannot be read, or holds no record.
    """
    return JsonlRecords(paths, max_line_bytes=max_line_bytes)


def require_files(paths: Iterable[str]) -> None:
    """Refuse data files that are not there, before anything reads them; DataSetError."""
    for path in paths:
        require_file(Path(path))


def rebased(record: Any, folder: Path, onto: Path) -> Any:
    """
    Return a record of a file in *folder* as one in *onto* has to read: with the same images.

    Args:
        record: A record's JSON value.

        folder: Where its relative images start.

        onto: Folder of the file that it is written to.
    """
    images = record.get("images") if isinstance(record, dict) else None
    if not images:
        return record
    paths = [images] if isinstance(images, str) else images
    return {**record, "images": [os.path.relpath(folder / image, onto) for image in paths]}
