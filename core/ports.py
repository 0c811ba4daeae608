"""
Protocols through which the application uses files, processes and ranks, defined with types of core.
"""

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
"""Function that receives a progress message, and is cheap enough to be called for every sample."""


class LengthSource(Protocol):
    """Records that can be measured in any order with the same results."""

    def __len__(self) -> int:
        """Return the number of records."""

    def data_digest(self, count: int, /, *, without: Sequence[int] = ()) -> str:
        """
        Return the digest of the first *count* records, without the bad records in *without*.

        Args:
            count: Number of records.
            without: Indices of bad records, which the digest leaves out.
        """

    def digest_and_folder(self, index: int, /) -> tuple[str, str]:
        """
        Return the digest of record *index*, and the folder to which its media paths are relative.

        The folder is absolute.
        """

    def record_heads(self) -> IntArray:
        """Return the first eight bytes of each record's digest; int64, shape (num_records,)."""

    def location(self, index: int, /) -> str:
        """Return the file of record *index*, and its line or row, as text."""

    def fingerprint(self) -> Fingerprint:
        """Return all inputs that decide measurements, such as the tokenizer, except the data."""

    def measure_in_full(self, index: int, /) -> Measurement:
        """
        Encode record *index* in full and measure it. Raise a RecordError if it cannot become a
        sample.
        """

    def measure_many(
        self, indices: Sequence[int], /, *, in_full: bool, epoch: int | None = None
    ) -> Generator[RecordOutcome, None, None]:
        """
        Yield the outcome of each record in the order of *indices*. Records may be measured in
        parallel.

        Closing the generator ends the measuring processes.

        Args:
            indices: Sample indices; they have to be consecutive if *epoch* is None.
            in_full: Whether to encode each record in full, without shortcuts.
            epoch: If not None, records are encoded in full in another process, as training does in
                this epoch.
        """

    def media_facts(self, index: int, /, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """
        Return the current size and digest of each image and video file of sample *index*.

        Args:
            index: Sample index.
            decode: Whether pixels and frames are decoded too, which finds damage after the file
                header.

        Raises:
            RecordError: A file cannot be read.
        """


@attrs.frozen
class MeasuredBlock:
    """Outcomes of a block of samples, and the digests of their records."""

    outcomes: Sequence[RecordOutcome]

    records: range
    """Indices of the records."""

    digests: NDArray[np.uint8]
    """Digest of each record, 0 if unknown; shape (num_records, DIGEST_BYTES)."""

    node: str = ""
    """Name of another machine that measured the block; empty for this machine."""


class BlockExecutor(Protocol):
    """Processes that measure blocks of samples; each block is measured by one process."""

    block_size: int
    """Maximum number of samples in a block."""

    @property
    def num_workers(self) -> int:
        """Number of processes, at least 1, which may grow if the processes run in a cluster."""

    def submit(self, block: range, /) -> Callable[[], MeasuredBlock]:
        """
        Start measuring a block, and return a function that waits for the result.

        The function raises the error that the process raised, and RunError if the process died.
        """

    def close(self) -> None:
        """End the processes. Unfinished blocks are cancelled."""


@attrs.frozen
class StoredRows:
    """Stored measurements: the rows of records, and the rows of their media."""

    table: Table
    """Measurements of the records, starting with the first record."""

    media: MediaTable
    """Media table of the same records."""

    in_full: bool = False
    """Whether the records were encoded in full, because the shortcut proved wrong."""

    repeatability: Mapping[str, Any] | None = None
    """Figures of samples that were encoded again with equal results; None if not yet checked."""


@attrs.frozen
class Origin:
    """Inputs and data that stored measurements were made from."""

    key: Fingerprint
    """All inputs of the measurements except the data."""

    num_records: int
    """Number of records in the data at the time of the last measurement."""

    num_measured: int
    """Number of measured records, counted from the first record."""

    data_digest: str
    """Digest of the measured records, without bad records."""

    bad: tuple[BadRecord, ...] = ()
    """Measured records that cannot become samples, ascending."""

    files: tuple[DataFile, ...] = ()
    """Data files of all records, if known."""

    def differences(
        self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str]
    ) -> tuple[Difference, ...]:
        """
        Return the differences between this origin and the current inputs and data.

        Args:
            key: All current inputs of measurements except the data.
            num_records: Current number of records. Additional records do not count as a difference.
            data_digest: Function that returns the digest of the first n records, without `bad`
                records.
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
    """Digest of the rows of all records, which enters the fingerprint of plans."""

    @property
    def tokens(self) -> IntArray:
        """
        Number of tokens of each record, 0 for a record that is not a sample; int64, shape
        (num_records,).
        """
        return column(self.rows.table, "length").astype(np.int64)


@attrs.frozen
class StoredPlan:
    """Stored plan of a split, not yet compared with the current lengths."""

    key: Fingerprint
    """Fingerprint of the plan."""

    plan: RawPlan

    world_sizes: tuple[int, ...]
    """World sizes for which the plan was aligned, ascending."""

    epochs: tuple[EpochRecord, ...] = ()
    """
    Records of all epochs, if each epoch has its own plan. In this case, `plan` is the plan of the
    first epoch.
    """


class Lock(Protocol):
    """Lock that allows only one job at a time to write to the stores."""

    def hold(self, *, timeout_s: float, report: ReportProgress) -> AbstractContextManager[None]:
        """
        Return a context manager that holds the lock. The lock is also released when the process
        ends.

        Args:
            timeout_s: Maximum wait for another job in seconds; 0 sets no limit.
            report: Called with a message about the job that holds the lock.

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
        Build arrays on rank 0, and return the arrays on every rank.

        No collective is pending while rank 0 builds.

        Args:
            build: Function that only rank 0 runs, perhaps for hours. The waiting ranks log the
                progress that the function reports.
            timeout_s: Maximum wait of the other ranks in seconds; 0 sets no limit.

        Raises:
            RunError: Rank 0 failed, died or was too slow. All other ranks raise this error, with
                the reason.
        """

    def gather(self, value: str, /) -> tuple[str, ...]:
        """
        Return the values of all ranks, ordered by rank. Raise a RunError if a rank does not respond
        in time.
        """

    def stop_heartbeat(self) -> None:
        """Stop the heartbeat of rank 0. Call this when planning is over and no rank waits."""

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001  # one positional truth, as in the builtin
        """Return whether *flag* is true on any rank."""

    def wait_for_all(self) -> None:
        """
        Wait until every rank has called this method. Raise a RunError as soon as a rank has died.
        """

    def gather_arrays(self, arrays: Arrays, /) -> tuple[Arrays, ...]:
        """
        Return the arrays of all ranks, ordered by rank. Raise a RunError if another rank has died.

        The shapes of the arrays may differ between ranks.
        """
