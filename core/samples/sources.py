"""Data files of a split, places in them, and records that cannot become samples."""

from collections.abc import Iterable
from itertools import groupby

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


def by_source(files: Iterable[DataFile]) -> list[tuple[str, int]]:
    """
    Return each source, and the records of its files, in order.

    >>> files = (DataFile(name, name[0], "messages", 5) for name in ("a1", "a2", "b1"))
    >>> by_source(files)
    [('a', 10), ('b', 5)]
    """
    groups = groupby(files, key=lambda file: file.source)
    return [(source, sum(file.records for file in own)) for source, own in groups]


@attrs.frozen
class Where:
    """Place of a record in a file; printed, it is the beginning of a message."""

    file: str

    number: int
    """Number of the line, row or whatever *unit* names."""

    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@attrs.frozen
class BadRecord:
    """Why a record is no sample, kept with its row, which is flagged."""

    index: int
    """Index of the record in the data, from 0."""

    where: str
    """File of the record, and its line or row there, as `Where` prints it."""

    reason: str
    """Reason why it cannot become a sample."""

    sha256: str
    """Digest of its content: a record that changed since is measured again."""
