"""Ports, and hosts made of network namespaces: what tests of several nodes need."""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

LINK = "eth0"

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET, of the kernel's sched.h."""

_PORTS_EACH, _BLOCKS = 300, 40
"""Ports of a process that asks for some; the kernel gives higher ones to outgoing connections."""

_ports = itertools.cycle(range(_PORTS_EACH))


@functools.cache
def _first_port() -> int:
    """Return the first port of a block that no other session of tests on this machine has."""
    for block in range(_BLOCKS):
        claim = os.open(Path(tempfile.gettempdir(), f"packplan-ports-{block}"), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the process has ended
        except OSError:
            os.close(claim)
        else:
            return 20_000 + block * _PORTS_EACH
    raise RuntimeError("no block of ports is free")


def free_port() -> int:
    """Return a free port of those that belong to this process alone, and to those forked of it."""
    for number in itertools.islice(_ports, _PORTS_EACH):
        port = _first_port() + number
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


@attrs.frozen
class Host:
    """A network namespace; its interface `LINK` leads to the other host."""

    name: str
    address: str

    def cut(self) -> None:
        """Take the link down, so that no packet leaves or arrives."""
        _ip("-n", self.name, "link", "set", "dev", LINK, "down")

    def enter(self) -> None:
        """Move this process to the host: what it opens from now on is there."""
        with open(f"/var/run/netns/{self.name}", "rb") as namespace:  # noqa: PTH123  # a name that the kernel gives
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"the kernel refuses to enter {self.name}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two linked hosts; skip the test where this is not allowed."""
    hosts = _host(1), _host(2)
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the command ip (iproute2)")
    try:
        for host in hosts:
            if refused := _ip("netns", "add", host.name, check=False) or _ip(
                "netns", "exec", host.name, "true", check=False
            ):
                pytest.skip(f"the kernel refuses network namespaces: {refused}")
        ends = [part for host in hosts for part in ("name", LINK, "netns", host.name)]
        if refused := _ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:], check=False):
            pytest.skip(f"the kernel refuses to link network namespaces: {refused}")
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
            for device in ("lo", LINK):
                _ip("-n", host.name, "link", "set", "dev", device, "up")
        yield hosts
    finally:
        for host in hosts:
            _ip("netns", "delete", host.name, check=False)


def _host(side: int) -> Host:
    return Host(f"packplan-{os.getpid()}-{side}", f"10.213.77.{side}")


def _ip(*words: str, check: bool = True) -> str:
    """Run a command of iproute2; return what it complains of."""
    run = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and run.returncode:
        raise RuntimeError(run.stderr)
    return run.stderr.strip() if run.returncode else ""
