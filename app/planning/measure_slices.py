"""
Measuring by all ranks: each measures a slice of the samples into a store of its own, on a disk that
all see.

Rank 0 then appends the slices to the store of all: it holds what one process would have measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import pairwise

import attrs
import numpy as np

from packplan.app.planning.bad import BadRecords
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.measure import check_repeatability_first, measure_rows, resume
from packplan.app.planning.split import GatheredSplit
from packplan.core.config import with_remedy
from packplan.core.errors import DataSetError, PackplanError, agree, counted
from packplan.core.ports import Arrays, LengthSource, LengthStore, Lock, RankGroup, ReportProgress, Stored
from packplan.core.samples import Outcome, ShortcutError

log = logging.getLogger(__name__)

OpenSlice = Callable[[int, int], tuple[LengthStore, Lock]]
"""From a slice's first sample and end: its store, and who may write there."""


def measure_slices(split: GatheredSplit, open_slice: OpenSlice, *, group: RankGroup, deadline: Deadline) -> None:
    """
    Measure what a split's store lacks, a slice on each rank; every rank calls this.

    Where that is much, a few samples are encoded twice before.

    Args:
        split: Split to measure; rank 0 alone touches its stores.
        open_slice: Opens a slice's store.
        group: All ranks.
        deadline: For other ranks and other jobs.

    Raises:
        PackplanError: A rank failed, on every rank; what was measured is kept.
    """
    stored = group.from_rank_zero(partial(_count_stored, split, deadline), **deadline.wait())
    first, in_full = stored["known"].tolist()
    total = len(split.source)
    if first == total:
        return
    if group.rank == 0:
        log.info(
            "%s: %s measure %s, %s %s stored",
            split.name,
            counted(group.world_size, "rank"),
            counted(total - first, "sample"),
            f"{first:,}",
            agree(first),
        )
    bounds = [first + (total - first) * rank // group.world_size for rank in range(group.world_size + 1)]
    parts = [_Slice(split.source, start, stop) for start, stop in pairwise(bounds)]
    slices = _Slices(split, parts, open_slice, bool(in_full), deadline)

    digests = group.gather(_or_reason(partial(slices.measure, group.rank)), **deadline.wait())
    for rank, digest in enumerate(digests):
        if digest.startswith(_FAILED):
            message = f"rank {rank} cannot measure its slice of {split.name}: {digest.removeprefix(_FAILED)}"
            raise DataSetError(message)
    group.from_rank_zero(partial(slices.put_together, digests), **deadline.wait())


def _count_stored(split: GatheredSplit, deadline: Deadline, report: ReportProgress) -> Arrays:
    """
    Return the number of measured samples, and whether in full; encode a few others twice first.
    """
    source, stores = split.source, split.stores
    with stores.lock.held(**deadline.wait(), report=report):
        stored = resume(split.name, source, stores.lengths, BadRecords(source, max_share=None))
        check_repeatability_first(source, len(stored.table), report=report)
    return {"known": np.array([len(stored.table), stored.in_full])}


@attrs.frozen
class _Slices:
    """Samples that a split's store lacks, cut into a slice for each rank."""

    split: GatheredSplit
    parts: list[_Slice]
    """By rank, one behind the other."""

    open_slice: OpenSlice
    in_full: bool
    deadline: Deadline

    def measure(self, rank: int) -> str:
        """Measure a rank's slice into its store; return the digest of its rows."""
        part = self.parts[rank]
        store, lock = self.open_slice(part.start, part.stop)
        with lock.held(**self.deadline.wait(), report=_no_one):
            stored = store.resume(part.source.fingerprint(), len(part), part.data_digest)
            if stored.in_full != self.in_full:
                store.discard()
                stored = Stored(stored.table[:0], stored.media[:0], self.in_full)
            name = f"samples {part.start:,} to {part.stop:,}"
            measure_part = partial(measure_rows, name, part, store, flush_every=self.split.flush_every, report=_no_one)
            try:
                measure_part(stored)
            except ShortcutError as error:
                log.warning("%s: %s: encoding each of these samples in full instead", self.split.name, error)
                store.discard()
                measure_part(Stored(stored.table[:0], stored.media[:0], in_full=True))
            return store.digest()

    def put_together(self, digests: Sequence[str], report: ReportProgress) -> Arrays:
        """Append all slices to the store of all samples; each has to be what its rank measured."""
        name, source, stores = self.split.name, self.split.source, self.split.stores
        total = len(source)
        with stores.lock.held(**self.deadline.wait(), report=report):
            stored = stores.lengths.resume(source.fingerprint(), total, source.data_digest)
            if len(stored.table) != self.parts[0].start:
                message = f"another job measured {name} at the same time: run this again, to use what it measured"
                raise DataSetError(message)
            rows = [self._read(rank, digest) for rank, digest in enumerate(digests)]
            # At once, since slices of another number of stored samples would be others, and
            # measured again.
            table, media = np.concatenate([one.table for one in rows]), np.concatenate([one.media for one in rows])
            stores.lengths.append(table, media, source.data_digest(total), in_full=self.in_full)
        return {}

    def _read(self, rank: int, digest: str) -> Stored:
        """Return the measurements of a rank; DataSetError if their digest is not the rank's."""
        part = self.parts[rank]
        store, _ = self.open_slice(part.start, part.stop)
        stored = store.read(part.source.fingerprint(), len(part), part.data_digest)
        if store.digest() != digest:
            message = (
                f"rank {rank} measured samples {part.start:,} to {part.stop:,}, but rank 0 does not see them: ranks "
                "can measure together only where training.output_dir is on a disk that all of them share"
            )
            raise DataSetError(message)
        return stored


_FAILED = "failed: "


def _or_reason(call: Callable[[], str]) -> str:
    """
    Return the result of *call*, or the reason of its failure: the other ranks are still measuring,
    and keep what they measure.
    """
    try:
        return call()
    except PackplanError as error:
        return f"{_FAILED}{with_remedy(error)}"


def _no_one(_: str) -> None:
    """Tell no one: each rank shows its own progress."""


@attrs.frozen
class _Slice:
    """Some records of a source, as a `core.ports.Measurable`."""

    source: LengthSource
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def data_digest(self, count: int, *, start: int = 0, without: Sequence[int] = ()) -> str:
        return self.source.data_digest(
            count, start=self.start + start, without=[self.start + index for index in without]
        )

    def measure_many(self, indices: range, *, in_full: bool) -> Generator[Outcome, None, None]:
        return self.source.measure_many(range(self.start + indices.start, self.start + indices.stop), in_full=in_full)
