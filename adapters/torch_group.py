"""Ranks over torch.distributed: rank 0 builds, the others wait on its store, arrays travel as tensors."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from core.errors import PackplanError, RankZeroError
from core.ports import Arrays

log = logging.getLogger(__name__)

_POLL_S = 1.0

_TELL_EVERY_S = 30.0

_FAREWELL_S = 10.0


class OneRank:
    """A `core.ports.RankGroup` of one process."""

    rank = 0
    world_size = 1

    def from_rank_zero(self, build: Callable[[], Arrays], *, timeout_s: float) -> Arrays:  # noqa: ARG002  # no one waits
        """Return what *build* builds."""
        return build()

    def gather(self, value: str) -> tuple[str, ...]:
        """Return the value alone."""
        return (value,)

    def any(self, flag: bool) -> bool:  # noqa: FBT001  # see the port
        """Return the flag."""
        return flag


class TorchGroup:
    """A `core.ports.RankGroup` over a process group that torchrun's environment describes."""

    def __init__(self, *, use_cpu: bool, timeout_s: float = 1800.0) -> None:
        """
        Join the group; every rank calls this.

        Args:
            use_cpu: Use gloo alone, even where CUDA is at hand.

            timeout_s: Seconds a collective may take; waiting for rank 0's plan is not one.
        """
        cuda = torch.cuda.is_available() and not use_cpu
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        # Another attempt of an elastic launch has the same store: what the last one wrote must not be seen.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"packplan/{attempt}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore(f"group/{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.rank, self.world_size = rank, world_size
        self._timeout_s = timeout_s
        self._calls = 0

    def from_rank_zero(self, build: Callable[[], Arrays], *, timeout_s: float) -> Arrays:
        """Return on every rank what rank 0 builds; see `core.ports.RankGroup`."""
        self._calls += 1
        key = f"built/{self._calls}"
        if self.rank == 0:
            arrays = self._build(build, key)
        else:
            arrays = {
                name: np.empty(shape, dtype=np.dtype(dtype)) for name, dtype, shape in self._awaited(key, timeout_s)
            }
        for array in arrays.values():
            if array.size:
                dist.broadcast(torch.from_numpy(array), src=0)
        return arrays

    def gather(self, value: str) -> tuple[str, ...]:
        """Return the value of every rank, by rank."""
        self._calls += 1
        keys = [f"gathered/{self._calls}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], value)
        self._store.wait(keys, timedelta(seconds=self._timeout_s))
        return tuple(self._store.get(key).decode() for key in keys)

    def any(self, flag: bool) -> bool:  # noqa: FBT001  # see the port
        """Return whether any rank's flag is set."""
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def leave(self) -> None:
        """End the group: threads of its transports that outlive the interpreter may abort the process."""
        dist.destroy_process_group()

    def _build(self, build: Callable[[], Arrays], key: str) -> Arrays:
        try:
            arrays = {name: np.array(array, order="C") for name, array in build().items()}
        except BaseException as error:
            reason = str(error) if isinstance(error, PackplanError) else f"{type(error).__name__}: {error}"
            self._store.set(key, json.dumps({"failed": reason}))
            self._let_others_read(key)
            raise
        built = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        self._store.set(key, json.dumps({"built": built}))
        return arrays

    def _let_others_read(self, key: str) -> None:
        # The store may be this process's own, and a launcher ends the others as soon as this one is gone.
        acknowledged = [f"{key}/read/{rank}" for rank in range(1, self.world_size)]
        try:
            self._store.wait(acknowledged, timedelta(seconds=_FAREWELL_S))
        except dist.DistStoreError:
            log.warning("some ranks did not hear within %.0f s why rank 0 failed", _FAREWELL_S)

    def _awaited(self, key: str, timeout_s: float) -> list[tuple[str, str, list[int]]]:
        started = told = time.monotonic()
        while True:
            try:
                self._store.wait([key], timedelta(seconds=_POLL_S))
                break
            except dist.DistNetworkError as error:
                message = f"rank 0 is gone, so rank {self.rank} cannot get its plan: {error}"
                raise RankZeroError(message) from None
            except dist.DistStoreError:
                now = time.monotonic()
            if timeout_s and now - started > timeout_s:
                message = (
                    f"rank {self.rank} waited {timeout_s:,.0f} s for rank 0 to measure and plan "
                    "(training.packing_wait_timeout_s): raise it, or set it to 0 to wait for ever"
                )
                raise RankZeroError(message)
            if now - told > _TELL_EVERY_S:
                log.warning("rank %d has waited %.0f s for rank 0 to measure and plan", self.rank, now - started)
                told = now
        answer = json.loads(self._store.get(key))
        if "failed" in answer:
            self._store.set(f"{key}/read/{self.rank}", "")
            raise RankZeroError(f"rank 0 failed: {answer['failed']}")
        built: list[tuple[str, str, list[int]]] = answer["built"]
        return built
