"""One rank of the group that `test_rank_group` talks to."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def main(scene: str, out: str) -> None:
    import numpy as np

    from adapters.ranks import torch_group
    from core.errors import PackplanError, PlanTooShortError

    def note(**said: object) -> None:
        part = Path(out, f"{group.rank}.part")
        part.write_text(json.dumps({"at": time.monotonic(), **said}))
        part.replace(part.with_suffix(".json"))

    def build(report):
        report("3 of 4 are measured")
        note(building=True)
        if scene == "fails":
            raise PlanTooShortError(3, 8)
        if scene == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if scene in {"slow", "silent"}:
            signal.pause()  # until it is killed
        return {
            "a": np.arange(6, dtype=np.int32).reshape(2, 3),
            "empty": np.zeros(0, dtype=np.int64),
            "large": np.arange(torch_group.CHUNK_BYTES // 4 + 3),
        }

    if scene == "silent":
        torch_group.SILENT_S = 6.0
    group = torch_group.TorchGroup(use_cpu=True, timeout_s=60)
    if scene == "lonely" and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        arrays = group.from_rank_zero(build, timeout_s=3 if scene == "slow" else 60, limit_s=7200)
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
