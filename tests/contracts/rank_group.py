"""One rank of the group that `test_rank_group` talks to."""

import contextlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

CHUNK_BYTES = 1 << 16
"""Bytes that travel at a time here; of the real number, arrays of two and more take a second."""


def main(scene: str, out: str) -> None:
    import numpy as np

    from packplan.adapters.ranks import heartbeat, torch_group
    from packplan.core.errors import ArgumentError, PackplanError

    def note(**said: object) -> None:
        part = Path(out, f"{group.rank}.part")
        part.write_text(json.dumps({"at": time.monotonic(), **said}))
        part.replace(part.with_suffix(".json"))

    def build(report):
        report("3 of 4 are measured")
        note(building=True)
        if scene == "fails":
            raise ArgumentError("too_short", "3 packs cannot feed 8 ranks")
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
    if scene == "refuses":
        _refuse(out)
    group = torch_group.TorchGroup(use_cpu=True, timeout_s=60)
    group.any(False)  # noqa: FBT003  # all have joined before one is lost
    try:
        _LOSSES.get(scene, lambda _: None)(group)
        _wait_until_told(group, scene)
        arrays = group.build_on_rank_zero(build, timeout_s=0.5 if scene == "slow" else 60)
        own = {"own": np.full((group.rank + 1, 2), group.rank, dtype=np.float32), "none": np.zeros((0, 3))}
        note(
            arrays=_shown(arrays),
            gathered=group.gather(f"from {group.rank}"),
            arrays_of_ranks=[*map(_shown, group.gather_arrays(own))],
            any=[group.any(group.rank == 1), group.any(False)],  # noqa: FBT003
        )
    except PackplanError as error:
        note(error=f"{type(error).__name__}: {error}")
    os._exit(0)


def _shown(arrays) -> dict[str, list]:
    return {
        name: [array.ravel()[:9].tolist(), int(array.sum()), str(array.dtype), array.shape]
        for name, array in arrays.items()
    }


def _refuse(out: str) -> None:
    """Have rank 1 refuse the run, and note what rank 0 makes of it."""
    from packplan.adapters.ranks import torch_group
    from packplan.core.errors import ArgumentError, RunError

    try:
        refusal = ArgumentError("too_short", "3 packs cannot feed 8 ranks") if os.environ["RANK"] == "1" else None
        torch_group.meet(refusal=refusal)
    except RunError as error:
        Path(out, "0.json").write_text(json.dumps({"error": f"RunError: {error}"}))
    os._exit(0)


def _kill(rank: int, group) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _lose_in_flags(group) -> None:
    _kill(1, group)
    group.any(False)  # noqa: FBT003


def _lose_in_backward(group) -> None:
    import torch

    from packplan.adapters.ranks.torch_group import name_lost_ranks

    with name_lost_ranks(group.rank):
        loss = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum()
        _kill(1, group)
        loss.backward()


def _lose_in_comparison(group) -> None:
    import torch.distributed as dist

    _kill(0, group)
    with contextlib.suppress(dist.DistError):
        while True:  # until it is known that nobody reads it
            group._store.set("", "")
    group.gather("mine")


def _tell(group) -> None:
    from packplan.core.errors import ArgumentError

    if group.rank == 1:
        group.report_failure(ArgumentError("too_short", "3 packs cannot feed 8 ranks"))
        os._exit(0)
    group.gather("mine")


_LOSSES = {
    "lonely": partial(_kill, 1), "left": _lose_in_flags, "backward": _lose_in_backward, "compares": _lose_in_comparison,
    "tells": _tell,
}  # fmt: skip
"""Scene -> what ranks do while one of them ends."""


def _wait_until_told(group, scene: str) -> None:
    """Wait until rank 0 says what it does, where waiting is what is tested."""
    from packplan.adapters.ranks.heartbeat import BEAT

    if scene != "slow" or group.rank == 0:
        return
    while not (group._wait_store.check([BEAT]) and json.loads(group._wait_store.get(BEAT))[1]):
        time.sleep(0.01)
