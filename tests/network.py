"""Ports that no other test of this machine has."""

import contextlib
import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator


@functools.cache
def _ports(_process: int) -> Iterator[int]:
    """Ports below those that the kernel gives; processes seldom start at near ones."""
    return itertools.count(random.SystemRandom().randrange(20_000, 30_000))


def free_port() -> int:
    """Return a free port that this process has not returned before."""
    for port in _ports(os.getpid()):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError
