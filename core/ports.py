"""Protocols by which the application uses the outside world, in the words of core."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.epochs import EpochRecord
from packplan.core.errors import Difference, counted
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.plan import RawPlan
from packplan.core.samples.tables import (
    BadRecord,
    DataFile,
    Measurement,
    MediaFacts,
    MediaTable,
    RecordOutcome,
    Table,
    column,
)

Arrays = Mapping[str, NDArray[Any]]

ReportProgress = Callable[[str], None]
"""Function that takes a progress message; cheap enough to be called for every sample."""


class LengthSource(Protocol):
    """Records that can be measured in any order, with the same results."""

    def __len__(self) -> int:
        """Return the number of records."""

    def data_digest(self, count: int, /, *, without: Sequence[int] = ()) -> str:
        """
        Return the digest of the first *count* records, leaving out the bad ones in *without*.

        Args:
            count: Number of records.
            without: Indices of bad records.
        """

    def digest_and_folder(self, index: int, /) -> tuple[str, str]:
        """
        Return the digest of record *index*, and the folder where its relative media paths start.

        The folder is absolute.
        """

    def fingerprint(self) -> Fingerprint:
        """Return everything that measurements depend on, such as the tokenizer, except the data."""

    def measure_in_full(self, index: int, /) -> Measurement:
        """Encode sample *index* in full and measure it; RecordError if it is not a sample."""

    def measure_many(
        self, indices: Sequence[int], /, *, in_full: bool, epoch: int | None = None
    ) -> Generator[RecordOutcome, None, None]:
        """
        Yield the outcomes of records in the order of *indices*, perhaps measured in parallel.

        Closing the generator ends the processes that measure.

        Args:
            indices: Sample indices; consecutive ones where *epoch* is None.
            in_full: Encode each record in full, without shortcuts.
            epoch: Encode in full in another process, as training does in that epoch.
        """

    def media_facts(self, index: int, /, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """
        Return the current size and digest of each image and video file of sample *index*.

        Args:
            index: Sample index.
            decode: Whether pixels and frames are read too, to find damage behind the headers.

        Raises:
            RecordError: A file cannot be read.
        """


@attrs.frozen
class MeasuredBlock:
    """Outcomes of a block of samples, and digests of the records that these were read from."""

    outcomes: Sequence[RecordOutcome]

    records: range
    """Indices of the records."""

    digests: NDArray[np.uint8]
    """Digest of each record, 0 where unknown; shape (num_records, DIGEST_BYTES)."""

    node: str = ""
    """Other machine that measured the block; empty for this one."""


class BlockExecutor(Protocol):
    """Processes that measure blocks of samples, each block in one of them."""

    block_size: int
    """Most samples of a block."""

    @property
    def num_workers(self) -> int:
        """Number of processes, at least 1; a cluster may grow."""

    def submit(self, block: range, /) -> Callable[[], MeasuredBlock]:
        """
        Start to measure a block, and return a function that waits for the result.

        The function raises any error of the process, and RunError if the process is lost.
        """

    def close(self) -> None:
        """End the processes; blocks that are not done are given up."""


@attrs.frozen
class StoredRows:
    """Stored measurements: the rows of records, and the rows of their media."""

    table: Table
    """Measurements of the first records."""

    media: MediaTable
    """Media table of the same records."""

    in_full: bool = False
    """Whether the records were encoded in full, because the shortcut proved wrong."""

    repeatability: Mapping[str, Any] | None = None
    """Figures of samples that were encoded again with equal results; None if not yet checked."""


@attrs.frozen
class Origin:
    """Inputs and data from which stored measurements were made."""

    key: Fingerprint
    """All inputs of the measurements but the data."""

    num_records: int
    """Records of the data at the time of the last measurement."""

    num_measured: int
    """Number of measured records, from the first on."""

    data_digest: str
    """Digest of the measured records, bad ones aside."""

    bad: tuple[BadRecord, ...] = ()
    """Measured records that cannot become samples, ascending."""

    files: tuple[DataFile, ...] = ()
    """Files of all the data, if known."""

    def differences(
        self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str]
    ) -> tuple[Difference, ...]:
        """
        Return the differences between this origin and the current state of its source.

        Args:
            key: All inputs of the source's measurements but the data.
            num_records: Number of records of the source now. More than were measured is no
                difference.
            data_digest: Returns the digest of a number of first records, except `bad` ones.
        """
        differences = self.key.differences(key)
        if self.num_measured > num_records:
            return (*differences, Difference("data (number of records)", self.num_measured, num_records))
        if (current := data_digest(self.num_measured)) != self.data_digest:
            what = f"data (digest of the first {counted(self.num_measured, 'record')})"
            return (*differences, Difference(what, self.data_digest[:12], current[:12]))
        return differences


@attrs.frozen
class StoredLengths:
    """Content of a store of lengths, not yet compared with the current data."""

    origin: Origin

    rows: StoredRows

    digest: str
    """Digest of the rows of all records, an input of plans."""

    @property
    def tokens(self) -> IntArray:
        """Tokens of each record, 0 for one that is not a sample; int64, shape (num_records,)."""
        return column(self.rows.table, "length").astype(np.int64)


@attrs.frozen
class StoredPlan:
    """Stored plan of a split, not yet compared with the current lengths."""

    key: Fingerprint
    """Inputs of the plan."""

    plan: RawPlan

    world_sizes: tuple[int, ...]
    """World sizes for which it was aligned, ascending."""

    epochs: tuple[EpochRecord, ...] = ()
    """Records of all epochs, where each has a plan of its own; `plan` is that of the first."""


class Lock(Protocol):
    """Lock that lets only one job at a time write to the stores."""

    def hold(self, *, timeout_s: float, report: ReportProgress) -> AbstractContextManager[None]:
        """
        Hold the lock inside a `with` block; it is also released when the process ends.

        Args:
            timeout_s: Seconds to wait for another job; 0 waits for ever.
            report: Called with a message on the job that this one waits for.

        Raises:
            OutputError: Another job held the lock for the whole time.
        """


class RankGroup(Protocol):
    """Data-parallel ranks of one run."""

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def build_on_rank_zero(self, build: Callable[[ReportProgress], Arrays], *, timeout_s: float) -> Arrays:
        """
        Build arrays on rank 0, and return them on every rank.

        No collective is pending while rank 0 builds.

        Args:
            build: Function that rank 0 alone runs, perhaps for hours. The waiting ranks show its
                progress.
            timeout_s: Seconds that the others wait; 0 waits for ever.

        Raises:
            RunError: On the other ranks, with the reason: rank 0 failed, died or was too slow.
        """

    def gather(self, value: str, /) -> tuple[str, ...]:
        """Return the values of all ranks, by rank; RunError if one does not respond in time."""

    def stop_heartbeat(self) -> None:
        """Stop the heartbeat of rank 0, once planning is over and no rank waits for it."""

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001  # one positional truth, as in the builtin
        """Return whether the flag is set on any rank."""

    def wait_for_all(self) -> None:
        """Wait until every rank is here; RunError if one is gone, which is noticed at once."""

    def gather_arrays(self, arrays: Arrays, /) -> tuple[Arrays, ...]:
        """
        Return the arrays of all ranks, by rank; their shapes may differ.

        RunError if another rank is gone.
        """
