"""Workers on the ranks themselves: each runs the same program on its own shard."""

from collections.abc import Sequence
from typing import Any

from packplan.adapters.ranks.torch_group import name_lost_ranks
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
            with name_lost_ranks(rank):
                result: Arrays = getattr(self._worker, method)(shards[rank], **options)
        except PackplanError:
            raise
        except Exception as error:
            raise RunError.worker(rank, method, f"{type(error).__name__}: {error}") from error
        self._group.any(False)  # noqa: FBT003  # unlike `gather_arrays`, it notices at once that a rank is gone
        return list(self._group.gather_arrays(result))

    def close(self) -> None:
        """End what the worker started; the ranks leave when their program ends."""
        self._worker.close()
