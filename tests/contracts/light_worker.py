"""A worker without a model, that adds up over its group, raises, or dies; it loads torch late."""

import os
import signal
import sys

import numpy as np

from packplan.core.errors import DataSetError


class LightWorker:
    """One rank of a gloo group, if there are several."""

    def __init__(self) -> None:
        self.in_group = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.in_group:
            from packplan.adapters.ranks.torch_group import TorchGroup

            self.group = TorchGroup(use_cpu=True, timeout_s=300)

    def close(self):
        """Do nothing: it started nothing."""

    def add(self, shard, *, more):
        """Return the shard, and the sum over all workers."""
        total = float(sum(shard) + more)
        return {"own": np.array(shard), "sum": np.array(self._reduce(total) if self.in_group else total)}

    def refuse(self, shard):
        """Raise what the user can fix."""
        raise DataSetError(f"no {shard}")

    def break_down(self, shard):
        """Raise something else."""
        raise KeyError(shard)

    def die(self, shard):
        """Be killed, where the shard says so, while the others wait in a collective."""
        if shard == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self._reduce(0.0)
        sys.exit("never reached")

    def _reduce(self, value):
        import torch
        import torch.distributed as dist

        dist.all_reduce(total := torch.tensor(value))
        return float(total)
