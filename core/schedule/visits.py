"""
Visits: how often training has trained each record, over all runs that continued one another.

Records are told apart by their content alone. Equal records are copies, which go by their order:
the k-th copy of one run is the k-th copy of another.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import StaleError, counted
from packplan.core.lengths import IntArray
from packplan.core.packs import Packs

RecordIds = NDArray[np.uint64]
"""First eight bytes of the digest of each record, little-endian; shape (num_records,)."""


@attrs.frozen(eq=False)
class Visits:
    """Visits of each record so far, those by repeated packs included."""

    total: NDArray[np.int32]
    """Visits in the whole training; shape (num_records,)."""

    epoch: NDArray[np.int32]
    """Those of them in the epoch of the next step; shape (num_records,)."""

    @classmethod
    def none(cls, num_records: int) -> Visits:
        """Return the visits before the first step."""
        zeros = np.zeros(num_records, dtype=np.int32)
        return cls(zeros, zeros)

    def after(self, packs: Packs, trained: IntArray) -> Visits:
        """
        Return the visits after some packs of the same epoch.

        Args:
            packs: Packs of the plan of the epoch.
            trained: Packs that were trained, one as often as it was.
        """
        times = np.bincount(trained, minlength=len(packs))
        samples = np.bincount(packs.indices, np.repeat(times, packs.sizes()), minlength=self.total.size)
        new = samples.astype(np.int32)
        return Visits(self.total + new, self.epoch + new)

    def in_next_epoch(self) -> Visits:
        """Return the visits at the start of the next epoch."""
        return attrs.evolve(self, epoch=np.zeros_like(self.epoch))


@attrs.frozen(eq=False, kw_only=True)
class Continuation:
    """Start of a run that continues another one."""

    checkpoint: str
    """Folder of the other run's checkpoint."""

    state: str
    """SHA-256 of the state of the trainer in the checkpoint."""

    step: int
    """Optimizer steps of the training so far."""

    epoch: int
    """First epoch of this run."""

    visits: Visits
    """Visits of the records of this run so far."""

    num_found: int
    num_gone: int
    num_new: int
    """Records of both runs, of the other run alone, and of this run alone."""


def carry_over(visits: Visits, *, before: RecordIds, now: RecordIds) -> tuple[Visits, int]:
    """
    Return visits of one data set's records as those of another one's, and the records of both.

    Args:
        visits: Visits of the first data set's records.
        before: Records of the first data set.
        now: Records of the second data set. New ones have no visits.

    Raises:
        StaleError: Equal records were visited differently, and have another number now.
    """
    contents, content = np.unique(np.concatenate([before, now]), return_inverse=True)
    then, here = content[: before.size], content[before.size :]
    _require_alike(visits, then, here, contents.size)
    most = max(before.size, now.size, 1)
    copies = (then * most + _copies(then), here * most + _copies(here))
    _, old, new = np.intersect1d(*copies, assume_unique=True, return_indices=True)
    carried = Visits.none(now.size)
    total, epoch = carried.total.copy(), carried.epoch.copy()
    total[new], epoch[new] = visits.total[old], visits.epoch[old]
    return Visits(total, epoch), new.size


def _copies(content: IntArray) -> IntArray:
    """Return the number of each record among its copies, from 0; shape (num_records,)."""
    order = np.argsort(content, kind="stable")
    _, firsts, sizes = np.unique(content[order], return_index=True, return_counts=True)
    copies = np.empty(content.size, dtype=np.int64)
    copies[order] = np.arange(content.size) - np.repeat(firsts, sizes)
    return copies


def _require_alike(visits: Visits, then: IntArray, here: IntArray, num_contents: int) -> None:
    """Refuse equal records that were visited differently, where their number changed."""
    first = np.zeros(num_contents, dtype=np.int64)
    first[then[::-1]] = np.arange(then.size)[::-1]
    differs = (visits.total != visits.total[first[then]]) | (visits.epoch != visits.epoch[first[then]])
    sizes, now = np.bincount(then, minlength=num_contents), np.bincount(here, minlength=num_contents)
    changed = np.unique(then[differs & (sizes != now)[then] & (now > 0)[then]])
    if changed.size:
        copies, kept = int(sizes[changed[0]]), int(now[changed[0]])
        record = int(first[changed[0]])
        fact = (
            f"record {record:,} of the earlier run was there {counted(copies, 'time')}, not each trained equally "
            f"often, and is there {counted(kept, 'time')} now, so nothing tells which of them were trained "
            f"({counted(changed.size, 'such record')})"
        )
        raise StaleError("changed_records", fact, {"record": record, "copies": copies, "now": kept})
