"""
A process beside rank 0 that says in the store that rank 0 lives, what it is doing, and that it
died.

It is a process, not a thread, since solvers hold the interpreter for seconds, and since it has to
outlive rank 0 by the moment that it takes to say so.
"""

from __future__ import annotations

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

BEAT_S = 1.0


BEAT, DIED = "beat", "died"
"""Keys: what rank 0 says with each beat; what is said for it when it is gone."""


class Heartbeat:
    """Beats in a store from its making to its end."""

    def __init__(self, store: Store) -> None:
        """Start to beat; the store's keys are set through a connection of the new process's own."""
        context = multiprocessing.get_context("fork")
        receiver, self._sender = context.Pipe(duplex=False)
        # A heartbeat that cannot keep up loses words, and never stops rank 0.
        os.set_blocking(self._sender.fileno(), False)
        self._told = 0.0
        self._process = context.Process(target=_beat, args=(receiver, store, os.getpid()), daemon=True)
        self._process.start()
        receiver.close()

    def report(self, words: str) -> None:
        """Say what is being done; once a beat is enough."""
        if (now := time.monotonic()) - self._told >= BEAT_S:
            self._told = now
            with contextlib.suppress(BlockingIOError):
                # Below the size that pipes write whole or not at all.
                self._sender.send_bytes(words.encode()[:1000])

    def stop(self) -> None:
        """End, without a word."""
        self._process.kill()
        self._process.join()
        self._sender.close()


def _beat(receiver: Connection, store: Store, parent: int) -> None:
    # Ctrl-C reaches rank 0 too, which ends this; SIGTERM does what it always does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Rank 0's sockets must not outlive it here: whoever listens to them has to see them close.
    kept = receiver.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    # Where the store is gone, the waiting ranks see that themselves.
    with contextlib.suppress(dist.DistError):
        # Else it would look for a store that died with rank 0 as long as a collective may take.
        store.set_timeout(timedelta(seconds=10 * BEAT_S))
        own = store.clone()  # type: ignore[attr-defined]  # torch does not declare it
        for beat in itertools.count():
            words = _next_words(receiver) if beat else ""
            if words is None or os.getppid() != parent:
                own.set(DIED, "its process died: was it killed, or out of memory?")
                return
            own.set(BEAT, json.dumps([beat, words]))


def _next_words(receiver: Connection) -> str | None:
    """Return what rank 0 said within a beat; None if it is gone."""
    try:
        return receiver.recv_bytes().decode(errors="replace") if receiver.poll(BEAT_S) else ""
    except EOFError:
        return None
