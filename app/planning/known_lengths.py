"""Measurements of known records from a table, merged with those of the others."""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import counted
from packplan.core.lengths import IntArray
from packplan.core.ports import LengthSource
from packplan.core.samples import UNKNOWN, KnownLengths, Outcome

log = logging.getLogger(__name__)

CLOSE = 32
"""
Known records between two unknown ones are measured with these where there are fewer than so many:
processes measure records that follow each other.
"""

_AT_ONCE = 10_000
"""Records whose digests are looked up at once."""


@attrs.frozen
class KnownTable:
    """A table of known lengths."""

    where: str
    """Place of the table, for messages."""

    read: Callable[[], KnownLengths]
    """Function that reads the table, when it is first needed."""


def merge_known(source: LengthSource, indices: range, table: KnownTable) -> Generator[Outcome, None, None]:
    """
    Yield the measurement of each record, from a table or by measuring what that lacks.

    Args:
        source: All records.
        indices: Records, in order.
        table: The table.
    """
    known = table.read()
    rows = _rows(source, indices, known, where=table.where)
    parts = list(_unknown_parts(rows))
    taken = len(rows) - sum(stop - start for start, stop in parts)
    log.info("the lengths of %s are taken from %s", counted(taken, "record"), table.where)
    done = 0
    for start, stop in [*parts, (len(rows), len(rows))]:
        yield from map(known.sample, rows[done:start].tolist())
        if start < stop:
            asked = range(indices.start + start, indices.start + stop)
            with closing(source.measure_many(asked, in_full=False)) as outcomes:
                yield from outcomes
        done = stop


def _rows(source: LengthSource, indices: range, known: KnownLengths, *, where: str) -> IntArray:
    """Return the row of each record in the table, or `UNKNOWN`."""
    found = []
    with progress(total=len(indices), desc=f"looking records up in {where}", delay=BRIEF_S) as bar:
        for start in range(0, len(indices), _AT_ONCE):
            part = indices[start : start + _AT_ONCE]
            digests, folders = map(source.record_digest, part), map(source.media_folder, part)
            found.append(known.rows(list(digests), list(folders)))
            bar.update(len(part))
    return np.concatenate(found)


def _unknown_parts(rows: IntArray) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of records that are unknown, or close to such."""
    unknown = np.flatnonzero(rows == UNKNOWN)
    if unknown.size:
        for part in np.split(unknown, np.flatnonzero(np.diff(unknown) > CLOSE) + 1):
            yield int(part[0]), int(part[-1]) + 1
