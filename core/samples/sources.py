"""Where samples come from: the data files of a split, and the sources that they belong to."""

from __future__ import annotations

import attrs


@attrs.frozen
class DataFile:
    """A data file of a split, as it was when its samples were measured."""

    file: str
    """Its path, as messages name it."""

    source: str
    """Name of the source that it belongs to; files of one source are counted together."""

    shape: str
    """What its records have, as the log says it."""

    records: int
    """How many it has, those that cannot become samples counted."""
