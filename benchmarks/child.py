"""
Runs measurements in processes of their own, so that the memory of a call can be measured, and a
slow call can be ended.
"""

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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import attrs

from packplan.adapters.processes import end_with_parent
from packplan.core.errors import PackplanError

ENOUGH_S = 10.0
"""A call is not repeated once its runs have taken this many seconds in total."""

STDOUT, STDERR = 1, 2


class NotMeasuredError(PackplanError):
    """A measurement failed or took too long, or its process died."""


class Child:
    """
    Forked process that computes one value of an iterator each time its parent asks for a value.

    If several children are asked in turn, a slow phase of the machine affects all of them.
    """

    def __init__(self, values: Callable[[], Iterator[Any]]) -> None:
        """Start the process; JSON has to be able to represent each of its *values*."""
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        # A daemon may have no children of its own.
        self._process = context.Process(target=_serve, args=(values, theirs), daemon=False)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, and all processes that it started."""
        # It has no group of its own until it has come that far.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def next(self, limit_s: float) -> Any:
        """
        Return the next value.

        Raises:
            NotMeasuredError: No value came within *limit_s* seconds, or the process failed.
        """
        try:
            self._connection.send_bytes(b"next")
            if not self._connection.poll(limit_s):
                message = f"over {limit_s:.0f} s"
                raise NotMeasuredError(message)
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise NotMeasuredError("its process died") from None
        if "error" in answer:
            raise NotMeasuredError(answer["error"])
        return answer["value"]


def run_in_child(call: Callable[[], Any], *, limit_s: float) -> Any:
    """
    Return the result of a call in a process of its own.

    Args:
        call: Function whose result JSON can represent.
        limit_s: Seconds after which the process is ended.

    Raises:
        NotMeasuredError: The call failed or took too long, or its process died.
    """

    def once() -> Iterator[Any]:
        yield call()

    with Child(once) as child:
        return child.next(limit_s)


@attrs.frozen
class Cost:
    """Time and memory of a call."""

    seconds: float
    """Wall-clock seconds; median over the runs."""

    cpu_s: float
    """Processor time of the calling process alone; median over the runs."""

    peak_bytes: int
    """Peak memory of the call and of the processes that it started, without the input."""

    num_runs: int
    result: Any
    """Summary of the returned value."""


def measure(
    prepare: Callable[[], Callable[[], Any]], summarise: Callable[[Any], Any], *, repeat: int, limit_s: float
) -> Cost:
    """
    Run a call several times in a process of its own.

    Args:
        prepare: Function that makes the input, warms up, and returns the call to measure.
        summarise: Function that converts the call's result to a value that JSON can represent.
        repeat: Maximum number of runs.
        limit_s: Seconds of one run, preparation included, after which the process is ended.

    Raises:
        NotMeasuredError: The call failed or took too long, or its process died.
    """

    def runs() -> Iterator[dict[str, Any]]:
        call = prepare()
        while True:
            yield _timed(call, summarise)

    found: list[dict[str, Any]] = []
    with Child(runs) as child:
        while not found or (len(found) < repeat and sum(run["seconds"] for run in found) < ENOUGH_S):
            found.append(child.next(limit_s))
    return Cost(
        seconds=statistics.median(run["seconds"] for run in found),
        cpu_s=statistics.median(run["cpu_s"] for run in found),
        peak_bytes=max(run["peak_bytes"] for run in found),
        num_runs=len(found),
        result=found[-1]["result"],
    )


def reset_peak() -> int:
    """Reset this process's recorded peak memory to its present memory; return this in bytes."""
    gc.collect()
    # Memory that was freed before would be used again, unseen. Other C libraries keep less of it.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, since `reset_peak` was called."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _timed(call: Callable[[], Any], summarise: Callable[[Any], Any]) -> dict[str, Any]:
    before = reset_peak()
    start, cpu = time.perf_counter(), time.process_time()
    returned = call()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    # A child begins with its parent's memory, shared until it writes: only what is beyond is new.
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    peak = peak_bytes() - before + max(0, children - before)
    return {"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak, "result": summarise(returned)}


def _serve(values: Callable[[], Iterator[Any]], connection: Connection) -> None:
    gc.freeze()  # garbage of the parent may wait for threads that were not forked
    end_with_parent()
    os.setsid()
    # The output of libraries is not the output of the benchmark.
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), STDOUT)
        os.dup2(nowhere.fileno(), STDERR)
    try:
        computed = values()
        while connection.recv_bytes():
            connection.send_bytes(json.dumps({"value": next(computed)}).encode())
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  # whatever a measured package raises is its result
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        connection.send_bytes(json.dumps({"error": reason}).encode())
