"""A copy that several processes want, written by one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from adapters import files
from adapters.progress import progress


@contextmanager
def held(path: Path, source: Path) -> Iterator[None]:
    """Let one process write a copy of a file or a folder; the others wait for it."""
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
