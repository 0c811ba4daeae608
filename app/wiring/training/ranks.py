"""The ranks of a run, and the folder that one run at a time trains into."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from adapters.files import writing
from adapters.ranks.torch_group import OneRank, TorchGroup
from core.config import RunConfig
from core.errors import ConfigError
from core.ports import RankGroup


@contextlib.contextmanager
def joined_ranks(settings: Mapping[str, Any]) -> Iterator[RankGroup]:
    """
    Join the ranks that torchrun's environment describes, or be the only one, and leave them at the
    end.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield OneRank()
        return
    group = TorchGroup(use_cpu=bool(settings.get("use_cpu")), timeout_s=float(settings.get("ddp_timeout", 1800)))
    yield group
    # Not after an error: the other ranks may wait for this one in a collective, and leaving would
    # wait for them.
    group.leave()


def local_ranks() -> int:
    """Return how many ranks share this machine's cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def alone_in_output(config: RunConfig, group: RankGroup) -> Iterator[None]:
    """
    Keep other runs from training into the same folder; every rank calls this.

    Raises:
        ConfigError: Another run does so now, and both would write the same checkpoints.
    """
    folder = Path(config.training.output_dir)
    lock = FileLock(folder / "train.lock")
    taken = False
    if group.rank == 0:
        with writing(folder), contextlib.suppress(Timeout):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            taken = True
    if group.any(group.rank == 0 and not taken):
        reason = f"is {folder}, which another run trains into: both would write its checkpoints; name another folder"
        raise ConfigError.of("training.output_dir", reason)
    try:
        yield
    finally:
        lock.release()
