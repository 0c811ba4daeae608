"""What the application needs of the world, in the words of core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from core.align import AlignedPlan
from core.fingerprint import Fingerprint
from core.plan import RawPlan
from core.samples import Measurement, Table

Arrays = Mapping[str, NDArray[Any]]


class LengthSource(Protocol):
    """Samples that can be measured one by one, in any order, with the same result."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def fingerprint(self) -> Fingerprint:
        """Return everything that the measurements depend on, the data aside."""

    def data_digest(self, count: int, /) -> str:
        """Return the digest of the data of the first *count* samples; rows appended later leave it as it is."""

    def measure(self, index: int, /) -> Measurement:
        """Measure sample *index* by encoding it in full; RecordError if it cannot become a sample."""

    def measure_many(self, indices: range, /, *, in_full: bool) -> Iterator[Measurement]:
        """Measure several, in the order of *indices*, perhaps in parallel; by a shortcut, unless *in_full*."""


class LengthStore(Protocol):
    """Keeps measurements between runs, and while a run measures."""

    def resume(self, key: Fingerprint, num_samples: int, data_digest: Callable[[int], str], /) -> Table:
        """
        Return what was measured under *key* so far, the first samples first.

        Args:
            key: What measurements depend on, the data aside.

            num_samples: Of the data as it is now.

            data_digest: Digest of the first so many samples of the data as it is now.

        Raises:
            StaleLengthsError: Something was measured under another key, or of other data.

            CorruptArtefactError: It is not what was written.
        """

    def append(self, rows: Table, data_digest: str, /) -> None:
        """Add the next rows, so that a reader sees all of them or none; *data_digest* is of all samples so far."""

    def discard(self) -> None:
        """Forget all rows, which turned out to be wrong."""

    def digest(self) -> str:
        """Return the digest of all rows."""


class PlanStore(Protocol):
    """Keeps raw plans between runs."""

    def load(self, key: Fingerprint, /) -> RawPlan | None:
        """Return the plan saved under *key*, or None; CorruptArtefactError if damaged."""

    def save(self, key: Fingerprint, plan: RawPlan, /) -> None:
        """Save so that readers see the whole plan or none of it."""

    def save_aligned(self, key: Fingerprint, aligned: AlignedPlan, /, *, drop_last: bool) -> None:
        """Say what training at one world size consumes of the raw plan saved under *key*."""


class RankGroup(Protocol):
    """The data-parallel learners of one run."""

    @property
    def rank(self) -> int:
        """Which learner this is, from 0."""

    @property
    def world_size(self) -> int:
        """How many learners there are."""

    def from_rank_zero(self, build: Callable[[], Arrays], *, timeout_s: float) -> Arrays:
        """
        Return on every rank what rank 0 builds; no collective is outstanding while it does.

        Args:
            build: Runs on rank 0 alone; it may take hours.

            timeout_s: Seconds that the others wait; 0 means for ever.

        Raises:
            RankZeroError: On the other ranks, with rank 0's own reason, when it failed or was too slow.
        """

    def gather(self, value: str, /) -> tuple[str, ...]:
        """Return the value of every rank, by rank."""

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001  # one positional truth, as in the builtin
        """Return whether any rank's flag is set."""
