"""Records that cannot become samples, and are left out of them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from packplan.core.errors import MAX_LINE, DataSetError, RecordError, counted
from packplan.core.ports import LengthSource
from packplan.core.samples import BadRecord

log = logging.getLogger(__name__)

_SHOWN = 5
"""Bad records that the log names; `lengths.json` names all."""


_OTHERWISE = "plan build --list-failures names all such records, custom.on_bad_record: skip leaves them out"


MOST_REASONS = 1000
"""Reasons that are counted apart, at most: others count together."""

OTHER_REASONS = "other reasons"

_OF_ONE_RECORD = re.compile(
    r"""'[^']*'|"[^"]*"|(?<!\S)(?!\W*(?:model|template|custom|training)\.)\S*(?:[/\\\d]|\w\.\w)\S*"""
)
"""What a reason quotes of its record: texts in quotes, numbers, names of files, addresses."""


class ReasonCounts:
    """How many failures have which reason, in bounded memory, whatever the reasons quote."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of failures."""
        return self._counts.total()

    def add(self, reason: str) -> None:
        """Count a failure, by its reason without what it quotes of its record."""
        kind = " ".join(_OF_ONE_RECORD.sub("…", reason[:MAX_LINE]).split())
        kind = re.sub(r"…(?: …)+", "…", kind)
        self._counts[kind if kind in self._counts or len(self._counts) < MOST_REASONS else OTHER_REASONS] += 1

    def most_common(self, number: int) -> dict[str, int]:
        """Return the most frequent reasons, with the sum of all others, frequent ones first."""
        ordered = self._counts.most_common()
        shown = [(reason, count) for reason, count in ordered if reason != OTHER_REASONS][:number]
        others = self.total - sum(count for _, count in shown)
        return dict(shown) | ({OTHER_REASONS: others} if others else {})


class LeftOut:
    """The records of a source that are left out; a share of all, at most."""

    def __init__(self, source: LengthSource, *, max_share: Decimal | None) -> None:
        """
        Leave out none yet.

        Args:
            source: The samples.
            max_share: Share of all records that may be left out; None lets a bad record stop the
                run.
        """
        source.leave_out(())
        self._source, self._max_share, self._total = source, max_share, len(source)
        self.records: tuple[BadRecord, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Positions of the records that are left out, among all."""
        return tuple(record.number for record in self.records)

    def take_over(self, known: Sequence[BadRecord]) -> None:
        """
        Leave out what an earlier start left out, but for records that were fixed; RecordError if
        none may be.
        """
        still = tuple(one for one in known if one.number < self._total and self._is_same(one))
        self._leave_out(still)

    def _is_same(self, known: BadRecord) -> bool:
        return self._source.record_digest(known.number) == known.sha256

    def add(self, index: int, error: RecordError) -> None:
        """
        Leave out sample *index*; its error if none may be, DataSetError if they are too many.
        """
        if self._max_share is None:
            # Where the run is to be changed, leaving records out would lose all like this one.
            raise error if error.remedy else RecordError(error.where, f"{error.reason} ({_OTHERWISE})")
        number = self._source.number(index)
        bad = BadRecord(number, error.where, error.why, self._source.record_digest(index))
        self._leave_out(tuple(sorted((*self.records, bad), key=lambda one: one.number)))

    def _leave_out(self, records: tuple[BadRecord, ...]) -> None:
        if records and self._max_share is None:
            raise RecordError(records[0].where, f"{records[0].reason} ({_OTHERWISE})")
        self.records = records
        self._source.leave_out(self.numbers)
        if self._max_share is not None and len(records) > self._max_share * self._total:
            fact = (
                f"{len(records):,} of {counted(self._total, 'record')} cannot become samples, which is more than "
                f"custom.max_bad_share ({self._max_share}): fix them (packplan plan build run.yaml "
                "--list-failures names all), or raise it:"
            )
            message = "\n  ".join([fact, *(f"{one.where}: {one.reason}" for one in records[:_SHOWN])])
            raise DataSetError(message)

    def warn(self, name: str) -> None:
        """Log what is left out of a split."""
        if self.records:
            log.warning("%s: %s", name, left_out(self.records, self._total))


def left_out(records: Sequence[BadRecord], total: int) -> str:
    """
    Return what is left out, in a line.

    Args:
        records: Those that are left out.
        total: All records of the data.
    """
    first = "; ".join(f"{one.where}: {one.reason}" for one in records[:_SHOWN])
    more = f"; and {len(records) - _SHOWN:,} more, which lengths.json names" if len(records) > _SHOWN else ""
    return f"{len(records):,} of {counted(total, 'record')} cannot become samples and are left out: {first}{more}"
