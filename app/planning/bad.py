"""Records that cannot become samples, and how many there may be."""

import logging
from collections.abc import Sequence
from decimal import Decimal

from packplan.core.errors import DataSetError, RecordError, counted
from packplan.core.ports import LengthSource
from packplan.core.samples.tables import BadRecord

log = logging.getLogger(__name__)

_SHOWN = 5
"""Bad records that the log names; `packplan plan show --all` names all."""


_OTHERWISE = "custom.on_bad_record: skip leaves such records out, and plan show --all then names each"


class BadRecords:
    """The bad records of a source so far; a share of all records, at most."""

    def __init__(self, source: LengthSource, *, max_share: Decimal | None) -> None:
        """
        Know of none yet.

        Args:
            source: All records.
            max_share: Largest share of the records that may be bad; None lets a bad one stop the
                run.
        """
        self._source, self._max_share = source, max_share
        self.records: tuple[BadRecord, ...] = ()

    @property
    def indices(self) -> list[int]:
        """Indices of the bad records, ascending."""
        return [one.index for one in self.records]

    def take_over(self, known: Sequence[BadRecord]) -> None:
        """
        Take the bad records of an earlier start in place of those so far.

        Raises:
            RecordError: None may be bad.
            DataSetError: They are too many.
        """
        if known and self._max_share is None:
            raise RecordError(known[0].where, f"{known[0].reason} ({_OTHERWISE})")
        self._set(tuple(known))

    def add(self, index: int, error: RecordError) -> None:
        """
        Add record *index*, behind the others; its error if none may be bad, DataSetError if they
        are too many.
        """
        if self._max_share is None:
            # Where the run is to be changed, skipping records would lose all like this one.
            raise error if error.remedy else RecordError(error.where, f"{error.reason} ({_OTHERWISE})")
        self._set((*self.records, BadRecord(index, error.where, error.why, self._source.identity(index)[0])))

    def _set(self, records: tuple[BadRecord, ...]) -> None:
        total = len(self._source)
        if self._max_share is not None and len(records) > self._max_share * total:
            fact = (
                f"{len(records):,} of {counted(total, 'record')} cannot become samples, which is more than "
                f"custom.max_bad_share ({self._max_share}): fix them, or raise it, and "
                "plan show --all names each:"
            )
            message = "\n  ".join([fact, *(f"{one.where}: {one.reason}" for one in records[:_SHOWN])])
            raise DataSetError(message)
        self.records = records

    def warn(self, name: str) -> None:
        """Log the bad records of a split."""
        if self.records:
            log.warning("%s: %s", name, left_out(self.records, len(self._source)))


def left_out(records: Sequence[BadRecord], total: int) -> str:
    """
    Return a line with the number of bad records and the first of them.

    Args:
        records: Bad records, ascending.
        total: Number of all records of the data.
    """
    first = "; ".join(f"{one.where}: {one.reason}" for one in records[:_SHOWN])
    more = f"; and {len(records) - _SHOWN:,} more, which plan show --all names" if len(records) > _SHOWN else ""
    return f"{len(records):,} of {counted(total, 'record')} cannot become samples and are left out: {first}{more}"
