"""Sources, stores and groups with faults to inject."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.core.align import AlignedPlan
from packplan.core.errors import RecordError, UserError
from packplan.core.fingerprint import Fingerprint
from packplan.core.plan import RawPlan
from packplan.core.ports import Arrays, ReportProgress, StoredRows
from packplan.core.samples.tables import (
    DataFile,
    MeasuredSample,
    Measurement,
    MediaFacts,
    RecordOutcome,
    ShortcutError,
    to_row,
)


class ListSource:
    """Samples of given lengths, each with an image; bad ones have negative lengths."""

    def __init__(self, lengths: Sequence[int], *, name: str = "data") -> None:
        self.lengths, self.name = lengths, name
        self.measured: list[int] = []
        self.elsewhere: list[int] = []
        self.image_bytes = 1000
        self.widths: dict[int, int] = {}
        self.masked: Collection[int] = ()  # truncated to no supervised token
        self.errors: dict[int, UserError] = {}  # raised where a sample is measured
        self.media_errors: dict[int, UserError] = {}
        self.faulty_copies: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def data_files(self) -> tuple[DataFile, ...]:
        return (DataFile(self.name, self.name, "lengths", len(self.lengths)),)

    def copy_faults(self) -> Iterator[tuple[str, str]]:
        return iter(self.faulty_copies)

    def digest_and_folder(self, index: int) -> tuple[str, str]:
        return str(self.lengths[index]), "/media"

    def record_heads(self) -> NDArray[np.int64]:
        return np.array(self.lengths, np.int64)

    def location(self, index: int) -> str:
        return f"{self.name}, line {index + 1}"

    def fingerprint(self) -> Fingerprint:
        return Fingerprint({"name": self.name, "packing_length": None})

    def data_digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        return str([self.lengths[index] for index in range(count) if index not in without])

    def error(self, index: int, reason: str, remedy: str = "") -> RecordError:
        return RecordError(f"{self.name}, line {index + 1}", reason, remedy)

    def measure_in_full(self, index: int) -> Measurement:
        if index in self.errors:
            raise self.errors[index]
        if self.lengths[index] < 0:
            raise self.error(index, "is bad")
        self.measured.append(index)
        is_masked = index in self.masked
        return Measurement(self.lengths[index], 1 - is_masked, 1, 4, cut=is_masked)

    def measure_many(
        self, indices: Sequence[int], *, in_full: bool, epoch: int | None = None
    ) -> Iterator[RecordOutcome]:
        if epoch is not None:
            return iter(self.measure_in_loader(indices, epoch=epoch))
        return self.measure_here(indices, in_full=in_full)

    def measure_here(self, indices: Sequence[int], *, in_full: bool) -> Iterator[RecordOutcome]:
        self.is_measuring = True
        try:
            for index in indices:
                try:
                    yield MeasuredSample(self.measure_in_full(index), self.media_facts(index))
                except RecordError as error:
                    yield error
        finally:
            self.is_measuring = False

    def measure_in_loader(self, indices: Sequence[int], *, epoch: int) -> list[RecordOutcome]:
        self.elsewhere = list(indices)
        return [MeasuredSample(self.measure_in_full(index)) for index in indices]

    def media_facts(self, index: int, *, decode: bool = False) -> tuple[MediaFacts, ...]:
        if index in self.media_errors:
            raise self.media_errors[index]
        return (MediaFacts(self.image_bytes, self.widths.get(index, 28), 28, self.lengths[index]),)


class OddSource(ListSource):
    """
    Measures a sample by so many tokens longer as a function says of the source, its index, and the
    epoch of another process, None in this one.
    """

    def __init__(self, lengths: list[int], more: Callable[[Any, int, int | None], int]) -> None:
        super().__init__(lengths)
        self.more = more
        self.differs = 0

    def measure_in_full(self, index: int) -> Measurement:
        super().measure_in_full(index)
        return self._measure_in(None, index)

    def measure_in_loader(self, indices: Sequence[int], *, epoch: int) -> list[RecordOutcome]:
        self.elsewhere = list(indices)
        return [MeasuredSample(self._measure_in(epoch, index)) for index in indices]

    def _measure_in(self, epoch: int | None, index: int) -> Measurement:
        return Measurement(self.lengths[index] + self.more(self, index, epoch), 1, 1, 4)


UNSTEADY = {
    "each call": lambda source, *_: len(source.measured),
    "order": lambda source, index, _: int(index < max(source.measured[-2:-1], default=-1)),
    "epoch": lambda source, index, epoch: (epoch or 0) * (index == source.differs),
    "process": lambda source, index, epoch: int(epoch is not None and index == source.differs),
}
"""Ways in which samples measure differently, for `OddSource`."""


class GuessingSource(ListSource):
    """A shortcut that is wrong for one sample; it may find that while it measures."""

    def __init__(self, lengths: list[int], *, wrong: int, audits: bool = False) -> None:
        super().__init__(lengths)
        self.wrong, self.audits = wrong, audits
        self.ways: list[bool] = []
        self.bad: int | None = None  # in full

    def measure_here(self, indices: Sequence[int], *, in_full: bool) -> Iterator[RecordOutcome]:
        self.ways.append(in_full)
        for index in indices:
            is_wrong = index == self.wrong and not in_full
            if is_wrong and self.audits:
                raise ShortcutError(
                    f"{self.name}, line {index + 1}", to_row(Measurement(1, 1, 0, 0)), to_row(Measurement(2, 1, 0, 0))
                )
            is_bad = self.lengths[index] < 0 or (in_full and index == self.bad)
            found = MeasuredSample(Measurement(self.lengths[index] + is_wrong, 1, 1, 4), self.media_facts(index))
            yield self.error(index, "is bad") if is_bad else found


def folder_of(owner: object) -> Path:
    """Return a new folder that leaves with its owner, in memory if it can: disks sync slowly."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


class CountedLengthStore(DiskLengthStore):
    """A length store in a folder of its own that counts its flushes."""

    def __init__(self) -> None:
        self.flushes: list[int] = []
        super().__init__(folder_of(self))

    def append(self, rows: StoredRows, *arguments: Any, **options: Any) -> None:
        self.flushes += [len(rows.table)] if len(rows.table) else []
        super().append(rows, *arguments, **options)


class FreeLock:
    """A lock that no one else wants; knows whether it is held."""

    is_held = False

    def __init__(self) -> None:
        self.waits: list[float] = []  # seconds that each holder would have waited

    @contextmanager
    def hold(self, *, timeout_s: float, report: ReportProgress) -> Iterator[None]:
        assert not self.is_held
        self.waits.append(timeout_s)
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False


class CountedPlanStore(DiskPlanStore):
    """A plan store in a folder of its own that counts its writes."""

    def __init__(self) -> None:
        self.saves = 0
        self.aligned: list[int] = []
        super().__init__(folder_of(self))

    def save(self, key: Fingerprint, plan: RawPlan) -> None:
        self.saves += 1
        super().save(key, plan)

    def save_aligned(self, key: Fingerprint, aligned: AlignedPlan) -> None:
        self.aligned.append(aligned.world_size)
        super().save_aligned(key, aligned)


class ScriptedGroup:
    """One rank of a larger group, whose others say what the script says."""

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        others: Callable[[str], str] = lambda value: value,
        hear: ReportProgress = lambda _: None,
    ) -> None:
        self.rank, self.world_size, self._others, self._hear = rank, world_size, others, hear
        self.waits: list[float] = []  # seconds that each wait could have taken

    def build_on_rank_zero(self, build: Callable[[ReportProgress], Arrays], *, timeout_s: float) -> Arrays:
        self.waits.append(timeout_s)
        return build(self._hear)

    def gather(self, value: str) -> tuple[str, ...]:
        return tuple(value if rank == self.rank else self._others(value) for rank in range(self.world_size))

    def gather_arrays(self, arrays: Arrays) -> tuple[Arrays, ...]:
        return (arrays,) * self.world_size

    def stop_heartbeat(self) -> None:
        """Nobody waits."""

    def any(self, flag: bool) -> bool:  # noqa: FBT001  # see the port
        return flag

    def wait_for_all(self) -> None:
        """All are here."""
