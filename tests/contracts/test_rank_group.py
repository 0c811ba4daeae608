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
    own = [[[[0.0, 0.0]], "float32"], [[[1.0, 1.0]] * 2, "float32"]]
    assert [{"own": of_rank, "none": [[], "float64"]} for of_rank in own] == first["arrays_of_ranks"]
    assert first["arrays_of_ranks"] == second["arrays_of_ranks"]


def test_rank_zeros_failure_is_told_in_its_own_words_within_seconds(play):
    """The same sentence on both, with the key that helps on those that print no other."""
    first, second = play("fails")

    assert first["error"].startswith("ArgumentError: 3 packs cannot feed 8 ranks")
    assert second["error"].startswith("RunError: rank 0 failed: 3 packs cannot feed 8 ranks; set training.")
    assert abs(second["at"] - first["at"]) < 5


@pytest.mark.parametrize("hosted", ["by the agent", "by rank 0"])
def test_a_rank_zero_that_is_killed_is_noticed_within_seconds(play, agent, hosted):
    """Whether its store goes with it or not; no deadline is waited for."""
    first, second = play("killed", **(agent if hosted == "by the agent" else {}))

    assert first["building"]
    assert second["error"].startswith("RunError: rank 0 is gone")
    assert ("its process died" in second["error"]) == (hosted == "by the agent")
    assert second["at"] - first["at"] < 5


def test_waiting_has_one_deadline(play):
    """Then the key that moves it is named, and what rank 0 was doing."""
    _, second = play("slow")

    assert re.search(r"rank 1 waited \d+ s for rank 0", second["error"])
    assert "training.packing_wait_timeout_s" in second["error"]
    assert "last heard: 3 of 4 are measured" in second["error"]


@pytest.mark.parametrize("scene", ["lonely", "left", "backward"])
def test_a_rank_that_is_killed_is_missed(play, agent, scene):
    """Rank 0 says so in one sentence, without the library's own traceback."""
    first, _ = play(scene, **agent)

    said = r"RunError: another rank is gone, so rank 0 cannot go on: [A-Z][^.\n]* \[[\d.]+\]:\d+[^.\n]*"
    assert re.fullmatch(said, first["error"])


def test_a_rank_zero_that_is_killed_is_missed_by_who_compares(play):
    """Its store is gone with it."""
    _, second = play("compares")

    assert second["error"].startswith("RunError: another rank is gone")


@pytest.mark.parametrize(("scene", "says"), [("refuses", "rank 1 refuses the run"), ("tells", "rank 1 failed")])
def test_a_rank_that_ends_tells_the_others_why(play, agent, scene, says):
    """Before they have met, and those that wait for it afterwards, where no launcher ends them."""
    first, _ = play(scene, **agent)

    assert first["error"].startswith(f"RunError: {says}: 3 packs cannot feed 8 ranks; set training.")


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
