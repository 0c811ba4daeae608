"""
Measuring by all ranks: each measures a slice of the samples into a store of its own, on a disk that
all see.

Rank 0 then appends the slices to the store of all: it holds what one process would have measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from functools import partial
from itertools import pairwise

import attrs
import numpy as np

from app.planning.deadline import Deadline
from app.planning.measure import measure_rows, probe_first
from core.errors import DataSetError, PackplanError, agree, counted
from core.ports import Arrays, LengthSource, LengthStore, Lock, RankGroup, ReportProgress, Stored
from core.samples import Outcome

log = logging.getLogger(__name__)

OpenSlice = Callable[[int, int], tuple[LengthStore, Lock]]
"""From a slice's first sample and end: its store, and who may write there."""


def measure_slices(
    name: str,
    source: LengthSource,
    store: LengthStore,
    lock: Lock,
    open_slice: OpenSlice,
    *,
    group: RankGroup,
    flush_every: int | None,
    deadline: Deadline,
) -> None:
    """
    Measure what a store lacks, a slice on each rank; every rank calls this.

    Where that is much, a few samples are probed before; what is measured is not yet probed.

    Args:
        name: Of the split, for messages.

        source: Its samples.

        store: Of all samples; rank 0 alone touches it.

        lock: Its.

        open_slice: Opens a slice's.

        group: All ranks.

        flush_every: Samples between two flushes; None adapts to their number.

        deadline: For other ranks and other jobs.

    Raises:
        PackplanError: A rank failed, on every rank; what was measured is kept.
    """
    key, total = source.fingerprint(), len(source)

    def count(report: ReportProgress) -> Arrays:
        with lock.held(**deadline.wait(), report=report):
            stored = store.resume(key, total, source.data_digest)
            probe_first(source, len(stored.table), report=report)
        return {"known": np.array([len(stored.table), stored.in_full])}

    first, in_full = group.from_rank_zero(count, **deadline.wait())["known"].tolist()
    if first == total:
        return
    if group.rank == 0:
        log.info(
            "%s: %s measure %s, %s %s stored",
            name,
            counted(group.world_size, "rank"),
            counted(total - first, "sample"),
            f"{first:,}",
            agree(first),
        )
    bounds = [first + (total - first) * rank // group.world_size for rank in range(group.world_size + 1)]
    slices = [_Slice(source, start, stop) for start, stop in pairwise(bounds)]

    own = partial(
        _measure_slice,
        slices[group.rank],
        open_slice,
        in_full=bool(in_full),
        flush_every=flush_every,
        deadline=deadline,
    )
    digests = group.gather(_or_reason(own), **deadline.wait())
    for rank, digest in enumerate(digests):
        if digest.startswith(_FAILED):
            message = f"rank {rank} cannot measure its slice of {name}: {digest.removeprefix(_FAILED)}"
            raise DataSetError(message)

    def put_together(report: ReportProgress) -> Arrays:
        with lock.held(**deadline.wait(), report=report):
            if len(store.resume(key, total, source.data_digest).table) != first:
                message = f"another job measured {name} at the same time: run this again, to use what it measured"
                raise DataSetError(message)
            rows = [
                _read(part, rank, digest, open_slice)
                for rank, (part, digest) in enumerate(zip(slices, digests, strict=True))
            ]
            # At once, since slices of another number of stored samples would be others, and
            # measured again.
            table, images = np.concatenate([one.table for one in rows]), np.concatenate([one.images for one in rows])
            store.append(table, images, source.data_digest(total), in_full=bool(in_full))
        return {}

    group.from_rank_zero(put_together, **deadline.wait())


def _measure_slice(
    part: _Slice, open_slice: OpenSlice, *, in_full: bool, flush_every: int | None, deadline: Deadline
) -> str:
    """Measure a slice into its store; return the digest of its rows."""
    store, lock = open_slice(part.start, part.stop)
    with lock.held(**deadline.wait(), report=_no_one):
        stored = store.resume(part.source.fingerprint(), len(part), part.data_digest)
        if stored.in_full != in_full:
            store.discard()
            stored = Stored(stored.table[:0], stored.images[:0], in_full)
        name = f"samples {part.start:,} to {part.stop:,}"
        measure_rows(name, part, store, stored, flush_every=flush_every, report=_no_one)
        return store.digest()


def _read(part: _Slice, rank: int, digest: str, open_slice: OpenSlice) -> Stored:
    """Return what a rank measured; DataSetError if it is not what that rank says it stored."""
    store, _ = open_slice(part.start, part.stop)
    stored = store.read(part.source.fingerprint(), len(part), part.data_digest)
    if store.digest() != digest:
        message = (
            f"rank {rank} measured samples {part.start:,} to {part.stop:,}, but rank 0 does not see them: ranks can "
            "measure together only where training.output_dir is on a disk that all of them share"
        )
        raise DataSetError(message)
    return stored


_FAILED = "failed: "


def _or_reason(call: Callable[[], str]) -> str:
    """
    Return what *call* returns, or why it failed: the other ranks are still measuring, and keep what
    they measure.
    """
    try:
        return call()
    except PackplanError as error:
        return f"{_FAILED}{error}"


def _no_one(_: str) -> None:
    """Tell no one: each rank shows its own progress."""


@attrs.frozen
class _Slice:
    """Some samples of a source, as a `core.ports.Measurable`."""

    source: LengthSource
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def data_digest(self, count: int, *, start: int = 0) -> str:
        return self.source.data_digest(count, start=self.start + start)

    def measure_many(self, indices: range, *, in_full: bool) -> Generator[Outcome, None, None]:
        return self.source.measure_many(range(self.start + indices.start, self.start + indices.stop), in_full=in_full)
