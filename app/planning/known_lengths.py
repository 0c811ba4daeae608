"""A source that takes the measurements of known records from a table, and measures the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.ports import LengthSource
from packplan.core.samples import UNKNOWN, DataFile, KnownLengths, Measurement, MediaFacts, Outcome

log = logging.getLogger(__name__)

CLOSE = 32
"""
Known records between two unknown ones are measured with these where there are fewer than so many:
processes measure records that follow each other.
"""

_AT_ONCE = 10_000
"""Records whose digests are looked up at once."""


@attrs.define
class PartlyKnownSource:
    """
    A `core.ports.LengthSource` that measures only records that a table lacks.

    What is encoded in full, to audit the lengths or since a shortcut proved wrong, is encoded.
    """

    source: LengthSource

    where: str
    """Place of the table, for messages."""

    read: Callable[[], KnownLengths]
    """Function that reads the table, when it is first needed."""

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def known(self) -> KnownLengths:
        """The table."""
        return self.read()

    def measure_many(self, indices: range, *, in_full: bool) -> Generator[Outcome, None, None]:
        """Measure several; see `core.ports`. Known records are taken from the table."""
        if in_full:
            with closing(self.source.measure_many(indices, in_full=True)) as outcomes:
                yield from outcomes
            return
        rows = self._rows(indices)
        taken = len(rows)
        parts = list(_unknown_parts(rows))
        for start, stop in parts:
            taken -= stop - start
        log.info("the lengths of %s are taken from %s", counted(taken, "record"), self.where)
        done = 0
        for start, stop in [*parts, (len(rows), len(rows))]:
            yield from map(self.known.sample, rows[done:start].tolist())
            if start < stop:
                asked = range(indices.start + start, indices.start + stop)
                with closing(self.source.measure_many(asked, in_full=False)) as outcomes:
                    yield from outcomes
            done = stop

    def _rows(self, indices: range) -> IntArray:
        """Return the row of each record in the table, or `UNKNOWN`."""
        found = [np.empty(0, dtype=np.int64)]
        with progress(total=len(indices), desc=f"looking records up in {self.where}", delay=BRIEF_S) as bar:
            for start in range(0, len(indices), _AT_ONCE):
                part = indices[start : start + _AT_ONCE]
                digests, folders = map(self.source.record_digest, part), map(self.source.media_folder, part)
                found.append(self.known.rows(list(digests), list(folders)))
                bar.update(len(part))
        return np.concatenate(found)

    def fingerprint(self) -> Fingerprint:
        """Return all inputs of the measurements but the data."""
        return self.source.fingerprint()

    def data_digest(self, count: int, *, start: int = 0, without: Sequence[int] = ()) -> str:
        """
        Return the digest of records; see `core.ports`.

        Args:
            count: Number of records.
            start: First record.
            without: Indices of bad records.
        """
        return self.source.data_digest(count, start=start, without=without)

    def record_digest(self, index: int) -> str:
        """Return the digest of record *index* alone."""
        return self.source.record_digest(index)

    def media_folder(self, index: int) -> str:
        """Return the folder that relative paths of the record's media start from."""
        return self.source.media_folder(index)

    def copy_faults(self) -> Iterator[tuple[str, str]]:
        """Yield each data file whose copy has other content; see `core.ports`."""
        return self.source.copy_faults()

    def data_files(self) -> tuple[DataFile, ...]:
        """Return the files of the data."""
        return self.source.data_files()

    def measure(self, index: int) -> Measurement:
        """Measure sample *index* by encoding it in full."""
        return self.source.measure(index)

    def measure_by_headers(self, index: int) -> Measurement:
        """Measure sample *index* without decoding its media; see `core.ports`."""
        return self.source.measure_by_headers(index)

    def measure_elsewhere(self, indices: Sequence[int], *, epoch: int) -> list[Outcome]:
        """Encode samples in another process; see `core.ports`."""
        return self.source.measure_elsewhere(indices, epoch=epoch)

    def media_facts(self, index: int, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """Return the current facts of the media of sample *index*; see `core.ports`."""
        return self.source.media_facts(index, decode=decode)


def _unknown_parts(rows: IntArray) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of records that are unknown, or close to such."""
    unknown = np.flatnonzero(rows == UNKNOWN)
    if unknown.size:
        for part in np.split(unknown, np.flatnonzero(np.diff(unknown) > CLOSE) + 1):
            yield int(part[0]), int(part[-1]) + 1
