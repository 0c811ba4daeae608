"""
Starts processes that, on Linux, end when their parent ends, even if SIGKILL ends the parent.

Measuring processes, loader workers and processes of benchmarks call `end_with_parent` first. Ranks
of a launcher call `end_with_launcher`. Rank 0's heartbeat calls neither, since the heartbeat has to
outlive rank 0 for a moment. The heartbeat detects the end of rank 0 by a pipe. Ray takes up to a
minute to end its actors, so actors on the driver's machine call `end_with_process` to watch the
driver.
"""

import ctypes
import gc
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
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from packplan.core.errors import RunError

T = TypeVar("T")

_FULL = "Most often the machine's memory or shared memory (/dev/shm) is full: {keys}, or give the machine more memory"

_LOST = {
    "DataLoader worker (pid": _FULL,
    "Pin memory thread exited": _FULL,
    "Too many open files": "Let each process open more files (ulimit -n), or {keys}",
    "DataLoader timed out": "Reading and encoding a sample takes longer than this timeout, or a disk does not respond: "
    "check the disk with the sample's media, or {keys}",
}
"""Advice with a place for `{keys}`, by the start of torch's error about a lost loader process."""


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """
    Make the kernel signal this process when its parent ends, or at once if the parent has ended.

    The kernel watches the thread that started this process, so that thread has to live as long as
    the parent. On systems other than Linux, this does nothing.

    Args:
        number: Signal to send; only SIGKILL cannot be blocked.

    Raises:
        OSError: The kernel refuses the request.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, int(number), 0, 0, 0):  # PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl cannot set the signal for the parent's death")
    parent = multiprocessing.parent_process()
    # The parent may have ended before the call above.
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), number)


def end_with_launcher() -> None:
    """
    End this rank by SIGTERM when the torchrun agent that started it ends.

    On SIGTERM, training saves a checkpoint after the current step, and other commands end at once.
    Without a launcher, this does nothing.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and multiprocessing.parent_process() is None:
        end_with_parent(signal.SIGTERM)


def end_with_process(pid: int) -> None:
    """
    End this process when another process on this machine ends.

    On systems other than Linux, this does nothing.

    Args:
        pid: Id of the other process. If it has already ended, this process ends at once.
    """
    if sys.platform != "linux":
        return
    try:
        other = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_wait_and_end, args=(other,), daemon=True).start()


def _wait_and_end(other: int) -> None:
    ended = select.poll()  # `select.select` refuses file descriptors above 1,023
    ended.register(other, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_foreign_sigterm() -> None:
    """
    Ignore SIGTERM unless the parent process sends it, as torch does to end a loader worker.

    Launchers send SIGTERM to all processes of a run, but training needs its workers until it has
    saved a checkpoint. Call this before the process starts threads. On systems other than Linux,
    this does nothing.
    """
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_on_sigterm_from, args=(os.getppid(),), daemon=True).start()


def _end_on_sigterm_from(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def open_pool(workers: int, prepare: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """
    Return a pool of forked processes that end when this process ends.

    The forked processes share this process's memory, such as half a gigabyte of libraries, and
    start at once. The first task forks all of them, so submit it within `hold_ctrl_c`.

    Args:
        workers: Number of processes.
        prepare: Function that each process calls first.
        *arguments: Arguments of *prepare*.
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _prepare_process, (prepare, arguments))


class ForkedProcesses(Generic[T]):
    """Pool of forked processes that measure blocks of samples; see `core.ports.BlockExecutor`."""

    block_size = 32

    def __init__(self, num_workers: int, prepare: Callable[[], None], compute: Callable[[range], T]) -> None:
        """
        Open a pool of processes; submitting the first block forks them.

        Args:
            num_workers: Number of processes.
            prepare: Function that each process calls first.
            compute: Function that returns the result of a block.
        """
        self.num_workers = num_workers
        # Forked processes share memory with this process until one writes to it. The garbage
        # collector writes into each object that it visits, so it is told to skip existing objects.
        self._kept_before = gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        self._pool = open_pool(num_workers, _hold, prepare, compute)

    def submit(self, block: range) -> Callable[[], T]:
        """Start to compute a block, and return a function that waits for its result."""
        with hold_ctrl_c():
            return self._pool.submit(_compute_held, block).result

    def close(self) -> None:
        """End the processes after each has finished its current block."""
        self._pool.shutdown(cancel_futures=True)
        if not self._kept_before:
            gc.unfreeze()


_held: Callable[[range], Any] | None = None


def _hold(prepare: Callable[[], None], compute: Callable[[range], Any]) -> None:
    global _held  # noqa: PLW0603  # the one thing a process of the pool holds
    prepare()
    _held = compute


def _compute_held(block: range) -> Any:
    assert _held is not None  # noqa: S101  # the pool's initializer held it
    return _held(block)


def _prepare_process(prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    prepare(*arguments)


def hide_connection_errors() -> None:
    """
    Hide tracebacks of connection errors in this process from now on.

    multiprocessing prints such errors if the process that receives tensors in shared memory has
    ended. The receiving process reports the reason.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            before(kind, error, trace)

    sys.excepthook = hook


@contextmanager
def wrap_process_errors(doing: str, keys: str) -> Iterator[None]:
    """
    Turn the error of a pool or of torch about a lost process into a RunError.

    torch may raise this error at any line of the context.

    Args:
        doing: Task of the processes, such as `measuring samples`.
        keys: Advice that names keys, such as `lower training.dataloader_num_workers`.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().rstrip(".")
        remedies = (remedy for beginning, remedy in _LOST.items() if reason.startswith(beginning))
        remedy = next(remedies, _FULL if isinstance(error, BrokenProcessPool) else None)
        if remedy is None:
            raise
        raise RunError("lost_process", f"{doing} failed: {reason}. {remedy.format(keys=keys)}") from error


@contextmanager
def hold_ctrl_c() -> Iterator[None]:
    """
    Delay Ctrl-C until the end of this context; processes that start in the context ignore it.

    This way only one process handles Ctrl-C, and no child prints a traceback. During a fork, Python
    runs callbacks of libraries and drops their errors, so a KeyboardInterrupt would be lost.
    Blocking the signal alone is not enough, since another thread may receive it.
    """
    pressed: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    held = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if held:
            signal.signal(signal.SIGINT, lambda *given: pressed.append(given))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held:
            signal.signal(signal.SIGINT, handler)
        if pressed and callable(handler):
            handler(*pressed[0])
