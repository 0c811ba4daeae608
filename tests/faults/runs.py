"""Measuring and planning on real files, without ms-swift, in processes to be killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from packplan.adapters.processes import end_with_parent
from packplan.adapters.samples.data_files import open_records
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.lock import FolderLock
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.split import PlannedSplit, Split, Stores
from packplan.core.errors import RecordError
from packplan.core.policy import PlanPolicy
from packplan.core.ports import ReportProgress
from packplan.core.samples.tables import Measurement
from tests.fakes import ListSource, ScriptedGroup
from tests.processes import DEADLINE_S

FLUSH_EVERY = 7

POLICY = PlanPolicy(packing_length=80)


class FileSource(ListSource):
    """Lengths that a JSONL file holds; a record of a negative one is bad."""

    def __init__(self, path: Path, *, before_each: Callable[[int], None] = lambda _: None) -> None:
        self.records = open_records((str(path),))
        super().__init__([self.records[index] for index in range(len(self.records))], name="file")
        self._before_each = before_each

    def data_digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        return self.records.digest(count, without=without)

    def digest_and_folder(self, index: int) -> tuple[str, str]:
        return self.records.record_digest(index), ""

    def measure_in_full(self, index: int, **_) -> Measurement:
        self._before_each(index)
        if self.lengths[index] < 0:
            raise RecordError(str(self.records.location(index)), "is bad")
        return super().measure_in_full(index)


def write_data(path: Path, lengths: list[int]) -> Path:
    path.write_text("".join(f"{json.dumps(length)}\n" for length in lengths))
    return path


def execute(
    source: ListSource,
    folder: Path,
    *,
    policy: PlanPolicy = POLICY,
    timeout_s: float = 30,
    report: ReportProgress = lambda _: None,
) -> PlannedSplit:
    """Measure and plan, as rank 0 of a run does."""
    stores = Stores(DiskLengthStore(folder), DiskPlanStore(folder), FolderLock(folder))
    bad = {"max_bad_share": Decimal(1), "flush_every": FLUSH_EVERY}
    split = Split("train", policy, **bad, stores=stores, encoder=source, source=source)
    return measure_and_plan(split, Ranks(ScriptedGroup(hear=report), timeout_s=timeout_s))


def artefacts_of(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder but its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


class Forked(ForkProcess):
    """A forked process that calls something with itself, and shares a counter with this one."""

    def __init__(self, call: Callable[[Forked], object]) -> None:
        super().__init__(daemon=True)  # ended with the tests, however they end
        self.call, self.counter = call, RawValue("q", 0)
        self.start()

    def run(self) -> None:
        end_with_parent()
        self.call(self)

    def wait(self) -> int | None:
        """Return the exit status, negative for a signal; None beyond a deadline."""
        self.join(DEADLINE_S)
        self.kill()
        return self.exitcode


def at_each_line(act: Callable[[int], None]) -> None:
    """From here on, act before this process executes a line of our own code."""
    root = str(Path(__file__).parents[2] / "packplan")
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        if not frame.f_code.co_filename.startswith(root):
            return None
        if event == "line":
            executed += 1
            act(executed)
        return trace

    sys.settrace(trace)
