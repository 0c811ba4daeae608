"""
Two hosts that share nothing but a cable: each with its own output folder, and a rank in the
environment that torchrun gives.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e import rank_main
from tests.network import LINK, Host, two_hosts
from tests.processes import finished

pytestmark = pytest.mark.slow


def rank_on(host: Host, *arguments: str) -> int:
    """Run a rank on a host."""
    host.enter()
    return rank_main.main(*arguments)


def test_two_hosts_train_from_one_plan_that_only_the_first_stores(server, write_run, tmp_path):
    """The plan travels; ranks agree on it and on their steps."""
    keys = {"max_steps": 2, "effective_batch_size": 2}
    runs = [write_run("qwen2", name=f"host{rank}", training=keys) for rank in range(2)]
    with two_hosts() as hosts:
        ranks = [
            server.start(
                rank_on, host, str(runs[rank]), str(tmp_path), log=tmp_path / f"rank{rank}.log",
                env={"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1,
                     "MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": LINK},
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        assert [0, 0] == finished(ranks)

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["aligned"] == second["aligned"]
    assert 2 == first["steps"] == second["steps"]
    assert sorted(first["fetched"] + second["fetched"]) == sorted({*first["fetched"], *second["fetched"]})
    assert (tmp_path / "host0" / "static_packing" / "train" / "raw_plan.json").is_file()
    assert not (tmp_path / "host1" / "static_packing").exists()
