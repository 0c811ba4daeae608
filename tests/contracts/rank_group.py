"""One rank of the group that `test_rank_group` talks to."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packplan.adapters.ranks.torch_group import TorchGroup


CHUNK_BYTES = 1 << 16
"""Bytes that travel at a time here; of the real number, arrays of two and more take a second."""


def main(scene: str, out: str) -> None:
    import numpy as np

    from packplan.adapters.ranks import heartbeat, torch_group
    from packplan.core.errors import PackplanError, PlanError

    def note(**said: object) -> None:
        part = Path(out, f"{group.rank}.part")
        part.write_text(json.dumps({"at": time.monotonic(), **said}))
        part.replace(part.with_suffix(".json"))

    def build(report):
        report("3 of 4 are measured")
        note(building=True)
        if scene == "fails":
            raise PlanError("too_short", "3 packs cannot feed 8 ranks")
        if scene == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if scene in {"slow", "silent"}:
            signal.pause()  # until it is killed
        return {
            "a": np.arange(6, dtype=np.int32).reshape(2, 3),
            "empty": np.zeros(0, dtype=np.int64),
            "large": np.arange(CHUNK_BYTES // 4 + 3),
        }

    torch_group.CHUNK_BYTES = CHUNK_BYTES
    if scene in {"silent", "slow"}:
        torch_group.SILENT_S, torch_group._POLL_S, heartbeat.BEAT_S = 1.5, 0.1, 0.2
    group = torch_group.TorchGroup(use_cpu=True, timeout_s=60)
    if scene in {"lonely", "left"} and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if scene == "left":
            group.any(False)  # noqa: FBT003
        _wait_until_told(group, scene)
        arrays = group.from_rank_zero(build, timeout_s=0.5 if scene == "slow" else 60, limit_s=7200)
        shown = {
            name: [array.ravel()[:9].tolist(), int(array.sum()), str(array.dtype), array.shape]
            for name, array in arrays.items()
        }
        note(
            arrays=shown,
            gathered=group.gather(f"from {group.rank}", timeout_s=0),
            arrays_of_ranks=[
                {name: [array.tolist(), str(array.dtype)] for name, array in theirs.items()}
                for theirs in group.gather_arrays(
                    {"own": np.full((group.rank + 1, 2), group.rank, dtype=np.float32), "none": np.zeros((0, 3))}
                )
            ],
            any=[group.any(group.rank == 1), group.any(False)],  # noqa: FBT003
        )
    except PackplanError as error:
        note(error=f"{type(error).__name__}: {error}")
    os._exit(0)


def _wait_until_told(group: TorchGroup, scene: str) -> None:
    """
    Where waiting is what is seen, begin it once rank 0 has said what it does: then the deadline
    need not leave time for that.
    """
    from packplan.adapters.ranks.heartbeat import BEAT

    if scene != "slow" or group.rank == 0:
        return
    while not (group._ear.check([BEAT]) and json.loads(group._ear.get(BEAT))[1]):
        time.sleep(0.01)
