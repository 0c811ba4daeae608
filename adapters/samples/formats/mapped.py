"""A file's bytes, mapped into memory, of which few stay there once they were read."""

import mmap
from pathlib import Path
from typing import Any

MOST_HELD = 2**25
"""Bytes of a file that stay in this process's memory, about."""

READ_AROUND = 2**21
"""Bytes that a system maps around one that is read, at most, where it holds them already."""


class MappedFile:
    """
    The bytes of one file, by position.

    What is mapped counts as memory of the process, also where the system could take it back, and a
    run in shuffled order maps all of its file in time. So it is released again and again: the
    system still holds it, and maps it again where it is asked for.
    """

    def __init__(self, path: Path) -> None:
        """Map a file; OSError if it cannot be read, ValueError if it is empty."""
        with path.open("rb") as file:
            self.bytes: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._held = 0
        self._parts: dict[int, int] = {}

    def pass_by(self, num_bytes: int) -> None:
        """Count bytes that were read, in their order."""
        self._held += num_bytes
        if self._held > MOST_HELD:
            self.bytes.madvise(mmap.MADV_DONTNEED)
            self._held = 0
            self._parts.clear()

    def read_part(self, part: int, num_bytes: int, *, num_places: int, most: int) -> None:
        """
        Count bytes of a part of the file that were read.

        Args:
            part: Number of the part.
            num_bytes: Bytes that were read.
            num_places: Separate places of the part that they lie in.
            most: Bytes of the whole part.
        """
        before = self._parts.get(part, 0)
        held = min(before + num_bytes + num_places * READ_AROUND, most + 2 * READ_AROUND)
        self._parts[part] = held
        self.pass_by(held - before)
