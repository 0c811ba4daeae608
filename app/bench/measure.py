"""Time and memory of a call, in a process of its own that can be ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from packplan.app.bench.process import OwnProcess

ENOUGH_S = 10.0
"""A call is not repeated once its runs took so long together."""


@attrs.frozen
class Measured:
    """What a call cost."""

    seconds: float
    """Median over the runs."""

    cpu_s: float
    """Processor time, likewise, of this process alone: what other processes disturb less."""

    num_runs: int

    peak_bytes: int
    """Memory beyond what the process held before, with that of the processes it started."""

    result: Any
    """What the call's summary says."""


@attrs.frozen
class NotMeasured:
    """A call that was not run, or not to its end."""

    reason: str


def measure(
    prepare: Callable[[], Callable[[], Any]], summarise: Callable[[Any], Any], *, repeat: int, limit_s: float
) -> Measured | NotMeasured:
    """
    Run a call several times in a process of its own.

    Args:
        prepare: Makes the input and warms up, untimed; returns the call.

        summarise: Turns what the call returns into something that JSON can say.

        repeat: Runs at most.

        limit_s: Seconds for preparation and first run; beyond, the process and all that it started
        are ended.
    """
    process = OwnProcess(lambda _: _measure_here(prepare(), summarise, repeat))
    try:
        answer = process.next_message(limit_s)
    finally:
        process.end()
    return NotMeasured(answer["error"]) if "error" in answer else Measured(**answer)


def _measure_here(call: Callable[[], Any], summarise: Callable[[Any], Any], repeat: int) -> dict[str, Any]:
    seconds: list[float] = []
    cpu: list[float] = []
    peak = 0
    returned = None
    while not seconds or (len(seconds) < repeat and sum(seconds) < ENOUGH_S):
        returned = None
        gc.collect()
        before = reset_peak()
        start, cpu_before = time.perf_counter(), time.process_time()
        returned = call()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_before)
        peak = max(peak, peak_bytes() - before)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "seconds": statistics.median(seconds),
        "cpu_s": statistics.median(cpu),
        "num_runs": len(seconds),
        # A child starts with its parent's memory, shared until it writes; only what is beyond is
        # new.
        "peak_bytes": peak + max(0, children - before),
        "result": summarise(returned),
    }


def reset_peak() -> int:
    """Set the peak of this process to what it holds now, and return that, in bytes."""
    # What was freed before and kept for later would be used again, unseen. Other C libraries than
    # glibc keep less.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the most memory that this process held since `reset_peak`, in bytes."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    message = f"/proc/self/status has no {key}"
    raise RuntimeError(message)
