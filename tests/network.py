"""Ports, and hosts made of network namespaces: what tests of several nodes need."""

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

LINK = "eth0"


_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET, of the kernel's sched.h."""

_PORTS_EACH = 400

_ports = itertools.cycle(range(_PORTS_EACH))


def free_port() -> int:
    """Return a free port of those that belong to this worker of pytest-xdist alone."""
    # Below the ports that the kernel gives to outgoing connections.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_ports, _PORTS_EACH):
        port = 20_000 + worker * _PORTS_EACH + number
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
