"""
Measures blocks of samples on a Ray cluster; each block is one Ray task.

Each worker process opens the template and the records once, by a function from Ray's object store,
and reuses both for later blocks. If a node or process is lost, Ray runs its tasks again elsewhere.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

# Ray reports usage statistics by default, and reads this when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import attrs
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from packplan.core.errors import PackplanError, RunError, counted
from packplan.core.ports import MeasuredBlock

log = logging.getLogger(__name__)

Measure = Callable[[range], MeasuredBlock]

Variables = Mapping[str, str | None]
"""Environment variables by name; None unsets a variable."""

ANSWER_S = 10.0
"""Seconds within which a cluster has to accept a connection at its address."""

MAX_RETRIES = 5
"""Largest number of times that a block is measured again after its process or node was lost."""


class RayExecutor:
    """Measures blocks of samples on a Ray cluster; see `core.ports.BlockExecutor`."""

    block_size = 256

    def __init__(
        self,
        open_measure: Callable[[], Measure],
        *,
        address: str,
        variables: Mapping[str, str | None],
        timeout_s: float,
    ) -> None:
        """
        Join a Ray cluster, unless this process has joined one already.

        Args:
            open_measure: Function that opens the template and the records on a node. It returns a
                function that measures a block.
            address: Address of the cluster. With `auto`, the address is RAY_ADDRESS or, if that is
                not set, a cluster on this machine.
            variables: Environment variables to set on the nodes; None unsets a variable.
            timeout_s: Seconds to wait for the result of a block; 0 waits for ever.

        Raises:
            RunError: The cluster cannot be joined.
        """
        self._timeout_s, self._was_inside, self._calls = timeout_s, ray.is_initialized(), set[Any]()
        if not self._was_inside:
            _join(address)
        nodes = counted(sum(node["Alive"] for node in ray.nodes()), "node")
        log.info("measuring on a Ray cluster: %s, %s", nodes, counted(self.num_workers, "core"))
        submitted: Any = ray.remote(_measure_on_node).options(num_cpus=1, max_retries=MAX_RETRIES)
        # Inside a list, the object is not fetched for each task.
        self._measure = partial(submitted.remote, [ray.put(open_measure)], dict(variables), os.getcwd())  # noqa: PTH109  # Ray sends a text

    @property
    def num_workers(self) -> int:
        """Number of CPU cores that the cluster has now."""
        return max(int(ray.cluster_resources().get("CPU", 0)), 1)

    def submit(self, block: range) -> Callable[[], MeasuredBlock]:
        """Start to measure a block, and return a function that waits for its result."""
        call = self._measure(block)
        self._calls.add(call)
        return partial(self._receive, call)

    def _receive(self, call: Any) -> MeasuredBlock:
        try:
            block: MeasuredBlock = ray.get(call, timeout=self._timeout_s or None)
        except GetTimeoutError:
            reason = f"no block was measured within {self._timeout_s:,.0f} s (training.packing_wait_timeout_s)"
            raise RunError("cluster", f"{reason}: the cluster may lack a free core") from None
        except RayTaskError as error:
            if str(error.cause).startswith("The remote function failed to import"):
                raise RunError("node", f"a node cannot import packplan: {str(error.cause).splitlines()[-1]}") from None
            raise error.cause from error
        except RayError as error:
            raise RunError("cluster", f"a block cannot be measured: {' '.join(str(error).split())}") from None
        self._calls.remove(call)
        return block

    def close(self) -> None:
        """Cancel unfinished tasks, and leave the cluster if this executor joined it."""
        try:
            for call in self._calls:
                ray.cancel(call)
        finally:
            self._calls.clear()
            del self._measure
            if not self._was_inside:
                ray.shutdown()


def _join(address: str) -> None:
    """Join the Ray cluster at *address*; RunError if that fails."""
    handler = signal.getsignal(signal.SIGTERM)
    asked = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    try:
        host, _, port = asked.rpartition(":")
        if host and "/" not in host:  # where nobody answers, Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError("cluster", f"no Ray cluster can be joined at {asked}: {error}") from None
    finally:
        with suppress(ValueError, TypeError):  # in another thread, or not set by Python
            signal.signal(signal.SIGTERM, handler)


_opened: dict[str, Measure] = {}
"""Measuring function of this process's latest run, keyed by the id of the run's Ray object."""


def _measure_on_node(held: list[Any], variables: Variables, folder: str, block: range) -> MeasuredBlock:
    """Measure a block on a node; RunError if the node cannot open the model or the records."""
    (reference,) = held
    node = f"node {ray.util.get_node_ip_address()}"
    if (measure := _opened.get(reference.hex())) is None:
        _opened.clear()
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        with suppress(OSError):  # relative paths are then missing, and named
            os.chdir(folder)
        try:
            _opened[reference.hex()] = measure = ray.get(reference)()
        except PackplanError as error:
            raise RunError("node", f"{node} cannot measure: {error}") from None
    return attrs.evolve(measure(block), node=node)
