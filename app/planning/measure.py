"""
Loads stored measurements of samples, measures missing samples, and encodes some samples again.

`split.source` measures the records. A record that is in the table `custom.lengths` is not measured:
its lengths in the table are used. If a run allows records that cannot be encoded,
`custom.max_bad_share` limits their share.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from functools import partial

import attrs
import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.audit import check_images, check_repeatability, check_repeatability_early, recheck_stored
from packplan.app.planning.split import KnownTable, Split
from packplan.core.errors import DataSetError, RecordError, StaleError, counted, verb_for
from packplan.core.inspection import MOST_NAMED
from packplan.core.lengths import IntArray
from packplan.core.ports import LengthSource, ReportProgress, StoredRows
from packplan.core.samples.tables import (
    UNKNOWN,
    BadRecord,
    KnownLengths,
    RecordOutcome,
    ShortcutError,
    Table,
    find_changed_records,
    from_tables,
    num_media,
    to_tables,
)

log = logging.getLogger(__name__)

MAX_KNOWN_BETWEEN = 32
"""
If fewer known records than this are between two unknown records, the known records are measured
again, since processes measure consecutive records.
"""

_LOOKUP_BLOCK = 10_000
"""Number of records whose digests are looked up at once."""


_SKIP_ADVICE = "custom.on_bad_record: skip leaves such records out; packplan plan show --all then lists them"


def measure(split: Split, report: ReportProgress) -> Table:
    """
    Return the measurements of all records of a split; measure the records that are not stored.

    If an audit shows that the shortcut is wrong, every sample is encoded in full.

    Args:
        split: The split, with its source and stores.
        report: Called with each progress message.

    Raises:
        RecordError: A record cannot be encoded; earlier measurements are kept.
        DataSetError: Too many records cannot be encoded, or an audit found a sample whose encodings
            differ.
        StaleError: The data, an image or the configuration has changed since the measurement.
    """
    name, source, total = split.name, split.source, len(split.source)
    bad = BadRecords(source, max_share=split.max_bad_share)
    stored = _load_stored(split, bad)
    missing = total - len(stored.table)
    num_samples = len(stored.table) - len(bad.records)
    check_images(source, stored)
    if not missing and stored.repeatability is not None:
        num = recheck_stored(source, stored)
        again = f"{counted(num, 'sample')} encoded again {verb_for(num, 'has', 'have')} the same"
        log.info("%s: the lengths of all %s are stored; %s", name, counted(num_samples, "sample"), again)
        bad.log_warning(name)
        return stored.table
    check_repeatability_early(source, total - missing, report=report, skips=split.max_bad_share is not None)
    if missing:
        left, verb = counted(missing, "sample"), verb_for(num_samples)
        log.info("%s: measuring %s, %s %s stored", name, left, f"{num_samples:,}", verb)
    else:
        log.info("%s: the lengths of all %s are stored, and not yet checked", name, counted(num_samples, "sample"))
    try:
        return _measure_and_audit(split, stored, bad, report)
    except ShortcutError as error:
        log.warning("%s: %s; every sample is encoded in full instead", name, error)
    split.stores.lengths.discard()
    bad.restore(())
    return _measure_and_audit(split, StoredRows(*to_tables([]), in_full=True), bad, report)


def _load_stored(split: Split, bad: BadRecords) -> StoredRows:
    """
    Return the valid stored measurements, and add the stored bad records to *bad*. If a bad record
    has changed, only the measurements before that record are valid, and the store discards all
    others.

    Raises:
        StaleError: The data or the configuration has changed since measuring.
        RecordError: A record is bad, and bad records are not allowed.
        DataSetError: Too many records are bad.
    """
    source, store = split.source, split.stores.lengths
    known = store.bad_records()
    data_digest = partial(source.data_digest, without=[one.index for one in known])
    try:
        stored = store.open_for_append(source.fingerprint(), len(source), data_digest)
    except StaleError as error:
        if records := describe_changed_records(split):
            raise attrs.evolve(error, fact=f"{error.fact}\n  {records}") from None
        raise
    changed = {one.index for one in known if source.digest_and_folder(one.index)[0] != one.sha256}
    count = min(changed, default=len(source))
    bad.restore([one for one in known if one.index < count])
    if not changed:
        return stored
    log.info("%s: record %s was bad and has changed; it and all later records are measured", split.name, f"{count:,}")
    first = StoredRows(stored.table[:count], stored.media[: num_media(stored.table[:count]).sum()], stored.in_full)
    store.discard()
    store.append(first, data_digest(count), bad=bad.records)
    return first


def describe_changed_records(split: Split) -> str:
    """
    Return a clause with the number of new or changed records, and the first of these records. The
    clause is empty if no digests are stored, or if records were only added or removed at the end.
    """
    stored = split.stores.lengths.record_heads()
    current = split.source.record_heads() if stored.size else stored
    changed = find_changed_records(stored, current)
    if changed is None:
        return ""
    if not changed.size:
        return "records were moved or removed"
    number = f"{changed.size:,} of {counted(min(len(stored), len(current)), 'record')}"
    first = split.source.location(int(changed[0]))
    return f"{number} {verb_for(changed.size)} new or changed, the first is {first}"


def _measure_and_audit(split: Split, stored: StoredRows, bad: BadRecords, report: ReportProgress) -> Table:
    """
    Measure missing records, audit the measurements, mark the store as complete, and return the
    table.
    """
    name, source = split.name, split.source
    done = _measure_missing(split, stored, bad=bad, report=report)
    bad.log_warning(name)
    report(f"some {name} samples are encoded again")
    if bad.records and len(bad.records) == len(done.table):
        raise DataSetError(f"none of the {name} records can become a sample: correct them")
    repeatability = check_repeatability(source, done)
    # Only now, since the next run trusts the lengths of a complete store.
    data_digest = source.data_digest(len(done.table), without=bad.indices)
    split.stores.lengths.append(StoredRows(*to_tables([]), done.in_full, repeatability), data_digest, bad=bad.records)
    return done.table


def _measure_missing(split: Split, stored: StoredRows, *, bad: BadRecords, report: ReportProgress) -> StoredRows:
    """
    Measure missing records, append them to the store in several writes, and return all
    measurements.

    Raises:
        RecordError: A record cannot be encoded; earlier measurements are kept.
        ShortcutError: The shortcut measures a sample differently from full encoding.
    """
    name, source, store, known = split.name, split.source, split.stores.lengths, split.known
    total = len(source)
    first = done = len(stored.table)
    every = split.flush_every or min(max(total // 100, 256), 10_000)
    waiting: list[RecordOutcome] = []

    def flush() -> None:
        nonlocal done
        rows = StoredRows(*to_tables(waiting), stored.in_full)
        # Whatever becomes of them, these are not written a second time.
        waiting.clear()
        done += len(rows.table)
        store.append(rows, source.data_digest(done, without=bad.indices), bad=bad.records)

    missing = range(first, total)
    if known is None or stored.in_full or not missing:
        outcomes = source.measure_many(missing, in_full=stored.in_full)
    else:
        outcomes = merge_known(source, missing, known)
    # Closed explicitly: a pending error would keep the measuring processes and their work alive.
    with closing(outcomes), progress(total=total, initial=first, desc=f"measuring {name}", unit=" samples") as bar:
        try:
            for outcome in outcomes:
                if isinstance(outcome, RecordError):
                    bad.add(done + len(waiting), outcome)
                waiting.append(outcome)
                bar.update()
                report(f"{bar.n:,} of {total:,} {name} samples are measured")
                if len(waiting) == every:
                    flush()
        finally:
            if waiting:
                flush()
    return stored if done == first else store.stored()


class BadRecords:
    """Bad records that were found in a source so far. The share of bad records is limited."""

    def __init__(self, source: LengthSource, *, max_share: Decimal | None) -> None:
        """
        Start without bad records.

        Args:
            source: Source of all records.
            max_share: Largest share of the records that may be bad; None raises an error for the
                first bad record.
        """
        self._source, self._max_share = source, max_share
        self.records: tuple[BadRecord, ...] = ()

    @property
    def indices(self) -> list[int]:
        """Indices of the bad records, ascending."""
        return [one.index for one in self.records]

    def restore(self, known: Sequence[BadRecord]) -> None:
        """
        Replace the bad records with the bad records of an earlier run.

        Raises:
            RecordError: There are bad records, but none are allowed.
            DataSetError: There are too many bad records.
        """
        if known and self._max_share is None:
            raise RecordError(known[0].where, f"{known[0].reason} ({_SKIP_ADVICE})")
        self._accept(tuple(known))

    def add(self, index: int, error: RecordError) -> None:
        """
        Add the bad record *index*, which is above all earlier indices.

        Raise *error* if bad records are not allowed, and DataSetError if there are too many.
        """
        if self._max_share is None:
            # If the run has to be changed, skipping would lose every record like this one.
            raise error if error.remedy else RecordError(error.where, f"{error.reason} ({_SKIP_ADVICE})")
        sha256 = self._source.digest_and_folder(index)[0]
        self._accept((*self.records, BadRecord(index, error.where, error.explanation, sha256)))

    def _accept(self, records: tuple[BadRecord, ...]) -> None:
        total = len(self._source)
        if self._max_share is not None and len(records) > self._max_share * total:
            fact = (
                f"{len(records):,} of {counted(total, 'record')} cannot become samples, more than "
                f"custom.max_bad_share ({self._max_share}). Fix them, or raise this limit to let plan show --all list "
                "all of them:"
            )
            message = "\n  ".join([fact, *(f"{one.where}: {one.reason}" for one in records[:MOST_NAMED])])
            raise DataSetError(message)
        self.records = records

    def log_warning(self, name: str) -> None:
        """Log a warning about the bad records of split *name*, if there are any."""
        if self.records:
            log.warning("%s: %s", name, bad_records_line(self.records, len(self._source)))


def bad_records_line(records: Sequence[BadRecord], total: int) -> str:
    """
    Return a line with the number of bad records, and the first one.

    Args:
        records: Bad records, ascending.
        total: Number of all records of the data.
    """
    first, more = records[0], "; packplan plan show --all lists them" if len(records) > 1 else ""
    fact = f"{len(records):,} of {counted(total, 'record')} cannot become samples and are left out"
    return f"{fact}: {first.where}: {first.reason}{more}"


def merge_known(source: LengthSource, indices: range, table: KnownTable) -> Generator[RecordOutcome, None, None]:
    """
    Yield the measurement of each record: from a table if it has the record, else by measuring.

    Args:
        source: Source of all records.
        indices: Indices of the records, in order.
        table: Table of known lengths.
    """
    known = table.read()
    rows = _known_rows(source, indices, known, where=table.where)
    parts = list(_unknown_ranges(rows))
    taken = len(rows) - sum(stop - start for start, stop in parts)
    log.info("the lengths of %s are taken from %s", counted(taken, "record"), table.where)
    done = 0
    for start, stop in [*parts, (len(rows), len(rows))]:
        yield from from_tables(known.table, known.media, rows[done:start].tolist())
        if start < stop:
            asked = range(indices.start + start, indices.start + stop)
            with closing(source.measure_many(asked, in_full=False)) as outcomes:
                yield from outcomes
        done = stop


def _known_rows(source: LengthSource, indices: range, known: KnownLengths, *, where: str) -> IntArray:
    """Return each record's row number in the table, or `UNKNOWN`."""
    found = []
    with progress(total=len(indices), desc=f"looking records up in {where}", delay=BRIEF_S) as bar:
        for start in range(0, len(indices), _LOOKUP_BLOCK):
            part = indices[start : start + _LOOKUP_BLOCK]
            found.append(known.find_rows(*zip(*map(source.digest_and_folder, part), strict=True)))
            bar.update(len(part))
    return np.concatenate(found)


def _unknown_ranges(rows: IntArray) -> Iterator[tuple[int, int]]:
    """
    Yield start and end of each range of unknown records; ranges that are close together are joined.
    """
    unknown = np.flatnonzero(rows == UNKNOWN)
    if unknown.size:
        for part in np.split(unknown, np.flatnonzero(np.diff(unknown) > MAX_KNOWN_BETWEEN) + 1):
            yield int(part[0]), int(part[-1]) + 1
