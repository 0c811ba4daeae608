"""Parents that start processes of one KIND, say which in FILE, and wait to be killed."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

PATIENCE_S = 600


def pool(_: Path) -> list[int]:
    """Start processes that measure."""
    from packplan.adapters.processes import keep_ctrl_c, open_pool

    with keep_ctrl_c():
        started = open_pool(2, print, "ready")
        named = [started.submit(_pid_and_pause, 0.2) for _ in range(4)]
    pids = {future.result() for future in named}
    # Busy again when the parent dies, as well as waiting for work.
    started.submit(time.sleep, PATIENCE_S)
    return sorted(pids)


def loader(folder: Path) -> list[int]:
    """Start the workers of a trainer's loader, each in the middle of a long sample."""
    from torch.utils.data import DataLoader

    from packplan.adapters.trainer.loader import open_worker

    start = partial(open_worker, num_workers=2, rank=0)
    options: Any = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": start}
    KEPT.append(iter(DataLoader(_Endless(folder), **options)))
    return noted(folder, 2)


def actors(folder: Path) -> list[int]:
    """Start Ray with an actor and room for two of another driver; write down its address."""
    import ray

    from packplan.adapters.ranks.ray import RayWorkers

    start = ray.init
    with mock.patch("ray.init", lambda **options: start(**options | {"num_cpus": 3})):
        workers = RayWorkers(Idle, num_workers=1)
    KEPT.append(workers)
    (folder / "address").write_text(ray.get_runtime_context().gcs_address)
    return workers.process_ids


class Idle:
    """A worker that can do nothing."""

    def fail(self, shard: str) -> None:
        """Raise what is none of our errors."""
        raise KeyError(shard)


KEPT: list[object] = []
"""Objects that hold the processes."""


class _Endless:
    """Samples that take for ever."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> None:
        (self._folder / f"{os.getpid()}.noted").touch()
        time.sleep(PATIENCE_S)


def noted(folder: Path, number: int) -> list[int]:
    """Wait for so many processes to have noted themselves."""
    while len(found := list(folder.glob("*.noted"))) < number:
        time.sleep(0.02)
    return [int(path.stem) for path in found]


def publish(folder: Path, pids: list[int]) -> None:
    """Write numbers down in a file that is whole once it is there."""
    (folder / "pids.tmp").write_text(json.dumps(pids))
    (folder / "pids.tmp").rename(folder / "pids.json")


def _pid_and_pause(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def main(kind: str, folder: str) -> None:
    """Start processes, write down their numbers, and wait."""
    publish(Path(folder), globals()[kind](Path(folder)))
    time.sleep(PATIENCE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
