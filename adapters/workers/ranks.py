"""Workers on the ranks themselves: each runs the same program on its own shard."""

import re
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from packplan.core.errors import PackplanError, RunError
from packplan.core.ports import Arrays, RankGroup


class RankWorkers:
    """
    Workers that are torchrun's ranks, or of this process alone; every rank gets all
    results.
    """

    def __init__(self, worker: Any, group: RankGroup) -> None:
        self._worker, self._group = worker, group

    @property
    def num_workers(self) -> int:
        """Ranks of the group."""
        return self._group.world_size

    def run_all_workers_sharded_data(self, method: str, shards: Sequence[Any], /, **options: Any) -> list[Arrays]:
        """Compute this rank's shard, and exchange the results; as `RayWorkers` does."""
        rank = self._group.rank
        try:
            result: Arrays = getattr(self._worker, method)(shards[rank], **options)
        except PackplanError:
            raise
        except Exception as error:
            if dist.is_initialized() and re.search("gloo|nccl", f"{type(error)} {error}", re.IGNORECASE):
                message = f"another rank is gone, so rank {rank} cannot go on with {method}: {error}"
                raise RunError("rank_gone", message) from error
            raise RunError.worker(rank, method, f"{type(error).__name__}: {error}") from error
        self._group.any(False)  # noqa: FBT003  # unlike `gather_arrays`, it notices at once that a rank is gone
        return list(self._group.gather_arrays(result))

    def close(self) -> None:
        """End what the worker started; the ranks leave when their program ends."""
        self._worker.close()
