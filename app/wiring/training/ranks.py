"""The ranks of a run, and the folder that one run at a time trains into."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from packplan.adapters.files import writing
from packplan.adapters.ranks.torch_group import OneRank, TorchGroup
from packplan.adapters.trainer.arguments import runs_on_cpu
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError, OutputError
from packplan.core.ports import RankGroup


@contextlib.contextmanager
def joined_ranks(settings: Mapping[str, Any]) -> Iterator[RankGroup]:
    """
    Join the ranks that torchrun's environment describes, or be the only one, and leave them at the
    end.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield OneRank()
        return
    group = TorchGroup(use_cpu=runs_on_cpu(settings), timeout_s=float(settings.get("ddp_timeout", 1800)))
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

        OutputError: The folder cannot be written; ConfigError on the ranks beside the first.
    """
    folder = Path(config.training.output_dir)
    lock = FileLock(folder / "train.lock")
    taken, failure = False, None
    if group.rank == 0:
        try:
            with writing(folder), contextlib.suppress(Timeout):
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
                taken = True
        except OutputError as error:  # raised once the others know
            failure = error
    if group.any(failure is not None):
        raise failure or ConfigError.of("training.output_dir", f"is {folder}, which rank 0 cannot write")
    if group.any(group.rank == 0 and not taken):
        reason = f"is {folder}, which another run trains into: both would write its checkpoints; name another folder"
        raise ConfigError.of("training.output_dir", reason)
    try:
        yield
    finally:
        lock.release()
