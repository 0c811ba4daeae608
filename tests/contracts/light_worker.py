"""A worker without a model, that adds up over its group, raises, or dies."""

import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

from packplan.adapters.ranks.torch_group import TorchGroup
from packplan.core.errors import DataSetError


class LightWorker:
    """One rank of a gloo group, if there are several."""

    def __init__(self) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self.group = TorchGroup(use_cpu=True, timeout_s=300)

    def close(self):
        """Do nothing: it started nothing."""

    def add(self, shard, *, more):
        """Return the shard, and the sum over all workers."""
        total = torch.tensor(float(sum(shard) + more))
        if dist.is_initialized():
            dist.all_reduce(total)
        return {"own": np.array(shard), "sum": np.array(float(total))}

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
        dist.all_reduce(torch.zeros(1))
        sys.exit("never reached")
