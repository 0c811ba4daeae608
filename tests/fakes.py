"""Doubles of the ports, with faults to inject; one contract suite runs on them and on the real adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from core.errors import CorruptArtefactError, Difference, RecordError, StaleLengthsError
from core.fingerprint import Fingerprint
from core.samples import COLUMNS, Measurement, Table


class ListSource:
    """Samples of given lengths; counts what is measured."""

    def __init__(self, lengths: list[int], *, name: str = "data") -> None:
        self.lengths, self.name = lengths, name
        self.measured: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint({"name": self.name, "packing_length": None})

    def data_digest(self, count: int) -> str:
        return str(self.lengths[:count])

    def measure(self, index: int) -> Measurement:
        self.measured.append(index)
        return Measurement(self.lengths[index], 1, 0, 0)

    def measure_many(self, indices: range, *, in_full: bool) -> Iterator[Measurement]:
        return map(self.measure, indices)


class FailingSource(ListSource):
    """One record cannot be measured."""

    def __init__(self, lengths: list[int], *, bad: int) -> None:
        super().__init__(lengths)
        self.bad: int | None = bad

    def measure(self, index: int) -> Measurement:
        if index == self.bad:
            raise RecordError(self.name, index + 1, "cannot be measured")
        return super().measure(index)


class RestlessSource(ListSource):
    """Measures longer each time it is asked."""

    def measure(self, index: int) -> Measurement:
        super().measure(index)
        return Measurement(self.lengths[index] + len(self.measured), 1, 0, 0)


class GuessingSource(ListSource):
    """Its shortcut is wrong for one sample."""

    def __init__(self, lengths: list[int], *, wrong: int) -> None:
        super().__init__(lengths)
        self.wrong = wrong
        self.ways: list[bool] = []

    def measure_many(self, indices: range, *, in_full: bool) -> Iterator[Measurement]:
        self.ways.append(in_full)
        for index in indices:
            yield Measurement(self.lengths[index] + (index == self.wrong and not in_full), 1, 0, 0)


class MemoryLengthStore:
    """A length store without a disk."""

    def __init__(self) -> None:
        self.key: Fingerprint | None = None
        self.flushes: list[int] = []
        self.data = ""
        self._rows: list[tuple[int, ...]] = []

    def resume(self, key: Fingerprint, num_samples: int, data_digest: Callable[[int], str]) -> Table:
        if self.key is not None and (differences := self.key.differences(key)):
            raise StaleLengthsError("memory", differences)
        measured = len(self._rows)
        if measured > num_samples or (measured and data_digest(measured) != self.data):
            raise StaleLengthsError("memory", (Difference("data", self.data, "other"),))
        self.key = key
        return np.array(self._rows, dtype=np.int32).reshape(-1, len(COLUMNS))

    def append(self, rows: Table, data_digest: str) -> None:
        self.data = data_digest
        self.flushes.append(len(rows))
        self._rows += map(tuple, rows.tolist())

    def discard(self) -> None:
        self._rows.clear()

    def digest(self) -> str:
        return str(hash(tuple(self._rows)))


class MemoryPlanStore:
    """A plan store without a disk; counts its writes."""

    def __init__(self) -> None:
        self.plans: dict[str, object] = {}
        self.saves = 0
        self.aligned: list[int] = []

    def load(self, key: Fingerprint):
        return self.plans.get(key.digest)

    def save(self, key: Fingerprint, plan) -> None:
        self.saves += 1
        self.plans = {key.digest: plan}

    def save_aligned(self, key: Fingerprint, aligned, *, drop_last: bool) -> None:
        self.aligned.append(aligned.world_size)


class TornPlanStore(MemoryPlanStore):
    """Everything it loads is damaged."""

    def load(self, key: Fingerprint):
        raise CorruptArtefactError("memory", "torn")


class ScriptedGroup:
    """One rank of a larger group, whose others say what the script says."""

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, others: Callable[[str], str] = lambda value: value
    ) -> None:
        self.rank, self.world_size, self._others = rank, world_size, others

    def from_rank_zero(self, build, *, timeout_s: float):
        return build()

    def gather(self, value: str) -> tuple[str, ...]:
        return tuple(value if rank == self.rank else self._others(value) for rank in range(self.world_size))

    def any(self, flag: bool) -> bool:  # noqa: FBT001  # see the port
        return flag
