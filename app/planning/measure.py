"""
Samples -> measurements: what a store lacks is measured, audited, and encoded again in part. Lengths
that a table knows are taken from it. Records that cannot become samples are counted, up to a share.
"""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from packplan.adapters.progress import BRIEF_S, progress
from packplan.app.planning.split import KnownTable, Split
from packplan.core.errors import DataSetError, RecordError, StaleError, counted, verb_for
from packplan.core.lengths import IntArray
from packplan.core.ports import LengthSource, ReportProgress, StoredRows
from packplan.core.samples.tables import (
    COLUMNS,
    MEDIA_COLUMNS,
    UNKNOWN,
    BadRecord,
    KnownLengths,
    Measurement,
    MediaTable,
    RecordOutcome,
    ShortcutError,
    Table,
    column,
    from_row,
    from_tables,
    num_media,
    sample_indices,
    to_row,
    to_tables,
)

log = logging.getLogger(__name__)

REPEATED_SAMPLES = 8
"""
Samples that are encoded again, in other orders, processes and epochs, before and after the others
are measured.
"""

REPEATED_EPOCH = 1
"""The epoch under which they are encoded again; measuring is in epoch 0."""

REPEATED_FIRST_ABOVE = 64
"""
More samples than this are measured only after some of them have been encoded again; fewer are
measured at once.
"""


COMPARED_TOKENS = 16_000
"""
Tokens of stored samples that are encoded again before all of them are trusted, at most: about 0.3 s
for those of images. Fewer than `REPEATED_SAMPLES` are encoded where they have more.
"""

MAX_KNOWN_BETWEEN = 32
"""
Known records between two unknown ones are measured with these where there are fewer than so many:
processes measure records that follow each other.
"""

_LOOKUP_BLOCK = 10_000
"""Records whose digests are looked up at once."""


_NAMED = 5
"""Bad records that the log names; `packplan plan show --all` names all."""


_SKIP_ADVICE = "custom.on_bad_record: skip leaves such records out, and plan show --all then names each"


class BadRecords:
    """Bad records that were found in a source so far, up to a largest share of all records."""

    def __init__(self, source: LengthSource, *, max_share: Decimal | None) -> None:
        """
        Begin without bad records.

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

    def restore(self, known: Sequence[BadRecord]) -> None:
        """
        Take the bad records of an earlier start in place of those so far.

        Raises:
            RecordError: None may be bad.
            DataSetError: They are too many.
        """
        if known and self._max_share is None:
            raise RecordError(known[0].where, f"{known[0].reason} ({_SKIP_ADVICE})")
        self._set(tuple(known))

    def add(self, index: int, error: RecordError) -> None:
        """
        Add record *index*, which is above the earlier ones; raise *error* if none may be bad,
        DataSetError if too many are.
        """
        if self._max_share is None:
            # Where the run is to be changed, skipping records would lose all like this one.
            raise error if error.remedy else RecordError(error.where, f"{error.reason} ({_SKIP_ADVICE})")
        self._set((*self.records, BadRecord(index, error.where, error.why, self._source.identity(index)[0])))

    def _set(self, records: tuple[BadRecord, ...]) -> None:
        total = len(self._source)
        if self._max_share is not None and len(records) > self._max_share * total:
            fact = (
                f"{len(records):,} of {counted(total, 'record')} cannot become samples, which is more than "
                f"custom.max_bad_share ({self._max_share}): fix them, or raise it, and "
                "plan show --all names each:"
            )
            message = "\n  ".join([fact, *(f"{one.where}: {one.reason}" for one in records[:_NAMED])])
            raise DataSetError(message)
        self.records = records

    def warn(self, name: str) -> None:
        """Log the bad records of a split."""
        if self.records:
            log.warning("%s: %s", name, bad_records_line(self.records, len(self._source)))


def bad_records_line(records: Sequence[BadRecord], total: int) -> str:
    """
    Return a line with the number of bad records and the first of them.

    Args:
        records: Bad records, ascending.
        total: Number of all records of the data.
    """
    first = "; ".join(f"{one.where}: {one.reason}" for one in records[:_NAMED])
    more = f"; and {len(records) - _NAMED:,} more, which plan show --all names" if len(records) > _NAMED else ""
    return f"{len(records):,} of {counted(total, 'record')} cannot become samples and are left out: {first}{more}"


def merge_known(source: LengthSource, indices: range, table: KnownTable) -> Generator[RecordOutcome, None, None]:
    """
    Yield the measurement of each record, from a table or by measuring what that lacks.

    Args:
        source: All records.
        indices: Records, in order.
        table: The table.
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
    """Return the row of each record in the table, or `UNKNOWN`."""
    found = []
    with progress(total=len(indices), desc=f"looking records up in {where}", delay=BRIEF_S) as bar:
        for start in range(0, len(indices), _LOOKUP_BLOCK):
            part = indices[start : start + _LOOKUP_BLOCK]
            digests, folders = zip(*map(source.identity, part), strict=True)
            found.append(known.find_rows(digests, folders))
            bar.update(len(part))
    return np.concatenate(found)


def _unknown_ranges(rows: IntArray) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range of unknown records, close ranges joined into one."""
    unknown = np.flatnonzero(rows == UNKNOWN)
    if unknown.size:
        for part in np.split(unknown, np.flatnonzero(np.diff(unknown) > MAX_KNOWN_BETWEEN) + 1):
            yield int(part[0]), int(part[-1]) + 1


def measure(split: Split, report: ReportProgress) -> Table:
    """
    Return the measurements of all records of a split, measuring those that its store does not have.

    The source's shortcut is audited: where an encoded sample measures otherwise, all are encoded in
    full, and no table of known lengths is asked.

    Args:
        split: The split, with its source and stores.
        report: Called with the number of measured samples.

    Raises:
        RecordError: A record cannot become a sample; what was measured before it is kept.
        DataSetError: More records than may be cannot become samples; or encoding a sample twice
            gives two results; where many are to be measured, this is found before; or a sample
            encodes to another measurement than is stored of it.
        StaleError: An image is not the one that was measured.
    """
    name, source, store = split.name, split.source, split.stores.lengths
    bad = BadRecords(source, max_share=split.max_bad_share)
    stored = _load_stored(split, bad)
    total, num_stored = len(source), len(stored.table)
    num_samples = num_stored - len(bad.records)
    _check_images(source, stored)
    if num_stored == total and stored.repeatability is not None:
        num = _compare_stored(source, stored)
        again = f"{counted(num, 'sample')} encoded again {verb_for(num, 'has', 'have')} the same"
        log.info("%s: the lengths of all %s are stored; %s", name, counted(num_samples, "sample"), again)
        bad.warn(name)
        return stored.table
    _check_repeatability_first(source, num_stored, report=report, skips=split.max_bad_share is not None)
    if num_stored < total:
        left = counted(total - num_stored, "sample")
        log.info("%s: measuring %s, %s %s stored", name, left, f"{num_samples:,}", verb_for(num_samples))
    else:
        log.info("%s: the lengths of all %s are stored, and not yet checked", name, counted(num_samples, "sample"))
    while True:
        try:
            done = _measure_rows(split, stored, bad=bad, report=report)
            bad.warn(name)
            report(f"the {name} samples are encoded again, some of them")
            _check_and_complete(split, done, bad)
        except ShortcutError as error:
            log.warning("%s: %s: encoding every sample in full instead", name, error)
            store.discard()
            bad.restore(())
            stored = StoredRows(stored.table[:0], stored.media[:0], in_full=True)
        else:
            return done.table


def _load_stored(split: Split, bad: BadRecords) -> StoredRows:
    """
    Return the valid stored measurements: if a bad record changed, only those before it. The stored
    bad records are put into *bad*.

    Raises:
        StaleError: The measurements are of other data or of another configuration.
        RecordError: A record is bad, and none may be.
        DataSetError: Too many records are bad.
    """
    source, store = split.source, split.stores.lengths
    known = store.bad_records()
    data_digest = partial(source.data_digest, without=[one.index for one in known])
    stored = store.resume(source.fingerprint(), len(source), data_digest)
    changed = {one.index for one in known if source.identity(one.index)[0] != one.sha256}
    count = min(changed, default=len(source))
    bad.restore([one for one in known if one.index < count])
    if not changed:
        return stored
    log.info("%s: record %s was bad and has changed: records from it on are measured again", split.name, f"{count:,}")
    first = StoredRows(stored.table[:count], stored.media[: num_media(stored.table[:count]).sum()], stored.in_full)
    store.discard()
    store.append(first, data_digest(count), bad=bad.records)
    return first


def _check_and_complete(split: Split, done: StoredRows, bad: BadRecords) -> None:
    """Check that the samples encode the same each time, and mark the store as complete."""
    source, store = split.source, split.stores.lengths
    if bad.records and len(bad.records) == len(done.table):
        message = f"none of the {split.name} records can become a sample: fix them"
        raise DataSetError(message)
    repeatability = _check_repeatability(source, done)
    # Only now, since the next run trusts the lengths of a complete store.
    data_digest = source.data_digest(len(done.table), without=bad.indices)
    store.append(StoredRows(*to_tables([]), done.in_full, repeatability), data_digest, bad=bad.records)


def _measure_rows(split: Split, stored: StoredRows, *, bad: BadRecords, report: ReportProgress) -> StoredRows:
    """
    Measure the records that a store lacks, and append them to it, flush by flush. No shortcut is
    taken if the records in *stored* were encoded in full.

    Raises:
        RecordError: A record cannot become a sample; what was measured before it is kept.
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

    # Closed by name: an error that is on its way would keep the processes that measure alive, and
    # their work.
    with (
        closing(
            source.measure_many(range(first, total), in_full=stored.in_full)
            if known is None or stored.in_full or first == total
            else merge_known(source, range(first, total), known)
        ) as outcomes,
        progress(total=total, initial=first, desc=f"measuring {name}", unit=" samples") as bar,
    ):
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


def _check_repeatability(source: LengthSource, stored: StoredRows) -> dict[str, Any]:
    """
    Encode some samples again, and compare: backwards here, and in another process and epoch, in a
    third order.

    Returns:
        What was compared, for the manifest.

    Raises:
        DataSetError: A sample encodes otherwise each time.
        ShortcutError: It does not, but the shortcut measured it otherwise.
    """
    table, samples = stored.table, sample_indices(stored.table)
    indices = sorted({*samples[_spread(samples.size)].tolist(), *_first_by_shape(table, stored.media)}, reverse=True)
    for index in indices:
        encoded, measured = source.measure(index), from_row(table, index)
        if stored.in_full:
            _require_same(index, measured, encoded, "later")
        elif encoded != measured:
            _require_same(index, encoded, source.measure(index), "later")
            raise ShortcutError(f"sample {index}", to_row(measured), to_row(encoded))
    _compare_in_another_process(source, {index: from_row(table, index) for index in indices})
    return {"samples": indices, "orders": 3, "processes": 2, "epochs": [0, REPEATED_EPOCH]}


def _check_repeatability_first(source: LengthSource, known: int, *, report: ReportProgress, skips: bool) -> None:
    """
    Encode a few of many samples several times, and compare the results, before hours of measuring.

    Forwards, then backwards, then in another process and epoch, in a third order. The first *known*
    are measured already; records that cannot become samples are passed over if *skips*.

    Raises:
        RecordError: One of them cannot become a sample.
        DataSetError: One of them encodes differently each time.
    """
    left = len(source) - known
    if left <= REPEATED_FIRST_ABOVE:
        return
    report("a few samples are encoded more than once, before all are measured")
    first: dict[int, Measurement] = {}
    for index in (known + ahead for ahead in _spread(left)):
        try:
            first[index] = source.measure(index)
        except RecordError:
            if not skips:
                raise
    for index in reversed(first):
        _require_same(index, first[index], source.measure(index), "later")
    _compare_in_another_process(source, first)


def _compare_stored(source: LengthSource, stored: StoredRows) -> int:
    """
    Encode a few stored samples again, in the reverse of the order of measuring, and compare.

    Returns:
        How many.

    Raises:
        DataSetError: One encodes to another measurement than is stored.
    """
    samples = sample_indices(stored.table)
    spread = samples[_spread(samples.size)]
    lengths = column(stored.table, "length")[spread]
    shortest = np.argsort(lengths, kind="stable")
    fitting = int((np.cumsum(lengths[shortest]) <= COMPARED_TOKENS).sum())
    few = sorted(spread[shortest[: max(fitting, 1)]].tolist(), reverse=True)
    for index in few:
        measured = from_row(stored.table, index)
        if (encoded := source.measure(index)) != measured:
            message = (
                f"sample {index} encodes to {to_row(encoded)}, but {to_row(measured)} are stored of it "
                f"({', '.join(COLUMNS)}), so the stored lengths are wrong: something that they depend on has changed "
                "unseen; use another training.output_dir to measure and plan again"
            )
            raise DataSetError(message)
    return len(few)


def _compare_in_another_process(source: LengthSource, measured: Mapping[int, Measurement]) -> None:
    """
    Encode samples in another process and epoch, in another order; DataSetError if one differs.
    """
    indices = [*measured]
    elsewhere = indices[::2] + indices[1::2]
    for index, outcome in zip(
        elsewhere, source.measure_many(elsewhere, in_full=True, epoch=REPEATED_EPOCH), strict=True
    ):
        if isinstance(outcome, RecordError):
            raise outcome
        _require_same(index, measured[index], outcome.measurement, f"in another process and epoch {REPEATED_EPOCH}")


def _require_same(index: int, first: Measurement, encoded: Measurement, when: str) -> None:
    if encoded != first:
        message = (
            f"sample {index} measured {to_row(first)} first and {to_row(encoded)} {when} "
            f"({', '.join(COLUMNS)}): a plan needs samples that encode the same every time: make the "
            "preprocessing deterministic"
        )
        raise DataSetError(message)


def _spread(total: int) -> list[int]:
    count = min(total, REPEATED_SAMPLES)
    return [index * (total - 1) // max(count - 1, 1) for index in range(count)]


def _first_by_shape(table: Table, media: MediaTable) -> list[int]:
    """
    Return the first sample of each number of images and of videos, and of each width and height of
    media, rounded to powers of two.
    """
    per_sample, samples = num_media(table), sample_indices(table)
    _, by_number = np.unique(per_sample[samples], return_index=True)
    _, by_kind = np.unique(column(table, "videos")[samples], return_index=True)
    owner = np.repeat(np.arange(len(table)), per_sample)
    sides = np.frexp(media[:, [MEDIA_COLUMNS.index("width"), MEDIA_COLUMNS.index("height")]])[1]
    _, by_shape = np.unique(sides, axis=0, return_index=True)
    return [*samples[by_number].tolist(), *samples[by_kind].tolist(), *owner[by_shape].tolist()]


def _check_images(source: LengthSource, stored: StoredRows) -> None:
    """
    Compare the images of some stored samples with their files, to find replaced images before
    training.
    """
    samples = np.flatnonzero(num_media(stored.table))
    indices = samples[_spread(samples.size)].tolist()
    for index, measured in zip(indices, from_tables(stored.table, stored.media, indices), strict=True):
        for number, (then, now) in enumerate(zip(measured.media, source.media_facts(index), strict=True)):
            if differences := then.differences(now):
                changes = "; ".join(map(str, differences))
                fact = f"image {number} of sample {index} is not the one that was measured: {changes}"
                raise StaleError("changed_image", fact, {"index": index, "image": number})
