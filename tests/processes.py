"""Processes with the stack imported, which takes 8 s: a server forked by the tests forks them."""

import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import attrs
import psutil

from packplan.adapters.processes import end_with_parent
from tests.network import free_port

ROOT = Path(__file__).parents[1]

DEADLINE_S = 1200

PATIENCE_S = 600

Variables = Mapping[str, Any]
"""Variables of the environment, by name."""

NONE: Variables = MappingProxyType({})


def lives(pid: int) -> bool:
    """Return whether a process runs; one that ended, and that nobody has waited for, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@attrs.define
class Started:
    """A process that the server forked, and the files that hold what it prints."""

    process: ForkServerProcess
    log: Path
    """Holds standard error; standard output too, unless that has a file of its own."""

    out: Path

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def said(self) -> str:
        """Text of its standard error so far."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def printed(self) -> str:
        """Text of its standard output so far."""
        return self.out.read_text()

    def wait(self) -> int:
        """Wait for the end; return the exit status, negative for a signal."""
        self.process.join(DEADLINE_S)
        assert self.process.exitcode is not None, f"still running after {DEADLINE_S} s: {self.said[-3000:]}"
        return self.process.exitcode

    def wait_until(self, words: str) -> None:
        """Wait until it has printed *words* on standard error."""
        wait_for(lambda: words in self.said or self.process.exitcode is not None, self.said[-3000:])
        assert words in self.said, self.said[-3000:]


class Server:
    """Starts processes, and kills those that are left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Started] = []

    def start(
        self, target: Callable[..., Any], *arguments: Any, log: Path, out: Path | None = None, env: Variables = NONE
    ) -> Started:
        """Call an importable function in a new process, which exits with what it returns."""
        out = out or log
        for path in (log, out):
            path.parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in env.items()}}
        process = multiprocessing.get_context("forkserver").Process(
            target=_call, args=(target, arguments, (str(out), str(log)), variables, str(Path.cwd()))
        )
        process.start()
        self._started.append(Started(process, log, out))
        return self._started[-1]

    def packplan(self, *words: object, env: Variables = NONE) -> Started:
        """Run the console command with these words, and wait for its end."""
        log, out = (self._folder / f"packplan{len(self._started)}.{end}" for end in ("err", "out"))
        command = self.start(_packplan, *map(str, words), log=log, out=out, env=env)
        command.wait()
        return command

    def ranks(
        self, world_size: int, target: Callable[..., Any], *arguments: Any, folder: Path, env: Variables = NONE
    ) -> list[Started]:
        """Call a function on every rank, in the environment that torchrun gives; logs by rank."""
        shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": free_port(), **env}  # fmt: skip
        return [
            self.start(
                target, *arguments, log=folder / f"rank{rank}.log", env={"RANK": rank, "LOCAL_RANK": rank, **shared}
            )
            for rank in range(world_size)
        ]

    def kill(self) -> None:
        """Kill what is left."""
        for started in self._started:
            if started.process.is_alive():
                started.process.kill()
                started.process.join()


def finished(started: list[Started]) -> list[int]:
    """Wait for processes; return their exit statuses, and show the logs of those that failed."""
    statuses = [each.wait() for each in started]
    for each, status in zip(started, statuses, strict=True):
        if status:
            print(f"{each.log}, exit status {status}:\n{each.said[-3000:]}")
    return statuses


def wait_for(holds: Callable[[], bool], why: str) -> None:
    """Wait until something holds; fail with the reason if it does not."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


def is_whole(state: Path) -> bool:
    """Return whether a trainer has written its state, with which a checkpoint ends, to the end."""
    return state.exists() and state.read_text().endswith("}\n")


@contextlib.contextmanager
def killed_at_end(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command at the root; kill it at the end, so that no test that fails waits for it."""
    with subprocess.Popen(command, cwd=ROOT, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def publish(folder: Path, pids: list[int]) -> None:
    """Write numbers down in a file that is whole once it is there, and wait to be killed."""
    (folder / "pids.tmp").write_text(json.dumps(pids))
    (folder / "pids.tmp").rename(folder / "pids.json")
    time.sleep(PATIENCE_S)


def each_ends(folder: Path, parent: int) -> None:
    """Kill a parent once it has published the processes that it started; see them end."""
    wait_for((folder / "pids.json").exists, "the parent has not started its processes")
    pids = json.loads((folder / "pids.json").read_text())
    assert pids
    assert parent not in pids
    assert all(map(lives, pids))
    started = descendants(parent)

    os.kill(parent, signal.SIGKILL)

    try:
        wait_for(lambda: not any(map(lives, pids)), "a process outlived its parent")
    finally:
        # Ray's servers go by themselves within a minute; until then another cluster may meet them.
        end(started)


def descendants(parent: int) -> list[psutil.Process]:
    """Return what a process has started, and what that has; nothing if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [*psutil.Process(parent).children(recursive=True)]
    return []


def end(processes: list[psutil.Process]) -> None:
    """Kill those that are left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def fork_server() -> None:
    """Fork the server of processes, before a test has left threads or connections."""
    resource_tracker.ensure_running()
    with mock.patch("multiprocessing.util.spawnv_passfds", partial(_forked, start=util.spawnv_passfds)):
        forkserver.ensure_running()


def _forked(_executable: object, _arguments: object, files: list[int], *, start: Callable[..., int]) -> int:
    """Fork the server instead of starting an interpreter; return its process id."""
    if pid := os.fork():
        return pid
    try:
        util.spawnv_passfds = start
        _forget_pytest()
        # Not closed: what still writes to one would write to whatever is opened next, as a socket.
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if file > 2 and file not in {*files, nothing}:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.fstat(file)
                    os.dup2(nothing, file)
        state: Any = forkserver
        state._forkserver.__init__()  # the parent holds the lock of what it was
        listener, alive = files
        state.main(listener, alive, [])
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(0)


def _forget_pytest() -> None:
    """Undo what pytest has set for its own process: streams, hooks, warnings, signals, loggers."""
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    known: Any = logging  # its type does not tell of what it keeps
    for handler in [reference() for reference in known._handlerList]:
        if type(handler) is logging.StreamHandler:  # made while pytest had its own in place
            handler.setStream(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def _call(target: Callable[..., Any], arguments: Any, files: tuple[str, str], variables: Any, folder: str) -> None:
    end_with_parent()
    # Else workers of loaders would come from a server of their own, which imports the stack again.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, (path, stream) in enumerate(zip(files, (sys.stdout, sys.stderr), strict=True), start=1):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        # Tests read what it says while it runs.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import torch

    torch.set_num_threads(1)
    sys.exit(target(*arguments))


def _packplan(*words: str) -> int:
    from packplan.app.__main__ import main

    sys.argv = ["packplan", *words]
    return main(list(words))
