"""Ranks over torch.distributed: what rank 0 builds reaches all, and so does its failure; nobody waits for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contracts import rank_group

pytestmark = pytest.mark.slow


@pytest.fixture
def play(tmp_path):
    """Return a function that plays a scene with two ranks, and gives what each said, and the seconds rank 1 took."""
    processes = []

    def played(scene: str) -> tuple[list[dict | None], float]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(2):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": 2,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, rank_group.__file__, scene, tmp_path],
                    env={**os.environ, "PYTHONPATH": str(Path.cwd()), **{k: str(v) for k, v in variables.items()}},
                    stdin=subprocess.PIPE,
                )
            )
        started = time.monotonic()
        processes[1].wait(90)
        took = time.monotonic() - started
        processes[0].stdin.close()
        processes[0].wait(90)
        files = [tmp_path / f"{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files], took

    yield played
    for process in processes:
        process.kill()
        process.wait()


def test_arrays_values_and_flags_reach_every_rank(play):
    """Of any integer type and shape, empty ones too."""
    said, _ = play("builds")

    assert said[0] == said[1]
    assert {"a": [[[0, 1, 2], [3, 4, 5]], "int32", [2, 3]], "empty": [[], "int64", [0]]} == said[1]["arrays"]
    assert ["from 0", "from 1"] == said[1]["gathered"]
    assert [True, False] == said[1]["any"]


def test_rank_zeros_failure_is_told_in_its_own_words(play):
    """The same sentence on both."""
    said, _ = play("fails")

    assert said[0]["error"].startswith("PlanTooShortError: 3 packs cannot feed 8 ranks")
    assert said[1]["error"].startswith("RankZeroError: rank 0 failed: 3 packs cannot feed 8 ranks")


def test_a_rank_zero_that_dies_is_noticed(play):
    """Its process is gone without a word; the other rank does not wait for its deadline."""
    said, took = play("dies")

    assert said[1]["error"].startswith("RankZeroError: rank 0 is gone")
    assert took < 45


def test_waiting_has_one_deadline(play):
    """After which the key that moves it is named."""
    said, _ = play("slow")

    assert "training.packing_wait_timeout_s" in said[1]["error"]
