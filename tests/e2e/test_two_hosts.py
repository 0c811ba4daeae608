"""Two hosts that share nothing but a cable: each with its own output folder, started by torchrun on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import rank_main
from tests.network import LINK, two_hosts

pytestmark = pytest.mark.slow


def test_two_hosts_train_from_one_plan_that_only_the_first_stores(write_run, tmp_path):
    """The plan travels; ranks agree on it and on their steps."""
    keys = {"max_steps": 2, "effective_batch_size": 2}
    runs = [write_run(name=f"host{rank}", training=keys) for rank in range(2)]
    torchrun = Path(sys.executable).with_name("torchrun")
    with two_hosts() as hosts:
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", host.name, torchrun, "--nnodes", "2", "--node-rank", str(rank),
                 "--master-addr", hosts[0].address, "--master-port", "29500", rank_main.__file__, runs[rank], tmp_path],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd()), "GLOO_SOCKET_IFNAME": LINK},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=240)[0] for process in started]
        finally:
            for process in started:
                process.kill()

    assert [0, 0] == [process.returncode for process in started], "\n".join(said)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["aligned"] == second["aligned"]
    assert 2 == first["steps"] == second["steps"]
    assert sorted(first["fetched"] + second["fetched"]) == sorted({*first["fetched"], *second["fetched"]})
    assert (tmp_path / "host0" / "static_packing" / "train" / "raw_plan.json").is_file()
    assert not (tmp_path / "host1" / "static_packing").exists()
