"""
Runs workers as Ray actors, each of which is a rank of one torch process group.

Each actor builds its worker by calling a function that the driver sends. If one worker raises or
dies, all workers are ended, since the others may wait for it in a collective.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Ray reports usage statistics by default, and reads this when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from packplan.adapters.processes import end_with_process
from packplan.core.errors import PackplanError, RunError, counted
from packplan.core.ports import Arrays

LOST_S = 5.0
"""Seconds to wait, after a worker's failure, for Ray's report that another worker died."""

END_S = 10.0
"""Seconds that workers have to end their own processes before the workers are killed."""

START_S = 300.0
"""Seconds to wait for the first worker to start, and then for each further worker."""


class _RankActor:
    """Ray actor of one rank, which sets torchrun's environment variables and builds its worker."""

    def meeting_point(self) -> tuple[str, int]:
        """Return this worker's IP address and a free port, where the ranks can connect."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((address, 0))
            port: int = listener.getsockname()[1]
        return address, port

    def build_worker(self, make: Callable[[], Any], environment: Mapping[str, str], driver: tuple[str, int]) -> int:
        """
        Build this rank's worker, and return the id of this process.

        Args:
            make: Function that builds the worker.
            environment: Environment variables of this rank, which are set before *make* is called.
            driver: Node id and process id of the driver. On the driver's node, this process ends
                when the driver ends; on other nodes, Ray ends this process.
        """
        node, pid = driver
        if node == ray.get_runtime_context().get_node_id():
            end_with_process(pid)
        os.environ.update(environment)
        self._worker = make()
        return os.getpid()

    def close(self) -> None:
        """Close the worker, if it was built."""
        if worker := getattr(self, "_worker", None):
            worker.close()

    def call(self, method: str, shard: Any, options: Mapping[str, Any]) -> Arrays:
        """Return the result of the worker's *method* on *shard*."""
        arrays: Arrays = getattr(self._worker, method)(shard, **options)
        return arrays


class RayWorkers:
    """
    Workers that run as Ray actors; each worker is a rank.

    Attributes:
        process_ids: Process id of each worker on its machine, by rank.
    """

    def __init__(self, make: Callable[[], Any], *, num_workers: int, gpus_each: float = 0.0) -> None:
        """
        Start workers on the Ray cluster at RAY_ADDRESS or, if that is not set, on this machine.

        Args:
            make: Function that builds a worker; it is called in each worker's process, with the
                environment of a torchrun rank.
            num_workers: Number of ranks.
            gpus_each: Number of GPUs of each worker; a fraction shares one GPU.

        Raises:
            RunError: Ray cannot be reached, or a worker cannot be started or built.
            PackplanError: *make* raised this error, which is passed on unchanged.
        """
        self.num_workers = num_workers
        here: dict[str, Any] = (
            {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers, "include_dashboard": False}
        )
        self._actors: list[Any] = []
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR, **here)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError.for_worker(0, "start", f"Ray cannot be reached: {error}") from None
        actor: Any = ray.remote(_RankActor).options(num_cpus=1, num_gpus=gpus_each)
        self._actors = [actor.remote() for _ in range(num_workers)]
        # All have to be started first, or some would wait in their group for the others.
        points = self._collect("start", [actor.meeting_point.remote() for actor in self._actors], timeout_s=START_S)
        address, port = points[0]
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(num_workers), "LOCAL_RANK": "0"}
        driver = (ray.get_runtime_context().get_node_id(), os.getpid())
        self.process_ids: list[int] = self._collect(
            "build",
            [
                actor.build_worker.remote(make, {**meeting, "RANK": str(rank)}, driver)
                for rank, actor in enumerate(self._actors)
            ],
        )

    def run_all_workers_sharded_data(self, method: str, shards: Sequence[Any], /, **options: Any) -> list[Arrays]:
        """
        Call a method of every worker with its own shard; return the results by worker.

        Args:
            method: Name of the worker's method, which takes a shard and the options.
            shards: One shard for each worker, by rank.
            options: Keyword arguments of the method, the same for all workers.

        Raises:
            RunError: A worker died, or raised an error other than a PackplanError. All workers are
                then ended, since the others may wait for this worker in a collective.
            PackplanError: A worker raised this error, which is passed on unchanged.
        """
        calls = [actor.call.remote(method, shard, options) for actor, shard in zip(self._actors, shards, strict=True)]
        return self._collect(method, calls)

    def close(self) -> None:
        """Close the workers, end their actors, and shut Ray down in this process."""
        if self._actors:
            # A killed actor would leave the processes of its engine.
            ray.wait([actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=END_S)
        self._kill()

    def _kill(self) -> None:
        """Kill the actors without waiting for calls, which may hang, and shut Ray down."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        ray.shutdown()

    def _collect(self, method: str, calls: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        """Return the results of calls; if a call fails, kill all workers and raise an error."""
        left, failures = list(calls), dict[Any, RayError]()
        while left and not failures:
            ready, left = ray.wait(left, num_returns=1, timeout=timeout_s)
            if not ready:
                self._kill()
                reason = (
                    f"it has not finished after {timeout_s:,.0f} s, so the cluster may lack a free CPU or GPU for each "
                    f"of the {counted(self.num_workers, 'worker')}"
                )
                raise RunError.for_worker(calls.index(left[0]), method, reason)
            failures = _find_failures(ready)
        if not failures:
            return ray.get(list(calls))  # type: ignore[no-any-return]  # has no types
        if left:  # a worker whose collective failed may report before Ray notices that another one died
            failures |= _find_failures(ray.wait(left, num_returns=len(left), timeout=LOST_S)[0])
        self._kill()
        # The most serious failure first: a worker that died.
        call, failure = min(failures.items(), key=lambda one: not isinstance(one[1], RayActorError))
        cause = getattr(failure, "cause", None)
        if isinstance(cause, PackplanError):
            raise cause from None
        raise RunError.for_worker(calls.index(call), method, _failure_reason(failure)) from None


def _find_failures(calls: Sequence[Any]) -> dict[Any, RayError]:
    """Return the error of each failed call among *calls*, all of which have ended."""
    found = {}
    for call in calls:
        try:
            ray.get(call)
        except RayError as error:
            found[call] = error
    return found


def _failure_reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return f"its process died: {' '.join(str(error).split())}"
    return f"{type(error).__name__}: {error}"
