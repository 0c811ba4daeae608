"""
Processes that end when their parent does, however that ends: by SIGKILL too, which no parent can
pass on.

Each kind of process that this project starts calls `end_with_parent` first: those that measure,
workers of loaders, ranks of a launcher, benchmarks. Rank 0's heartbeat has to outlive it by a
moment, and sees by its pipe that it is gone. Ray's servers end its actors, after up to a minute, so
actors on the driver's machine watch the driver themselves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from packplan.core.errors import RunError

_PR_SET_PDEATHSIG = 1

_OF_LAUNCHER = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, and by what is built on it, in the ranks that it starts."""

_FULL = "Most often the machine, or its shared memory (/dev/shm), is full: {keys}, or give the machine more memory"

_LOST = {
    "DataLoader worker (pid": _FULL,
    "Pin memory thread exited": _FULL,
    "Too many open files": "Let each process have more files open (ulimit -n), or {keys}",
    "DataLoader timed out": "A sample takes longer to read and encode, or waits for a disk that does not answer: look "
    "at where its media are, or {keys}",
}
"""
What torch's errors begin with where a loader's process ended, or can no longer be reached, and what
to do.
"""


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """
    Have the kernel send this process a signal when its parent ends; at once, if that is gone
    already.

    The kernel watches the thread that started this process, so that has to be one that lives as
    long as its process. Only Linux has such a signal; elsewhere this does nothing.

    Args:
        number: The signal. SIGKILL ends a process whatever it is at.

    Raises:
        OSError: The kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl cannot set the signal of a parent's death")
    parent = multiprocessing.parent_process()
    # It may have ended before the kernel was asked.
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), number)


def end_with_launcher() -> None:
    """
    End this rank when torchrun's agent ends, which started it; do nothing in a process that no
    launcher started.

    By SIGTERM, on which training saves a checkpoint after the running step, and all else ends at
    once.
    """
    if _OF_LAUNCHER in os.environ and multiprocessing.parent_process() is None:
        end_with_parent(signal.SIGTERM)


def end_with_process(pid: int) -> None:
    """
    End this process when another one of this machine ends, which need not be its parent.

    Args:
        pid: Number of the other process. This one ends at once if there is none of that number.
    """
    if sys.platform != "linux":
        return
    try:
        other = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_wait_and_end, args=(other,), daemon=True).start()


def _wait_and_end(other: int) -> None:
    ended = select.poll()  # `select.select` refuses a file whose number is beyond 1,023
    ended.register(other, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def end_by_parent_alone() -> None:
    """
    Have SIGTERM end this process only where its parent sends it, as torch does to a loader's worker
    that does not end. Launchers send it to all processes of a run, while the one that trains needs
    its workers until it has saved a checkpoint.

    To be called before this process starts threads. Only Linux tells who sent a signal; elsewhere
    this does nothing.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def open_pool(workers: int, prepare: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """
    Return a pool of processes that end with this one; call it within `ctrl_c_kept`, and hand it the
    first work there, with which all of them are forked.

    Forked, they share what this process holds, as models' libraries of half a gigabyte, and begin
    at once.

    Args:
        workers: Processes.
        prepare: Called in each of them first.
        *arguments: What it is called with.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _prepared, (prepare, arguments))


def _prepared(prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    prepare(*arguments)


def hide_broken_handover() -> None:
    """
    Have this process say nothing when the one that takes its tensors goes away while it hands them
    over: that one says why it ended.

    A thread of multiprocessing hands over what is in shared memory, and prints what it cannot.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            before(kind, error, trace)

    sys.excepthook = hook


@contextmanager
def lost_processes_named(doing: str, keys: str) -> Iterator[None]:
    """
    Raise RunError where a pool or torch finds that one of its processes is gone; torch
    raises wherever this one is at.

    Args:
        doing: What these processes do.
        keys: The keys to change, and how: `lower training.dataloader_num_workers`.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().rstrip(".")
        remedies = [remedy for beginning, remedy in _LOST.items() if reason.startswith(beginning)]
        if not remedies and not isinstance(error, BrokenProcessPool):
            raise
        remedy = (remedies or [_FULL])[0].format(keys=keys)
        raise RunError("lost_process", f"{doing} failed: {reason}. {remedy}") from error


@contextmanager
def ctrl_c_kept() -> Iterator[None]:
    """
    Keep Ctrl-C from processes that are started in here: this process answers it, and ends them
    without their tracebacks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
