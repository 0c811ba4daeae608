"""
Connects the ranks of a run by torch.distributed.

Rank 0 builds arrays, such as a plan, and broadcasts them to the other ranks, which wait.

`RankWorkers` runs a user's worker object on each rank, with the shard of that rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from packplan.adapters.microbatches import ShardedData
from packplan.adapters.ranks.heartbeat import BEAT, DIED, Heartbeat
from packplan.core.errors import ArgumentError, ConfigError, Fault, PackplanError, RunError, counted
from packplan.core.ports import Arrays, RankGroup, ReportProgress

log = logging.getLogger(__name__)

_POLL_S = 1.0

_CHECK_S = 0.1

_WARN_EVERY_S = 30.0

_ACKNOWLEDGE_S = 10.0

_RELAYED = "rank 0 failed: "
"""Beginning of the text of rank 0's error on other ranks."""

SILENT_S = 45.0
"""Seconds without a heartbeat of rank 0 after which its node counts as dead or unreachable."""

CHUNK_BYTES = 1 << 25
"""
Largest number of bytes in one broadcast, which limits the memory that torch needs in addition to
the arrays.
"""


_BLOCK = 1 << 18
"""Number of integers in a block of a weight. A digest is computed from one sum for each block."""

_GOLDEN = -7046029254386353131
"""
2 ** 64 / golden ratio, as int64. Digests multiply integers by multiples of this number, since these
multiples are evenly spread.
"""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of torch for each size in bytes."""


class OneRank:
    """A `core.ports.RankGroup` of one process."""

    rank = 0
    world_size = 1

    def build_on_rank_zero(self, build: Callable[[ReportProgress], Arrays], *, timeout_s: float) -> Arrays:  # noqa: ARG002  # no one waits
        """Return the result of *build*; see `core.ports.RankGroup`."""
        return build(lambda _: None)

    def gather(self, value: str) -> tuple[str, ...]:
        """Return the value of the only rank; see `core.ports.RankGroup`."""
        return (value,)

    def any(self, flag: bool) -> bool:  # noqa: FBT001  # see the port
        """Return the flag of the only rank; see `core.ports.RankGroup`."""
        return flag

    def wait_for_all(self) -> None:
        """Return at once, since there is no other rank; see `core.ports.RankGroup`."""

    def gather_arrays(self, arrays: Arrays) -> tuple[Arrays, ...]:
        """Return the arrays of the only rank; see `core.ports.RankGroup`."""
        return (arrays,)

    def stop_heartbeat(self) -> None:
        """Do nothing, since a group of one rank has no heartbeat."""


class TorchGroup:
    """A `core.ports.RankGroup` over the process group that torchrun's environment describes."""

    def __init__(self, *, use_cpu: bool, timeout_s: float = 1800.0) -> None:
        """
        Join the process group; every rank has to construct a `TorchGroup`.

        Args:
            use_cpu: Whether to use only gloo, even if CUDA is available.
            timeout_s: Seconds to wait for the other ranks, while joining and in each collective;
                `build_on_rank_zero` has its own limit.

        Raises:
            ConfigError: This machine has no GPU for this rank.
            RunError: Another rank refuses the run, or has ended.
            RuntimeError: A rank has not connected after *timeout_s*.
        """
        cuda = torch.cuda.is_available() and not use_cpu
        device, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() if cuda else 0
        refusal = None
        if cuda and device >= devices:
            reason = f"is {device}, but this machine has {counted(devices, 'GPU')}: start one rank per GPU"
            refusal = ConfigError("the environment of this process", (Fault("LOCAL_RANK", reason),))
        self._store, rank, world_size = join_launch(timeout_s=timeout_s, refusal=refusal)
        if refusal is not None:
            raise refusal
        if cuda:
            torch.cuda.set_device(device)
        # Connect now, since no rank leaves before all have joined. Later, the store may be gone;
        # connecting to it would retry for long instead of failing.
        self._wait_store = self._store.clone()  # type: ignore[attr-defined]  # torch does not declare it
        with wrap_rank_errors(rank):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=PrefixStore("group", self._store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        self.rank, self.world_size = rank, world_size
        self._timeout_s, self._calls = timeout_s, 0
        self._heartbeat = Heartbeat(self._store) if rank == 0 else None

    def build_on_rank_zero(self, build: Callable[[ReportProgress], Arrays], *, timeout_s: float) -> Arrays:
        """Return rank 0's arrays on every rank; see `core.ports.RankGroup`."""
        self._calls += 1
        key = f"built/{self._calls}"
        arrays = self._build(build, key) if self.rank == 0 else _empty_arrays(self._await_description(key, timeout_s))
        for array in arrays.values():
            self._broadcast(array, src=0)
        return arrays

    def gather(self, value: str) -> tuple[str, ...]:
        """Return the values of all ranks, by rank; see `core.ports.RankGroup`."""
        self._calls += 1
        keys = [f"gathered/{self._calls}/{rank}" for rank in range(self.world_size)]
        with wrap_rank_errors(self.rank):
            self._store.set(keys[self.rank], value)
        return tuple(self._await_keys(keys, self._timeout_s, "rank_gone", awaited="for the other ranks"))

    def any(self, flag: bool) -> bool:  # noqa: FBT001  # see the port
        """Return whether any rank's flag is set; see `core.ports.RankGroup`."""
        flags = torch.tensor([int(flag)])
        with wrap_rank_errors(self.rank):
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags.item())

    def wait_for_all(self) -> None:
        """Wait until every rank has called this; see `core.ports.RankGroup`."""
        self.any(False)  # noqa: FBT003  # only its arrival counts

    def gather_arrays(self, arrays: Arrays) -> tuple[Arrays, ...]:
        """Return the arrays of all ranks, by rank; see `core.ports.RankGroup`."""
        mine = {name: np.array(array, order="C") for name, array in arrays.items()}
        gathered = []
        for rank, answer in enumerate(self.gather(_describe_arrays(mine))):
            theirs = mine if rank == self.rank else _empty_arrays(json.loads(answer))
            for array in theirs.values():
                self._broadcast(array, src=rank)
            gathered.append(theirs)
        return tuple(gathered)

    def stop_heartbeat(self) -> None:
        """Stop rank 0's heartbeat; after that, only failing collectives reveal a lost rank."""
        if self._heartbeat:
            self._heartbeat.stop()
            self._heartbeat = None

    def find_cause(self, error: Exception) -> Exception:
        """
        Return an error with the reason why another rank has ended, if that rank wrote it to the
        store; else *error*.
        """
        with suppress(dist.DistError):
            if getattr(error, "kind", "") == "rank_gone" and self._wait_store.check([DIED]):
                reason = self._wait_store.get(DIED).decode()
                return RunError("rank_gone", f"{reason}; so rank {self.rank} cannot continue")
        return error

    def report_failure(self, error: Exception, show: Callable[[Exception], None]) -> None:
        """
        Show the error that ends this rank, and write it to the store, where waiting ranks read it.

        If another rank of this node shows the same error, *error* counts as printed. Ranks above 0
        wait a second for rank 0 to show it, unless SIGTERM or Ctrl-C ends them. Rank 0 then waits
        until the others have shown theirs, since its process may run the store.

        Args:
            error: The error.
            show: Function that prints an error which does not count as printed.
        """
        try:
            with suppress(dist.DistError), _raising_on_sigterm():
                if not isinstance(error, RunError):
                    self._store.set(DIED, f"rank {self.rank} failed: {_error_text(error)}")
                self._claim(error)
        finally:
            show(error)  # before a launcher ends this rank, since another one has ended
        with suppress(dist.DistError):
            if self.rank:
                self._store.set(f"failed/{self.rank}", "")
            elif isinstance(error, PackplanError):  # any other exception is still to be shown
                _await_soon(self._store, [f"failed/{rank}" for rank in range(1, self.world_size)])

    def _claim(self, error: BaseException) -> None:
        """Mark an error as printed if rank 0, or another rank of this node, has raised it first."""
        # A lost rank is reported at once, since a store on its node may not answer.
        text, rank = _error_text(error), str(self.rank)
        is_relayed = text.startswith(_RELAYED)
        if isinstance(error, PackplanError) and (is_relayed or error.kind not in ("rank_gone", "rank_zero")):
            text = text.removeprefix(_RELAYED)
            key = f"shown/{os.environ.get('GROUP_RANK', '')}/{text}"
            if self.rank:
                _await_soon(self._store, [key], _POLL_S)
            error.is_printed = self._store.compare_set(key, "", rank).decode() != rank

    def leave(self) -> None:
        """Leave the group together with all ranks, since one rank's process may run the store."""
        dist.barrier()
        self.stop_heartbeat()
        # Threads of its transports that outlive the interpreter may abort the process.
        dist.destroy_process_group()

    def _broadcast(self, array: NDArray[Any], *, src: int) -> None:
        if not array.size:
            return
        with wrap_rank_errors(self.rank):
            for chunk in torch.split(torch.from_numpy(array).view(-1), CHUNK_BYTES // array.itemsize):
                dist.broadcast(chunk, src=src)

    def _build(self, build: Callable[[ReportProgress], Arrays], key: str) -> Arrays:
        try:
            assert self._heartbeat  # noqa: S101  # rank 0, and planning is not over
            arrays = {name: np.array(array, order="C") for name, array in build(self._heartbeat.report).items()}
        except BaseException as error:
            self._claim(error)
            self._store.set(key, json.dumps({"failed": _error_text(error)}))
            raise
        self._store.set(key, f'{{"built": {_describe_arrays(arrays)}}}')
        return arrays

    def _await_description(self, key: str, timeout_s: float) -> list[tuple[str, str, list[int]]]:
        awaited = "for rank 0 to measure and plan: raise training.packing_wait_timeout_s, or set it to 0 for no limit"
        answer = json.loads(self._await_keys([key], timeout_s, "rank_zero", awaited=awaited)[0])
        if "failed" in answer:
            raise RunError("rank_zero", f"{_RELAYED}{answer['failed']}")
        built: list[tuple[str, str, list[int]]] = answer["built"]
        return built

    def _await_keys(
        self, keys: list[str], timeout_s: float, kind: Literal["rank_gone", "rank_zero"], *, awaited: str
    ) -> list[str]:
        """Return the values of *keys*; RunError on timeout, or if a rank or the heartbeat fails."""
        watch = _KeyWatch(self._wait_store, keys)
        last_warning = 0.0
        while not watch.over.wait(_POLL_S):
            now, heard = time.monotonic(), watch.task or "nothing"
            waited, silence = now - watch.started, now - watch.last_beat
            if silence > SILENT_S:
                silent = f"rank 0 has sent no heartbeat for {silence:,.0f} s, so its node is down or unreachable"
                raise RunError(kind, f"{silent}; rank {self.rank} cannot continue; rank 0 reported: {heard}")
            if timeout_s and waited > timeout_s:
                raise RunError(kind, f"rank {self.rank} waited {waited:,.0f} s {awaited}; rank 0 reported: {heard}")
            if waited - last_warning > _WARN_EVERY_S:
                log.warning("rank %d has waited %.0f s; rank 0 reported: %s", self.rank, waited, heard)
                last_warning = waited
        if watch.answers is None:
            raise RunError(kind, f"{watch.lost}; so rank {self.rank} cannot continue")
        return watch.answers


def _describe_arrays(arrays: Arrays) -> str:
    """Return the names, types and shapes of arrays as JSON."""
    return json.dumps([(name, array.dtype.str, array.shape) for name, array in arrays.items()])


def _empty_arrays(described: list[tuple[str, str, list[int]]]) -> dict[str, NDArray[Any]]:
    """Return uninitialised arrays with the names, types and shapes from `_describe_arrays`."""
    return {name: np.empty(shape, dtype=np.dtype(dtype)) for name, dtype, shape in described}


def _await_soon(store: Store, keys: list[str], timeout_s: float = _ACKNOWLEDGE_S) -> bool:
    """Return whether a store has *keys* now, or gets them within *timeout_s* seconds."""
    end = time.monotonic() + timeout_s
    while not (found := store.check(keys)) and time.monotonic() < end:
        time.sleep(_CHECK_S)  # `wait` would print a warning if it times out
    return found


@contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """In this context, let SIGTERM raise SystemExit instead of ending the process at once."""
    if threading.current_thread() is not threading.main_thread():  # only that thread sets handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _error_text(error: BaseException) -> str:
    """Return this rank's error with its remedy, for the messages of other ranks."""
    return str(error) if isinstance(error, PackplanError) else f"{type(error).__name__}: {error}"


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of torch's error, without its position in torch's source."""
    return re.sub(r"^\[\S*\] ", "", str(error).partition("\n")[0]).partition(". ")[0][:200]


@contextmanager
def wrap_rank_errors(rank: int) -> Iterator[None]:
    """
    In this context, turn torch's errors about lost connections into RunErrors.

    Args:
        rank: Index of this rank, which the error names.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):
            raise
        fact = f"another rank has ended, so rank {rank} cannot continue: {_first_sentence(error)}"
        raise RunError("rank_gone", fact) from error


def join_launch(*, timeout_s: float = 1800.0, refusal: Exception | None = None) -> tuple[Store, int, int]:
    """
    Wait until all ranks have connected to torchrun's store, and pass on a rank's *refusal*.

    Args:
        timeout_s: Seconds to wait for the other ranks.
        refusal: Error that keeps this rank from running. The other ranks raise it as a RunError;
            this rank returns, and its caller raises it.

    Returns:
        The store of this launch, the rank, and the number of ranks.

    Raises:
        RunError: Another rank refuses the run, or has not joined this launch after *timeout_s*.
        RuntimeError: A rank has not connected to the store after *timeout_s*.
    """
    told = "" if refusal is None else _error_text(refusal)
    warn = threading.Timer(_WARN_EVERY_S, log.warning, ("waiting for other ranks, to end with this error: %s", told))
    if told:
        warn.start()
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        # An earlier attempt or launch may have used the same store; its entries must not be read.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        launch = _agree_on_launch(PrefixStore(f"packplan/{attempt}", store), rank, world_size, timeout_s)
    finally:
        warn.cancel()
    own = PrefixStore(f"packplan/{attempt}/{launch}", store)
    own.set(f"met/{rank}", told)
    reasons = [own.get(f"met/{number}").decode() for number in range(world_size)]
    if any(reasons):
        own.set(f"met/read/{rank}", "")
        # The store may run in the process of rank 0, and a launcher ends the other ranks as soon as
        # this process ends.
        if rank == 0 and not _await_soon(own, [f"met/read/{number}" for number in range(1, world_size)]):
            log.warning("some ranks have not received why the run ends, after waiting %.0f s", _ACKNOWLEDGE_S)
    if rank and isinstance(refusal, PackplanError) and told == reasons[0]:
        refusal.is_printed = True  # by rank 0
    if refusal is not None or not any(reasons):
        return own, rank, world_size
    first = next(number for number, reason in enumerate(reasons) if reason)
    raise RunError("rank_zero", f"rank {first} refuses the run: {reasons[first]}")


def _agree_on_launch(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """
    Return a token that all ranks of this launch share; an earlier launch had a different one.

    Each rank publishes a random token. Rank 0 repeatedly publishes the list of all tokens, until
    every rank has found its own token in the list. So no rank accepts a token or list of an earlier
    launch.
    """
    own = secrets.token_hex(8)
    tokens = [f"token/{number}" for number in range(world_size)]
    store.set(tokens[rank], own)
    store.wait(tokens, timedelta(seconds=timeout_s))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("tokens", json.dumps([store.get(token).decode() for token in tokens]))
        try:
            store.wait(["tokens"], timedelta(seconds=_POLL_S))
            found = json.loads(store.get("tokens"))
            launch: str = found[0]
            if len(found) == world_size and found[rank] == own:
                store.set(f"seen/{launch}/{rank}", "")
                store.wait([f"seen/{launch}/{number}" for number in range(world_size)], timedelta(seconds=_POLL_S))
                return launch
        except dist.DistStoreError:
            continue
    message = f"rank {rank} waited {timeout_s:,.0f} s for all {counted(world_size, 'rank')} of this launch"
    raise RunError("rank_gone", message)


class _KeyWatch:
    """
    Thread that waits for keys of the store, since a call to a store on a dead node blocks.

    Attributes:
        started: Time of construction, by the monotonic clock.
        last_beat: Time of rank 0's latest heartbeat, by the monotonic clock.
        over: Event that is set when the wait ends, whether or not all keys have values.
        answers: Values of the keys; None until all keys have values.
        lost: Reason why the wait ended before all keys had values.
        task: Latest task that rank 0 has reported.
    """

    def __init__(self, store: Store, keys: list[str]) -> None:
        self.over = threading.Event()
        self.answers: list[str] | None = None
        self.lost, self.task = "", ""
        self.started = self.last_beat = time.monotonic()
        threading.Thread(target=self._listen, args=(store, keys), daemon=True).start()

    def _listen(self, store: Store, keys: list[str]) -> None:
        last = b""
        try:
            # Polled, since each `wait` of the store that times out prints a warning on the user's
            # terminal.
            while not store.check(keys):
                if store.check([DIED]):
                    self.lost = store.get(DIED).decode()
                    return
                if store.check([BEAT]) and (beat := store.get(BEAT)) != last:
                    last, self.last_beat = beat, time.monotonic()
                    self.task = json.loads(beat)[1] or self.task
                time.sleep(_CHECK_S)
            self.answers = [store.get(key).decode() for key in keys]
        except dist.DistError as error:
            self.lost = f"rank 0 has ended: {_first_sentence(error)}"
        finally:
            self.over.set()


class RankWorkers:
    """One worker on each rank, or one in a single process; every rank receives all results."""

    def __init__(self, worker: Any, group: RankGroup) -> None:
        self._worker, self._group = worker, group

    @property
    def num_workers(self) -> int:
        """Number of ranks in the group."""
        return self._group.world_size

    def run_all_workers_sharded_data(self, method: str, shards: Sequence[Any], /, **options: Any) -> list[Arrays]:
        """
        Call *method* with this rank's shard; return the results of all ranks, by rank.

        ArgumentError is raised if the shards of ranks come from different batches or shardings.
        """
        rank = self._group.rank
        digests = [one.digest for one in shards if self.num_workers > 1 and isinstance(one, ShardedData)]
        of_ranks = self._group.gather(hashlib.sha256("".join(digests).encode()).hexdigest())
        if other := [number for number, digest in enumerate(of_ranks) if digest != of_ranks[0]]:
            fact = (
                f"rank {other[0]} has another batch or sharding than rank 0, so sequences would be lost: gather the "
                "fields of all ranks (torch.distributed.all_gather_object), and make one batch of them (concatenate)"
            )
            self._group.wait_for_all()  # every rank has read the digests before one ends
            raise ArgumentError("batch", fact)
        try:
            with wrap_rank_errors(rank):
                result: Arrays = getattr(self._worker, method)(shards[rank], **options)
        except PackplanError:
            raise
        except Exception as error:
            raise RunError.for_worker(rank, method, f"{type(error).__name__}: {error}") from error
        self._group.wait_for_all()  # unlike `gather_arrays`, it notices at once that a rank is gone
        return list(self._group.gather_arrays(result))

    def close(self) -> None:
        """Close this rank's worker; the process group lasts until the program ends."""
        self._worker.close()


@torch.no_grad()
def weight_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return type, shape and digest of each weight and buffer as a text, keyed by `weight NAME`."""
    return {
        f"weight {name}": f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)} {_weight_digest(weight)}"
        for name, weight in model.state_dict().items()
        if isinstance(weight, torch.Tensor)
    }


def _weight_digest(weight: torch.Tensor) -> str:
    flat = weight.detach().contiguous().view(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8:  # a view whose offset is not aligned to wider words
        flat = flat.clone()
    words = flat.view(_WORDS[size if flat.nbytes % 8 else 8])
    factors = torch.arange(min(_BLOCK, len(words)), device=words.device).mul_(_GOLDEN).bitwise_or_(1)
    sums = [(block.to(torch.int64) * factors[: len(block)]).sum() for block in torch.split(words, _BLOCK)]
    numbers = torch.stack(sums).tolist()
    return hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()[:16]
