"""A process of its own, which answers, and can be ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from packplan.adapters.lifeline import end_with_parent

STDOUT, STDERR = 1, 2

Message = Mapping[str, Any]
"""What JSON can say."""


class OwnProcess:
    """A fork of this process that works, sends messages, and may wait for this one in between."""

    def __init__(self, work: Callable[[Turns], Message]) -> None:
        """
        Start *work* in the process; what it returns is the last message, as is `{"error": …}` if it
        raises.
        """
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        # A child that may have children of its own is no daemon.
        self._process = context.Process(target=_run, args=(work, theirs), daemon=False)
        self._process.start()
        theirs.close()

    def next_message(self, limit_s: float) -> dict[str, Any]:
        """
        Return the process's next message; `{"error": …}` if it sends none within *limit_s* seconds,
        or died.
        """
        try:
            if not self._connection.poll(limit_s):
                return {"error": f"over {limit_s:.0f} s"}
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except EOFError:
            return {"error": "its process died"}
        return message

    def go_on(self) -> None:
        """Let the process go on, which waits for its turn."""
        self._connection.send_bytes(b"{}")

    def end(self) -> None:
        """End the process and all that it started, whatever they are at."""
        if self._process.pid is not None:
            # Its group holds what it started; it has none of its own until it has come that far.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()


class Turns:
    """The process's side: when it may work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def wait(self) -> None:
        """Say that a turn is over, or that none has begun, and wait for the next one."""
        self._connection.send_bytes(json.dumps(WAITING).encode())
        self._connection.recv_bytes()


WAITING = {"waiting": True}
"""The message of a process that waits for its turn."""


def _run(work: Callable[[Turns], Message], connection: Connection) -> None:
    end_with_parent()
    os.setsid()
    # What libraries print is not what this command prints.
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), STDOUT)
        os.dup2(nowhere.fileno(), STDERR)
    try:
        answer = work(Turns(connection))
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is its result
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    connection.send_bytes(json.dumps(answer).encode())
