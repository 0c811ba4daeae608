"""
Helper process that writes rank 0's current task, and the end of rank 0, to the ranks' store.

A thread cannot do this, since solvers hold the interpreter lock for seconds. The heartbeat also has
to outlive rank 0, to report that rank 0 has died.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from packplan.adapters.processes import hold_ctrl_c

BEAT_S = 1.0
"""Maximum number of seconds between heartbeats, and minimum number between reported tasks."""

BEAT, DIED = "beat", "died"
"""Store keys of the latest heartbeat (number, rank 0's task) and of the reason why a rank ended."""


class Heartbeat:
    """Writes to a store that rank 0, which is this process, is alive; runs until `stop`."""

    def __init__(self, store: Store) -> None:
        """Start the heartbeat's process, which opens its own connection to the store."""
        context = multiprocessing.get_context("fork")
        receiver, self._sender = context.Pipe(duplex=False)
        # A slow heartbeat loses reports, but never blocks rank 0.
        os.set_blocking(self._sender.fileno(), False)
        self._reported = 0.0
        self._process = context.Process(target=_run_heartbeat, args=(receiver, store, os.getpid()), daemon=True)
        with hold_ctrl_c():
            self._process.start()
            receiver.close()

    def report(self, words: str) -> None:
        """Send rank 0's current task to the heartbeat, at most once in `BEAT_S` seconds."""
        if (now := time.monotonic()) - self._reported >= BEAT_S:
            self._reported = now
            with contextlib.suppress(BlockingIOError):
                # Below the size that pipes write whole or not at all.
                self._sender.send_bytes(words.encode()[:1000])

    def stop(self) -> None:
        """End the heartbeat's process, so that it does not report rank 0 as dead."""
        self._process.kill()
        self._process.join()
        self._sender.close()


def _run_heartbeat(receiver: Connection, store: Store, parent: int) -> None:
    # Ctrl-C also reaches rank 0, which ends this process; SIGTERM ends it as usual.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Close copies of rank 0's sockets, so that their peers notice when rank 0 ends.
    receiver_number = receiver.fileno()
    os.closerange(3, receiver_number)
    os.closerange(receiver_number + 1, os.sysconf("SC_OPEN_MAX"))
    # If the store is gone, the waiting ranks notice it themselves.
    with contextlib.suppress(dist.DistError):
        # By default, a call to a dead store would retry for as long as a collective may take.
        store.set_timeout(timedelta(seconds=10 * BEAT_S))
        own = store.clone()  # type: ignore[attr-defined]  # torch does not declare it
        for beat in itertools.count():
            words = _receive_task(receiver) if beat else ""
            if words is None or os.getppid() != parent:
                own.set(DIED, "rank 0 has ended: its process died, perhaps killed or out of memory")
                return
            own.set(BEAT, json.dumps([beat, words]))


def _receive_task(receiver: Connection) -> str | None:
    """Return rank 0's new task, "" if none comes within `BEAT_S`, or None if rank 0 has ended."""
    try:
        return receiver.recv_bytes().decode(errors="replace") if receiver.poll(BEAT_S) else ""
    except EOFError:
        return None
