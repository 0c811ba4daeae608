"""Ports, and hosts made of network namespaces: what tests of several nodes need."""

import contextlib
import ctypes
import functools
import itertools
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

LINK = "eth0"

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET, of the kernel's sched.h."""


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


@attrs.frozen
class Host:
    """A network namespace; its interface `LINK` leads to the other host."""

    name: str
    address: str

    def cut(self) -> None:
        """Take the link down, so that no packet leaves or arrives."""
        _ip(f"-n {self.name} link set dev {LINK} down")

    def enter(self) -> None:
        """Move this process to the host: what it opens from now on is there."""
        with Path("/var/run/netns", self.name).open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"the kernel refuses to enter {self.name}")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two linked hosts; skip the test where this is not allowed."""
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the command ip (iproute2)")
    hosts = [Host(f"packplan-{os.getpid()}-{side}", f"10.213.77.{side}") for side in (1, 2)]
    try:
        for host in hosts:
            _ip(f"netns add {host.name}")
        ends = [f"name {LINK} netns {host.name}" for host in hosts]
        _ip(f"link add {ends[0]} type veth peer {ends[1]}")
        for host in hosts:
            _ip(f"-n {host.name} address add {host.address}/24 dev {LINK}")
            for device in ("lo", LINK):
                _ip(f"-n {host.name} link set dev {device} up")
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"the kernel refuses linked network namespaces: {refused.stderr}")
    else:
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns delete {host.name}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=True)
