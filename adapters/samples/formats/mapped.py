"""A file's bytes, mapped into memory, of which few stay there once they were read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

MOST_HELD = 2**24
"""Bytes of a file that stay in this process's memory, about."""

READ_AROUND = 2**16
"""Bytes that the system maps around one that is asked for, where it holds them already."""


class MappedFile:
    """
    The bytes of one file, by position.

    What is mapped counts as memory of the process, also where the system could take it back, and a
    run in shuffled order maps all of its file in time. So it is let go again and again: the system
    still holds it, and maps it again where it is asked for.
    """

    def __init__(self, path: Path) -> None:
        """Map a file; OSError if it cannot be read, ValueError if it is empty."""
        with path.open("rb") as file:
            self.bytes: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._read = 0

    def read(self, num_bytes: int, *, places: int = 1) -> None:
        """
        Hear that bytes were read, which may let go of them, and of all others.

        Args:
            num_bytes: So many.

            places: In so many places of the file.
        """
        self._read += num_bytes + places * READ_AROUND
        if self._read > MOST_HELD:
            self.bytes.madvise(mmap.MADV_DONTNEED)
            self._read = 0
