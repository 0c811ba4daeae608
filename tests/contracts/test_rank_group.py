"""Ranks over torch.distributed: rank 0's results and failures reach all; no endless wait."""

import json
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.contracts import rank_group
from tests.network import LINK, Host, free_port, two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture
def play(server, tmp_path):
    """Return a function that plays a scene on two ranks, and gives what each said last."""

    def played(scene: str, **variables) -> list[dict]:
        ranks = server.ranks(2, rank_group.main, scene, str(tmp_path), folder=tmp_path, env=variables)
        ranks[1].wait()
        if scene == "slow":
            ranks[0].process.kill()
        ranks[0].wait()
        return said(tmp_path)

    return played


def said(folder: Path) -> list[dict]:
    """Return what each rank said last; nothing, if it did not come that far."""
    files = [folder / f"{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.fixture
def agent():
    """Keep a store as torchrun's agent does, outside of all ranks."""
    from torch.distributed import TCPStore

    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    del store


def test_arrays_values_and_flags_reach_every_rank(play):
    """Arrays have any integer type and shape, empty ones too, and larger than travels at once."""
    first, second = play("builds")

    assert {**first, "at": 0} == {**second, "at": 0}
    size = rank_group.CHUNK_BYTES // 4 + 3
    assert {
        "a": [[0, 1, 2, 3, 4, 5], 15, "int32", [2, 3]],
        "empty": [[], 0, "int64", [0]],
        "large": [list(range(9)), size * (size - 1) // 2, "int64", [size]],
    } == second["arrays"]
    assert ["from 0", "from 1"] == second["gathered"]
    assert [True, False] == second["any"]


def test_a_later_launch_on_the_same_store_takes_nothing_from_an_earlier_one(play, agent):
    """The first one's rank 0 failed, and said so under the keys that the second one uses."""
    play("fails", **agent)

    first, second = play("builds", **agent)
    assert ["from 0", "from 1"] == first["gathered"] == second["gathered"]
    own = [[[0.0] * 2, 0, "float32", [1, 2]], [[1.0] * 4, 4, "float32", [2, 2]]]
    gathered = [{"own": of_rank, "none": [[], 0, "float64", [0, 3]]} for of_rank in own]
    assert gathered == first["arrays_of_ranks"] == second["arrays_of_ranks"]


LOST = r"RunError: another rank is gone, so rank 0 cannot go on: [A-Z][^.\n]* \[[\d.]+\]:\d+[^.\n]*"
SHORT = "3 packs cannot feed 8 ranks; set training"


@pytest.mark.parametrize(
    ("scene", "by_agent", "rank", "says"),
    [
        ("fails", False, 1, f"RunError: rank 0 failed: {SHORT}.*"),
        ("killed", True, 1, "RunError: rank 0 is gone: its process died.*"),
        ("killed", False, 1, "RunError: rank 0 is gone.*"),
        ("slow", False, 1, r"RunError: rank 1 waited \d+ s for rank 0 .*packing_wait_timeout_s.*: 3 of 4 are measured"),
        *((scene, True, 0, LOST) for scene in ("lonely", "left", "backward")),
        ("compares", False, 1, "RunError: another rank is gone.*"),
        ("refuses", True, 0, f"RunError: rank 1 refuses the run: {SHORT}.*"),
        ("tells", True, 0, f"RunError: rank 1 failed: {SHORT}.*"),
    ],
)
def test_a_rank_that_ends_is_missed_within_seconds_with_its_reason(*, play, agent, scene, by_agent, rank, says):
    """In one sentence, whether its store goes with it or an agent keeps that."""
    ends = play(scene, **(agent if by_agent else {}))

    assert re.fullmatch(says, ends[rank]["error"], re.DOTALL)
    if scene in {"fails", "killed"}:
        assert ends[1]["at"] - ends[0]["at"] < 5
        assert scene == "killed" or ends[0]["error"].startswith("ArgumentError: 3 packs cannot feed 8 ranks")


def silent_on(host: Host, folder: str) -> None:
    """Play the scene of the node that falls silent, on a host."""
    host.enter()
    rank_group.main("silent", folder)


def test_a_node_that_falls_silent_is_given_up(server, tmp_path):
    """Its cable is cut: no packet says that anything ended. The limit is shortened here."""
    from packplan.adapters.ranks import torch_group

    with two_hosts() as hosts:
        port = free_port()
        ranks = [
            server.start(
                silent_on, host, str(tmp_path), log=tmp_path / f"rank{rank}.log",
                env={"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": hosts[0].address,
                     "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": LINK},
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        while not said(tmp_path)[0]:
            assert ranks[0].process.is_alive(), ranks[0].said
            time.sleep(0.05)
        hosts[0].cut()
        ranks[1].wait()
        ranks[0].process.kill()
        ranks[0].wait()

    first, second = said(tmp_path)
    assert second["error"].startswith("RunError: rank 0 has been silent for")
    assert second["at"] - first["at"] < 20
    assert torch_group.SILENT_S < 55
