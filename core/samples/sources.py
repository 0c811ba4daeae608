"""Data files of a split, and their sources."""

from __future__ import annotations

import attrs


@attrs.frozen
class DataFile:
    """Data file of a split at the time of measuring."""

    file: str
    """Path of the file in messages."""

    source: str
    """Name of its source. Files of one source are counted together."""

    shape: str
    """Shape of its records, as it is logged."""

    records: int
    """Number of its records, bad ones included."""
