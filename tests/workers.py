"""Workers of pytest-xdist, forked by a process that has imported the stack: `-p tests.workers`."""

import atexit
import importlib
import os
import shutil
import signal
import sys
import traceback
from functools import partial
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO


def fork_worker(held: list[int]) -> tuple[int, int, int]:
    """Fork a process that runs what execnet sends; return its id and pipes, also in *held*."""
    (infile, answers), (words, outfile) = os.pipe(), os.pipe()
    held += [infile, outfile]
    sys.stdout.flush()
    if pid := os.fork():
        os.close(words)
        os.close(answers)
        return pid, infile, outfile
    try:
        atexit.unregister(shutil.rmtree)  # folders are those of the process that forks
        os.dup2(words, 0)
        os.dup2(answers, 1)
        for file in (*held, words, answers):
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # noqa: S102, S307  # as the interpreter would
        atexit._run_exitfuncs()
        os._exit(0)
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Import core and the stack, and fork workers for execnet, which would start interpreters."""
    from tests.conftest import import_core  # once coverage has started

    import_core(config)
    held: list[int] = []
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        importlib.import_module("tests.stack")
        workers, start = [fork_worker(held) for _ in specs], gateway_io.Popen2IOMaster

    def next_worker(arguments: list[str], execmodel: Any) -> Popen2IO:
        """Return the pipes of the next worker, or of an interpreter after one has crashed."""
        if not workers:
            return start(arguments, execmodel)
        pid, infile, outfile = workers.pop(0)
        pipes = Popen2IO(os.fdopen(outfile, "wb"), os.fdopen(infile, "rb"), execmodel)
        vars(pipes).update(wait=partial(os.waitpid, pid, 0), kill=partial(os.kill, pid, signal.SIGKILL))
        return pipes

    gateway_io.Popen2IOMaster = next_worker
