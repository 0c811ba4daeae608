"""What the application needs of the world, in the words of core."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.align import AlignedPlan
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

Arrays = Mapping[str, NDArray[Any]]

ReportProgress = Callable[[str], None]
"""Takes a few words on what has been done so far; cheap enough for every sample."""


class Records(Protocol):
    """Records of a data set, by index in any order; an index never changes."""

    def __len__(self) -> int:
        """Return the number of records."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a record's JSON value; RecordError naming where it stands if there is none."""

    @property
    def num_with_media_tags(self) -> int:
        """How many records say `<video>` or `<audio>`."""

    @property
    def firsts(self) -> Sequence[int]:
        """The first record of each file, ascending; no file is empty."""

    @property
    def files(self) -> Sequence[tuple[str, int]]:
        """Each file, and how many records it has."""

    def where(self, index: int, /) -> Where:
        """Return where the record stands."""

    def folder(self, index: int, /) -> str:
        """Return the folder that relative media of the record start at."""

    def read(self, index: int, /) -> tuple[Any, bytes]:
        """
        Return a record's JSON value, and its digest for `remember`, nothing if that is known.

        Raises:
            RecordError: There is no value.
            StaleError: It is not the record whose digest is known.
        """

    def remember(self, indices: range, digests: NDArray[np.uint8], /) -> None:
        """
        Keep digests of records that were read, so that they need not be read for them again.

        Args:
            indices: Records, one behind the other.
            digests: Their digests, all zero where there is none; shape (num_records, DIGEST_BYTES).
        """

    def record_digest(self, index: int, /) -> str:
        """Return the digest of record *index* alone."""

    def digest(self, count: int, /, *, start: int = 0, without: Sequence[int] = ()) -> str:
        """
        Return the digest of records and of the folders of their media, bad records aside.

        Args:
            count: How many records.
            start: The first of them.
            without: Indices of bad records.
        """


class Measurable(Protocol):
    """Records that can be measured in their order."""

    def __len__(self) -> int:
        """Return the number of records."""

    def data_digest(self, count: int, /, *, start: int = 0, without: Sequence[int] = ()) -> str:
        """
        Return the digest of records, bad ones aside; other records do not change it.

        Args:
            count: How many records.
            start: The first of them.
            without: Indices of bad records.
        """

    def measure_many(self, indices: range, /, *, in_full: bool) -> Generator[Outcome, None, None]:
        """
        Measure several, in the order of *indices*, perhaps in parallel; by a shortcut, unless
        *in_full*.

        Closing it ends the processes that measure.
        """


class LengthSource(Measurable, Protocol):
    """Records that can be measured one by one too, in any order, with the same result."""

    def copy_faults(self) -> Iterator[tuple[str, str]]:
        """
        Yield each data file that is read from a copy which is not what the file holds, and why; all
        of both is read.
        """

    def data_files(self) -> tuple[DataFile, ...]:
        """Return the files of the data, in order, each with the shape of its records."""

    def record_digest(self, index: int, /) -> str:
        """Return the digest of record *index* alone."""

    def fingerprint(self) -> Fingerprint:
        """Return everything that the measurements depend on, the data aside."""

    def measure(self, index: int, /) -> Measurement:
        """
        Measure sample *index* by encoding it in full; RecordError if it cannot become a sample.
        """

    def measure_by_headers(self, index: int, /) -> Measurement:
        """
        Measure sample *index* without decoding its images and videos, where that is proven to give
        the same; RecordError if it cannot become a sample.
        """

    def measure_elsewhere(self, indices: Sequence[int], /, *, epoch: int) -> list[Outcome]:
        """
        Encode samples in full, in the order given, in another process and as in training's epoch
        *epoch*.
        """

    def media_facts(self, index: int, /, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        """
        Return what the image files of sample *index* are now.

        Args:
            index: Of the sample.
            decode: Read their pixels too, to find damage behind the headers.

        Raises:
            RecordError: One cannot be read.
        """


@attrs.frozen
class Stored:
    """What a store holds."""

    table: Table
    """Measurements of the first records."""

    media: MediaTable
    """What is known of their images."""

    in_full: bool = False
    """Whether they were encoded in full, since the shortcut proved wrong."""

    repeatability: Mapping[str, Any] | None = None
    """How these samples were found to encode the same each time; None if they were not, yet."""


@attrs.frozen
class Origin:
    """What stored measurements are of."""

    key: Fingerprint
    """What they depend on, the data aside."""

    num_records: int
    """Records of the data, when they were last measured."""

    num_measured: int
    """How many of them, from the first on, were measured."""

    data_digest: str
    """Digest of the measured records, bad ones aside."""

    bad: tuple[BadRecord, ...] = ()
    """MeasuredSample records that cannot become samples, ascending."""

    files: tuple[DataFile, ...] = ()
    """Files of all the data, where that is known."""

    def differences(
        self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str]
    ) -> tuple[Difference, ...]:
        """
        Return in what a source differs from what was measured, as it is now.

        Args:
            key: What its measurements depend on, the data aside.
            num_records: Records of its data; more than were measured are no difference.
            data_digest: Digest of its first so many records, without those of `bad`.
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
    """What a store of lengths holds, whatever it was measured from."""

    origin: Origin

    rows: Stored

    digest: str
    """Digest of the rows of all records: what plans depend on."""

    @property
    def tokens(self) -> IntArray:
        """Tokens of each record, 0 for one that is no sample; int64, shape (num_records,)."""
        return column(self.rows.table, "length").astype(np.int64)


@attrs.frozen
class StoredPlan:
    """What a store of plans holds, whatever it was planned from."""

    key: Fingerprint
    """What the plan depends on."""

    plan: RawPlan

    world_sizes: tuple[int, ...]
    """World sizes for which it was aligned, ascending."""


T_co = TypeVar("T_co", covariant=True)


class Inspectable(Protocol[T_co]):
    """Shows what is stored, whatever it was made from, and writes nothing."""

    @property
    def where(self) -> str:
        """Where it is stored, as messages name it."""

    def inspect(self) -> T_co | None:
        """
        Return what is stored, None if nothing is; CorruptArtefactError if it is not what was
        written.
        """

    def damage(self) -> Iterator[CorruptArtefactError]:
        """Yield all that is not what was written, or does not fit the rest."""


class LengthStore(Inspectable[StoredLengths], Protocol):
    """Keeps measurements between runs, and while a run measures."""

    def origin(self) -> Origin | None:
        """
        Return what the stored rows are of, without reading them; None if nothing is stored,
        CorruptArtefactError if that is damaged.
        """

    def bad(self) -> tuple[BadRecord, ...]:
        """
        Return the bad records of what is stored, or would be taken over; CorruptArtefactError if
        that is damaged.
        """

    def resume(self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str], /) -> Stored:
        """
        Return what was measured under *key* so far, the first records first.

        Args:
            key: What measurements depend on, the data aside.
            num_records: Records of the data as it is now.
            data_digest: Digest of the first so many records as they are now, without those that
                `bad` returns.

        Raises:
            StaleError: Something was measured under another key, or of other data.
            CorruptArtefactError: It is not what was written.
        """

    def read(self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str], /) -> Stored:
        """
        Return what `resume` would, without becoming able to write.

        Args:
            key: What measurements depend on, the data aside.
            num_records: Records of the data as it is now.
            data_digest: Digest of the first so many records as they are now, without bad ones.
        """

    def stored(self) -> Stored:
        """Return all rows that `append` has added to what `resume` returned."""

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
        """Keep which files the stored rows are of, beside them; `append` forgets it."""

    def discard(self) -> None:
        """Forget all rows, which turned out to be wrong."""

    def digest(self) -> str:
        """Return the digest of all rows."""


class PlanStore(Inspectable[StoredPlan], Protocol):
    """Keeps raw plans between runs."""

    def load(self, key: Fingerprint, /) -> RawPlan | None:
        """Return the plan saved under *key*, or None; CorruptArtefactError if damaged."""

    def save(self, key: Fingerprint, plan: RawPlan, /) -> None:
        """Save so that readers see the whole plan or none of it."""

    def save_aligned(self, key: Fingerprint, aligned: AlignedPlan, /) -> None:
        """Say what training at one world size consumes of the raw plan saved under *key*."""


class Lock(Protocol):
    """Lets one job at a time write where the stores are."""

    def require_writable(self) -> None:
        """Make the place of the stores; OutputError if its holder could not write there."""

    def held(
        self, *, timeout_s: float, report: ReportProgress, limit_s: float | None = None
    ) -> AbstractContextManager[None]:
        """
        Hold the lock; it is free as soon as its holder's process is gone.

        Args:
            timeout_s: Seconds to wait for another job; 0 means for ever.
            report: Hears for whom this waits.
            limit_s: Seconds that all waits of this run may take, for the error; None means those of
                this one.

        Raises:
            OutputError: Another job held it all the time.
        """


class RankGroup(Protocol):
    """The data-parallel learners of one run."""

    @property
    def rank(self) -> int:
        """Which learner this is, from 0."""

    @property
    def world_size(self) -> int:
        """How many learners there are."""

    def from_rank_zero(
        self, build: Callable[[ReportProgress], Arrays], *, timeout_s: float, limit_s: float | None = None
    ) -> Arrays:
        """
        Return on every rank what rank 0 builds; no collective is outstanding while it does.

        Args:
            build: Runs on rank 0 alone; it may take hours. What it tells, the waiting ranks show.
            timeout_s: Seconds that the others wait; 0 means for ever.
            limit_s: Seconds that all waits of this run may take, for the error; None means those of
                this one.

        Raises:
            RunError: On the other ranks, with rank 0's own reason, when it failed, died, or
                was too slow.
        """

    def gather(self, value: str, /, *, timeout_s: float | None = None, limit_s: float | None = None) -> tuple[str, ...]:
        """
        Return the value of every rank, by rank.

        Args:
            value: Of this rank.
            timeout_s: Seconds to wait for the others, 0 for ever; None waits as long as a
                collective may take.
            limit_s: Seconds that all waits of this run may take, for the error; None means those of
                this one.

        Raises:
            RunError: A rank did not respond in time.
        """

    def settle(self) -> None:
        """Say that planning is over: nobody waits for rank 0 alone any more."""

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001  # one positional truth, as in the builtin
        """Return whether any rank's flag is set."""

    def gather_arrays(self, arrays: Arrays, /) -> tuple[Arrays, ...]:
        """
        Return the arrays of every rank, by rank; their shapes may differ. RunError if another
        rank is gone.
        """


class Workers(Protocol):
    """
    Processes that hold the model and compute parts of an RL batch together, one data-parallel
    worker each.
    """

    @property
    def num_workers(self) -> int:
        """How many there are."""

    def run_all_workers_sharded_data(self, method: str, shards: Sequence[Any], /, **options: Any) -> list[Arrays]:
        """
        Call a method of every worker, each with its own shard, and return the results by worker.

        Args:
            method: Its name; it takes a shard and the options.
            shards: One for each worker, in their order.
            options: The same for all.

        Raises:
            RunError: A worker raised or died; the others are ended, for they may wait for it.
        """

    def close(self) -> None:
        """End the workers."""
