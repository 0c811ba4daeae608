"""Time and memory of a call, in a process of its own that can be ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

STDOUT, STDERR = 1, 2

ENOUGH_S = 10.0
"""A call is not repeated once its runs took so long together."""


@attrs.frozen
class Measured:
    """What a call cost."""

    seconds: float
    """Median over the runs."""

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

        limit_s: Seconds for preparation and first run; beyond, the process and all that it started are ended.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    # A child that may have children of its own is no daemon.
    process = context.Process(target=_child, args=(prepare, summarise, repeat, sender), daemon=False)
    process.start()
    sender.close()
    answer: dict[str, Any] = {}
    try:
        if not receiver.poll(limit_s):
            return NotMeasured(f"over {limit_s:.0f} s")
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        return NotMeasured("its process died")
    finally:
        if not answer and process.pid is not None:
            # Its group holds what it started; it has none of its own until it has come that far.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.join()
    return NotMeasured(answer["error"]) if "error" in answer else Measured(**answer)


def _child(
    prepare: Callable[[], Callable[[], Any]], summarise: Callable[[Any], Any], repeat: int, sender: Connection
) -> None:
    os.setsid()
    # What libraries print is not what this command prints.
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), STDOUT)
        os.dup2(nowhere.fileno(), STDERR)
    try:
        answer = _measure_here(prepare(), summarise, repeat)
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its result
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:120]}
    sender.send_bytes(json.dumps(answer).encode())


def _measure_here(call: Callable[[], Any], summarise: Callable[[Any], Any], repeat: int) -> dict[str, Any]:
    seconds: list[float] = []
    peak = 0
    returned = None
    while not seconds or (len(seconds) < repeat and sum(seconds) < ENOUGH_S):
        returned = None
        gc.collect()
        before = _reset_peak()
        start = time.perf_counter()
        returned = call()
        seconds.append(time.perf_counter() - start)
        peak = max(peak, _peak() - before)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "seconds": statistics.median(seconds),
        "num_runs": len(seconds),
        # A child starts with its parent's memory, shared until it writes; only what is beyond is new.
        "peak_bytes": peak + max(0, children - before),
        "result": summarise(returned),
    }


def _reset_peak() -> int:
    """Set the peak of this process to what it holds now, and return that, in bytes."""
    # What was freed before and kept for later would be used again, unseen. Other C libraries than glibc keep less.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    message = f"/proc/self/status has no {key}"
    raise RuntimeError(message)
