"""Where a record stands, as people find it."""

from __future__ import annotations

import attrs


@attrs.frozen
class Where:
    """A file, and what in it; printed, it is the beginning of a message."""

    file: str

    number: int
    """Number of the line, row or whatever *unit* names."""

    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"
