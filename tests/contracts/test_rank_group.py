"""Ranks over torch.distributed: rank 0's results and failures reach all; no endless wait."""

import contextlib
import json
import os
import re
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from packplan.adapters.ranks import heartbeat, torch_group
from packplan.app.cli.command import run_command
from packplan.app.opening.ranks import open_rank_group
from packplan.core.errors import ArgumentError, DataSetError, PackplanError
from tests.network import free_port
from tests.processes import wait_for

pytestmark = pytest.mark.slow

CHUNK_BYTES = 1 << 16
"""Bytes that travel at a time here; of the real number, arrays of two and more take a second."""

SHORT = "3 packs cannot fill 8 ranks"


def too_short() -> ArgumentError:
    return ArgumentError("too_short", SHORT)


def build_in(scene: str, note, report):
    """Build arrays as rank 0, or end as the scene says."""
    report("3 of 4 are measured")
    note(building=True)
    if scene == "fails":
        raise too_short()
    if scene == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if scene in {"slow", "silent"}:
        signal.pause()  # until it is stopped or killed
    return {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros(0, dtype=np.int64),
        "large": np.arange(CHUNK_BYTES // 4 + 3),
    }


def play_rank(scene: str, out: str) -> None:
    """Play a scene as one rank, and write down what it sees last."""

    def note(**said: object) -> None:
        part = Path(out, f"{os.environ['RANK']}.part")
        part.write_text(json.dumps(said))
        part.replace(part.with_suffix(".json"))

    torch_group.CHUNK_BYTES = CHUNK_BYTES
    if scene in {"silent", "slow"}:
        torch_group.SILENT_S, torch_group._POLL_S, heartbeat.BEAT_S = 1.5, 0.1, 0.2
    try:
        if scene == "refuses":
            torch_group.join_launch(refusal=too_short() if os.environ["RANK"] == "1" else None)
            os._exit(0)
        if (scene, os.environ["RANK"]) == ("joins", "1"):
            dist.init_process_group = lambda *_, **__: os._exit(0)
        group = torch_group.TorchGroup(use_cpu=True, timeout_s=4 if scene == "joins" else 60)
        group.wait_for_all()  # all have joined before one is lost
        LOSSES.get(scene, lambda _: None)(group)
        arrays = group.build_on_rank_zero(partial(build_in, scene, note), timeout_s=0.5 if scene == "slow" else 60)
        own = {"own": np.full((group.rank + 1, 2), group.rank, dtype=np.float32), "none": np.zeros((0, 3))}
        note(
            arrays=shown(arrays),
            gathered=group.gather(f"from {group.rank}"),
            arrays_of_ranks=[*map(shown, group.gather_arrays(own))],
            any=[group.any(group.rank == 1), group.any(False)],  # noqa: FBT003
        )
    except PackplanError as error:
        note(error=f"{type(error).__name__}: {error}")
    os._exit(0)


def shown(arrays) -> dict[str, list]:
    return {
        name: [array.ravel()[:9].tolist(), int(array.sum()), str(array.dtype), array.shape]
        for name, array in arrays.items()
    }


def lose(rank: int, group) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def lose_in_worker(group) -> None:
    workers = torch_group.RankWorkers(SimpleNamespace(measure=lambda _: lose(1, group) or {}), group)
    workers.run_all_workers_sharded_data("measure", [None, None])


def lose_in_backward(group) -> None:
    with torch_group.wrap_rank_errors(group.rank):
        loss = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum()
        lose(1, group)
        loss.backward()


def lose_in_comparison(group) -> None:
    lose(0, group)
    with contextlib.suppress(dist.DistError):
        while True:  # until it is known that nobody reads it
            group._store.set("", "")
    group.gather("mine")


def tell(group) -> None:
    if group.rank == 1:
        group.report_failure(too_short(), id)
        os._exit(0)
    group.gather("mine")


def tell_in_collective(group) -> None:
    """Fail on rank 1, which other ranks notice only by the end of its process."""
    if group.rank == 1:
        tell(group)
    try:
        group.wait_for_all()
    except PackplanError as error:
        raise group.find_cause(error) from error


def wait_until_told(group) -> None:
    """Wait on other ranks until rank 0 says what it does, where waiting is what is tested."""
    while group.rank and not (
        group._wait_store.check([heartbeat.BEAT]) and json.loads(group._wait_store.get(heartbeat.BEAT))[1]
    ):
        time.sleep(0.01)


LOSSES = {
    "lonely": partial(lose, 1), "works": lose_in_worker, "backward": lose_in_backward, "compares": lose_in_comparison,
    "tells": tell, "told in a collective": tell_in_collective, "slow": wait_until_told,
}  # fmt: skip
"""Scene -> what ranks do before rank 0 builds, while one of them may end."""


@pytest.fixture
def play(server, tmp_path):
    """Return a function that plays a scene on two ranks, and gives what each said last."""

    def played(scene: str, **variables) -> list[dict]:
        ranks = server.ranks(2, play_rank, scene, str(tmp_path), folder=tmp_path, env=variables)
        if scene == "silent":
            wait_for((tmp_path / "0.json").exists, "rank 0 does not build")
            os.kill(ranks[0].pid, signal.SIGSTOP)
        ranks[1].wait()
        if scene in {"silent", "slow"}:
            ranks[0].process.kill()
        ranks[0].wait()
        files = [tmp_path / f"{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    return played


@pytest.fixture
def agent():
    """Keep a store as torchrun's agent does, outside of all ranks."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    del store


def test_arrays_values_and_flags_reach_every_rank_and_nothing_of_an_earlier_launch(play, agent):
    """Arrays of any size and type. The earlier one failed, and said so in the same store."""
    play("fails", **agent)

    first, second = play("builds", **agent)
    assert first == second
    size = CHUNK_BYTES // 4 + 3
    assert {
        "a": [[0, 1, 2, 3, 4, 5], 15, "int32", [2, 3]],
        "empty": [[], 0, "int64", [0]],
        "large": [list(range(9)), size * (size - 1) // 2, "int64", [size]],
    } == second["arrays"]
    assert ["from 0", "from 1"] == second["gathered"]
    assert [True, False] == second["any"]
    own = [[[0.0] * 2, 0, "float32", [1, 2]], [[1.0] * 4, 4, "float32", [2, 2]]]
    gathered = [{"own": of_rank, "none": [[], 0, "float64", [0, 3]]} for of_rank in own]
    assert gathered == second["arrays_of_ranks"]


LOST = r"RunError: another rank has ended, so rank 0 cannot continue: [A-Z][^.\n]* \[[\d.]+\]:\d+[^.\n]*"


@pytest.mark.parametrize(
    ("scene", "by_agent", "rank", "says"),
    [
        ("killed", True, 1, "RunError: rank 0 has ended: its process died.*"),
        ("killed", False, 1, "RunError: rank 0 has ended.*"),
        ("slow", False, 1, r"RunError: rank 1 waited \d+ s for rank 0 .*packing_wait_timeout_s.*: 3 of 4 are measured"),
        ("silent", False, 1, "RunError: rank 0 has sent no heartbeat.*"),  # stopped: nothing says that anything ended
        *((scene, True, 0, LOST) for scene in ("lonely", "works", "backward")),
        ("joins", True, 0, "RunError: another rank has ended.*"),
        ("compares", False, 1, "RunError: another rank has ended.*"),
        ("refuses", True, 0, f"RunError: rank 1 refuses the run: {SHORT}; .*set training.*"),
        *(
            (scene, True, 0, f"RunError: rank 1 failed: {SHORT}; .*set training.*")
            for scene in ("tells", "told in a collective")
        ),
    ],
)
def test_a_rank_that_ends_is_missed_with_its_reason(*, play, agent, scene, by_agent, rank, says):
    """In one sentence, whether its store goes with it or an agent keeps that."""
    ends = play(scene, **(agent if by_agent else {}))

    assert re.fullmatch(says, ends[rank]["error"], re.DOTALL)
    assert torch_group.SILENT_S < 55, "shortened here"


def fail(scene: str) -> int:
    """Fail in a command; SIGTERM comes to a rank with an error of its own as soon as it waits."""
    own = f"custom.val_jsonl of rank {os.environ['RANK']} fails"
    errors = {"alike": too_short(), "own": DataSetError(own), "bug": ValueError(own)}
    if own in str(errors.get(scene)):
        torch_group._await_soon = lambda *_: os.kill(os.getpid(), signal.SIGTERM)

    def command() -> None:
        with open_rank_group({"use_cpu": True}) as group:
            group.wait_for_all()
            if scene == "builds":
                group.build_on_rank_zero(partial(build_in, "fails", lambda **_: None), timeout_s=60)
            raise errors[scene]

    return run_command(command, verbose=False, for_host=True)


@pytest.mark.parametrize(
    ("scene", "printed"),
    [("own", [f"--val_dataset of rank {rank} fails" for rank in range(2)]),
     ("bug", [f"custom.val_jsonl of rank {rank} fails" for rank in range(2)]),
     ("alike", [SHORT]), ("builds", [SHORT])],
)  # fmt: skip
def test_each_error_is_printed_once_and_before_its_rank_waits(server, tmp_path, scene, printed):
    """Also one that rank 0 passes on; nothing that ends a rank while it waits hides its error."""
    ranks = server.ranks(2, fail, scene, folder=tmp_path)
    [one.wait() for one in ranks]
    said = "".join(one.said for one in ranks)
    assert printed == re.findall(r"(?:error \(rank \d\)|ValueError): (?:rank 0 failed: )?([^;\n]*)", said)
