"""
Process beside rank 0 that writes rank 0's current task, and its death, to the ranks' store.

It is a process, not a thread, for two reasons. Solvers hold the interpreter for seconds, and the
heartbeat has to outlive rank 0 to report its death.
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
"""Seconds between two beats."""

BEAT, DIED = "beat", "died"
"""Store keys: latest beat with its number and rank 0's task; reason why a rank ended."""


class Heartbeat:
    """Heartbeat of this process in a store, from construction to `stop`."""

    def __init__(self, store: Store) -> None:
        """Start the process of the heartbeat, which connects to the store by itself."""
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
        """Send rank 0's current task, as text, to the heartbeat, at most once in `BEAT_S`."""
        if (now := time.monotonic()) - self._reported >= BEAT_S:
            self._reported = now
            with contextlib.suppress(BlockingIOError):
                # Below the size that pipes write whole or not at all.
                self._sender.send_bytes(words.encode()[:1000])

    def stop(self) -> None:
        """End the process of the heartbeat without a report that rank 0 has died."""
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
        # By default it would search for a dead store for as long as a collective may take.
        store.set_timeout(timedelta(seconds=10 * BEAT_S))
        own = store.clone()  # type: ignore[attr-defined]  # torch does not declare it
        for beat in itertools.count():
            words = _receive_task(receiver) if beat else ""
            if words is None or os.getppid() != parent:
                own.set(DIED, "rank 0 is gone: its process died, perhaps killed or out of memory")
                return
            own.set(BEAT, json.dumps([beat, words]))


def _receive_task(receiver: Connection) -> str | None:
    """Wait up to `BEAT_S`; return rank 0's new task, "" without news, None if rank 0 is gone."""
    try:
        return receiver.recv_bytes().decode(errors="replace") if receiver.poll(BEAT_S) else ""
    except EOFError:
        return None
