"""Protocols of the outside world that the application uses, in the words of core."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.align import AlignedPlan
from packplan.core.epochs import EpochRecord
from packplan.core.errors import CorruptArtefactError, Difference
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.plan import RawPlan
from packplan.core.samples import (
    BadRecord,
    DataFile,
    Measurement,
    MediaFacts,
    MediaTable,
    Outcome,
    Table,
    Where,
    column,
)
from packplan.core.schedule import EpochSchedule

Arrays = Mapping[str, NDArray[Any]]

ReportProgress = Callable[[str], None]
"""Function that takes a progress message; cheap enough to be called for every sample."""


class Records(Protocol):
    """Records of a data set, by index in any order; an index never changes."""

    def __len__(self) -> int:
        """Return the number of records."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a record's JSON value; RecordError with its place if there is none."""

    @property
    def num_with_media_tags(self) -> int:
        """Number of records with `<video>` or `<audio>`."""

    @property
    def firsts(self) -> Sequence[int]:
        """First record of each file, ascending; no file is empty."""

    @property
    def files(self) -> Sequence[tuple[str, int]]:
        """Each file, and its number of records."""

    def where(self, index: int, /) -> Where:
        """Return the place of the record."""

    def folder(self, index: int, /) -> str:
        """Return the folder that relative paths of the record's media start from."""

    def read(self, index: int, /) -> tuple[Any, bytes]:
        """
        Return a record's JSON value, and its digest for `remember`: b"" if that is remembered.

        Raises:
            RecordError: The record is no JSON value.
            StaleError: The record changed since its digest was remembered.
        """

    def remember(self, indices: range, digests: NDArray[np.uint8], /) -> None:
        """
        Keep digests of records that were read, so that they need not be read again.

        Args:
            indices: Consecutive records.
            digests: Digest of each record, all zero without one; shape (num_records, DIGEST_BYTES).
        """

    def record_digest(self, index: int, /) -> str:
        """Return the digest of record *index* alone."""

    def digest(self, count: int, /, *, without: Sequence[int] = ()) -> str:
        """
        Return the digest of the first records and of the folders of their media, bad records aside.

        Args:
            count: Number of records.
            without: Indices of bad records.
        """


class LengthSource(Protocol):
    """Records that can be measured, in any order, with the same result."""

    def __len__(self) -> int:
        """Return the number of records."""

    def data_digest(self, count: int, /, *, without: Sequence[int] = ()) -> str:
        """
        Return the digest of the first records, bad ones aside; other records do not change it.

        Args:
            count: Number of records.
            without: Indices of bad records.
        """

    def identity(self, index: int, /) -> tuple[str, str]:
        """
        Return the digest of record *index* alone, and the folder that relative paths of its media
        start from, absolute.
        """

    def fingerprint(self) -> Fingerprint:
        """Return all inputs of the measurements but the data."""

    def measure(self, index: int, /, *, by_headers: bool = False) -> Measurement:
        """
        Measure sample *index* by encoding it in full; RecordError if it cannot become a sample.

        Args:
            index: Sample index.
            by_headers: Do not decode its images and videos, where that is proven to give the same.
        """

    def measure_many(
        self, indices: Sequence[int], /, *, in_full: bool, epoch: int | None = None
    ) -> Generator[Outcome, None, None]:
        """
        Measure several records in the order of *indices*, perhaps in parallel. Closing the
        generator ends the measuring processes.

        Args:
            indices: Sample indices; consecutive ones where *epoch* is None.
            in_full: Encode each in full, and use no shortcut.
            epoch: Encode in full in another process, as training does in this epoch.
        """

    def media_facts(self, index: int, /, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """
        Return the current size and digest of each image file of sample *index*.

        Args:
            index: Sample index.
            decode: Whether pixels are read too, to find damage behind the headers.

        Raises:
            RecordError: A file cannot be read.
        """


@attrs.frozen
class Stored:
    """Stored measurements."""

    table: Table
    """Measurements of the first records."""

    media: MediaTable
    """Media table of the same records."""

    in_full: bool = False
    """Whether they were encoded in full, since the shortcut proved wrong."""

    repeatability: Mapping[str, Any] | None = None
    """Samples that were encoded again with equal results; None if that is not yet checked."""


@attrs.frozen
class Origin:
    """Origin of stored measurements: their inputs and their data."""

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
        Return the differences of a source as it is now from this origin.

        Args:
            key: All inputs of the source's measurements but the data.
            num_records: Records of its data; more than were measured are no difference.
            data_digest: Number of records -> digest of the first ones, without those of `bad`.
        """
        differences = self.key.differences(key)
        if self.num_measured > num_records:
            return (*differences, Difference("data.records", self.num_measured, num_records))
        if (current := data_digest(self.num_measured)) != self.data_digest:
            where = f"data.sha256 of the first {self.num_measured:,}"
            return (*differences, Difference(where, self.data_digest, current))
        return differences


@attrs.frozen
class StoredLengths:
    """Content of a store of lengths, whatever it was measured from."""

    origin: Origin

    rows: Stored

    digest: str
    """Digest of the rows of all records, an input of plans."""

    @property
    def tokens(self) -> IntArray:
        """Tokens of each record, 0 for one that is no sample; int64, shape (num_records,)."""
        return column(self.rows.table, "length").astype(np.int64)


@attrs.frozen
class StoredPlan:
    """Content of a store of plans, whatever it was planned from."""

    key: Fingerprint
    """Inputs of the plan."""

    plan: RawPlan

    world_sizes: tuple[int, ...]
    """World sizes for which it was aligned, ascending."""

    epochs: tuple[EpochRecord, ...] = ()
    """Records of all epochs, where each has a plan of its own; `plan` is that of the first."""


T_co = TypeVar("T_co", covariant=True)


class Inspectable(Protocol[T_co]):
    """Reader of a store, whatever its content was made from; it writes nothing."""

    @property
    def where(self) -> str:
        """Place of the store, as messages name it."""

    def inspect(self) -> T_co | None:
        """
        Return the content of the store, or None; CorruptArtefactError if it is not what was
        written.
        """

    def damage(self) -> Iterator[CorruptArtefactError]:
        """Yield each damage: content that is not what was written, or does not fit the rest."""


class LengthStore(Inspectable[StoredLengths], Protocol):
    """Keeps measurements between runs, and while a run measures."""

    def origin(self) -> Origin | None:
        """
        Return the origin of the stored rows without reading them; None if nothing is stored,
        CorruptArtefactError if it is damaged.
        """

    def bad(self) -> tuple[BadRecord, ...]:
        """
        Return the bad records among the rows that are stored or would be taken over;
        CorruptArtefactError if they are damaged.
        """

    def resume(self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str], /) -> Stored:
        """
        Return the measurements under *key* so far, of the first records.

        Args:
            key: All inputs of the measurements but the data.
            num_records: Current number of records.
            data_digest: Number of records -> current digest of the first ones, without those that
                `bad` returns.

        Raises:
            StaleError: The stored measurements have another key, or other data.
            CorruptArtefactError: They are not what was written.
        """

    def read(self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str], /) -> Stored:
        """
        Return the same as `resume`, without preparing to write.

        Args:
            key: All inputs of the measurements but the data.
            num_records: Current number of records.
            data_digest: Number of records -> current digest of the first ones, without bad ones.
        """

    def stored(self) -> Stored:
        """Return the rows that `resume` returned, and those that `append` has added."""

    def append(
        self,
        rows: Table,
        media: MediaTable,
        data_digest: str,
        /,
        *,
        in_full: bool,
        repeatability: Mapping[str, Any] | None = None,
        bad: Sequence[BadRecord] = (),
    ) -> None:
        """
        Add the next rows, so that a reader sees all of them or none.

        Args:
            rows: Measurements of the next records.
            media: Media table of the same records.
            data_digest: Digest of all records so far, bad ones aside.
            in_full: Whether all so far were encoded in full.
            repeatability: Samples that were encoded again with equal results; None if that is
                not yet checked.
            bad: Bad records of all rows so far.
        """

    def keep_files(self, files: Sequence[DataFile], /) -> None:
        """Keep the files of the stored rows beside them; `append` forgets them."""

    def discard(self) -> None:
        """Delete all rows, which turned out to be wrong."""

    def digest(self) -> str:
        """Return the digest of all rows."""


class PlanStore(Inspectable[StoredPlan], Protocol):
    """Keeps raw plans between runs."""

    def load(self, key: Fingerprint, /) -> RawPlan | None:
        """Return the plan saved under *key*, or None; CorruptArtefactError if damaged."""

    def save(self, key: Fingerprint, plan: RawPlan, /) -> None:
        """Save so that readers see the whole plan or none of it."""

    def save_aligned(self, key: Fingerprint, aligned: AlignedPlan, /) -> None:
        """Save the aligned plan of one world size beside the raw plan saved under *key*."""

    def load_epochs(self, key: Fingerprint, /) -> tuple[EpochRecord, ...]:
        """
        Return the records of the epochs whose first plan is saved under *key*, empty if there are
        none; CorruptArtefactError if damaged.
        """

    def save_epochs(self, key: Fingerprint, records: Sequence[EpochRecord], schedule: EpochSchedule, /) -> None:
        """
        Save the records of all epochs, and their steps, beside the plan saved under *key*.

        Args:
            key: Inputs of the plans.
            records: Record of each epoch.
            schedule: Schedule over them, whose world size names what is saved.
        """


class Lock(Protocol):
    """Lock that lets one job at a time write to the stores."""

    def require_writable(self) -> None:
        """Make the folder of the stores; OutputError if it cannot be written to."""

    def held(
        self, *, timeout_s: float, report: ReportProgress, limit_s: float | None = None
    ) -> AbstractContextManager[None]:
        """
        Hold the lock; it is free as soon as its holder's process is gone.

        Args:
            timeout_s: Seconds to wait for another job; 0 waits for ever.
            report: Called with a message on the job that this one waits for.
            limit_s: Seconds that all waits of this run may take, for the error; None means
                *timeout_s*.

        Raises:
            OutputError: Another job held the lock for the whole time.
        """


class RankGroup(Protocol):
    """The data-parallel learners of one run."""

    @property
    def rank(self) -> int:
        """Index of this learner, from 0."""

    @property
    def world_size(self) -> int:
        """Number of learners."""

    def from_rank_zero(
        self, build: Callable[[ReportProgress], Arrays], *, timeout_s: float, limit_s: float | None = None
    ) -> Arrays:
        """
        Return rank 0's arrays on every rank; no collective is outstanding while they are built.

        Args:
            build: Function that rank 0 alone runs, perhaps for hours. The waiting ranks show its
                progress.
            timeout_s: Seconds that the others wait; 0 waits for ever.
            limit_s: Seconds that all waits of this run may take, for the error; None means
                *timeout_s*.

        Raises:
            RunError: Rank 0 failed, died or was too slow; on the other ranks, with its reason.
        """

    def gather(self, value: str, /, *, timeout_s: float | None = None, limit_s: float | None = None) -> tuple[str, ...]:
        """
        Return the value of every rank, by rank.

        Args:
            value: Value of this rank.
            timeout_s: Seconds to wait for the others, 0 for ever; None waits as long as a
                collective may take.
            limit_s: Seconds that all waits of this run may take, for the error; None means
                *timeout_s*.

        Raises:
            RunError: A rank did not respond in time.
        """

    def stop_heartbeat(self) -> None:
        """End the waits for rank 0 alone, since planning is over."""

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001  # one positional truth, as in the builtin
        """Return whether any rank's flag is set."""

    def gather_arrays(self, arrays: Arrays, /) -> tuple[Arrays, ...]:
        """
        Return the arrays of every rank, by rank; RunError if another rank is gone. Shapes may
        differ.
        """


class Workers(Protocol):
    """
    Processes that hold the model and compute parts of an RL batch together, one data-parallel
    worker each.
    """

    @property
    def num_workers(self) -> int:
        """Number of workers."""

    def run_all_workers_sharded_data(self, method: str, shards: Sequence[Any], /, **options: Any) -> list[Arrays]:
        """
        Call a method of every worker, each with its own shard, and return the results by worker.

        Args:
            method: Name of the method, which takes a shard and the options.
            shards: One shard for each worker, in their order.
            options: Options, the same for all workers.

        Raises:
            RunError: A worker raised or died; the others are ended, since they may wait for it.
        """

    def close(self) -> None:
        """End the workers."""
