"""Copies of data that one process writes and several processes read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from packplan.adapters import files
from packplan.adapters.progress import progress


@contextlib.contextmanager
def held(path: Path, source: Path) -> Iterator[None]:
    """
    Let one process write a copy, and let the others wait for it.

    Args:
        path: Lock file.
        source: File that is copied, named in the progress line.
    """
    lock = FileLock(path)
    with progress(desc=f"waiting for a copy of {source.name}", bar_format="{desc} [{elapsed}]", leave=False) as bar:
        while True:
            with files.writing(path):
                try:
                    lock.acquire(timeout=0.5)
                    break
                except Timeout:
                    bar.update()
    try:
        yield
    finally:
        lock.release()
