"""Assigning the packs of a step by work changes who computes a pack, and nothing that is learnt."""

from __future__ import annotations

import pytest
import torch

from tests.e2e import rank_main, sharded_order_main
from tests.nearness import apart
from tests.processes import finished

pytestmark = pytest.mark.slow

FLOAT32 = 1e-5


def test_balanced_steps_give_the_loss_and_the_gradients_of_the_plain_order(start_ranks, write_run, tmp_path):
    """
    Two ranks, four packs of each a step, dropout 0: every step to rounding, while ranks hold other
    packs.
    """
    keys = {"effective_batch_size": 8, "learning_rate": 0.0, "packing_max_dropped_share": 1, "max_grad_norm": 0,
            "max_steps": 2, "output_dir": str(tmp_path / "run")}  # fmt: skip
    found = {}
    for balance in ("none", "auto", "microbatch"):
        out = tmp_path / f"out-{balance}"
        path = write_run("qwen2", training={**keys, "packing_balance": balance})
        assert [0, 0] == finished(start_ranks(2, path, out, "gradients"))
        found[balance] = rank_main.seen(out, 2), torch.load(out / "gradients0.pt")

    plain, plain_gradients = found.pop("none")
    steps = [entry for entry in plain[0]["history"] if "loss" in entry]
    for balance, (ranks, gradients) in found.items():
        assert [rank["fetched"] for rank in plain] != [rank["fetched"] for rank in ranks]
        balanced = [entry for entry in ranks[0]["history"] if "loss" in entry]
        assert [entry["loss"] for entry in steps] == pytest.approx([entry["loss"] for entry in balanced], rel=FLOAT32)
        assert len(plain_gradients) == len(gradients) == len(steps) > 1
        for expected, actual in zip(plain_gradients, gradients, strict=True):
            assert apart(actual, expected) < FLOAT32
        figure = "work_imbalance" if balance == "auto" else "microbatch_imbalance"
        assert sum(entry[figure] for entry in balanced) < sum(entry[figure] for entry in steps)
        assert [entry["work"] for entry in steps] == pytest.approx([entry["work"] for entry in balanced])


def test_packs_of_equal_work_are_trained_as_planned(start_ranks, write_run, tmp_path):
    """Two ranks train every balanced pack once; a second run takes the stored plan."""
    keys = {"packing_algorithm": "balanced", "effective_batch_size": 4, "packing_max_dropped_share": 1}
    path = write_run("qwen3", training=keys)
    for number in range(2):
        out = tmp_path / f"out{number}"
        assert [0, 0] == finished(start_ranks(2, path, out))
        ranks = rank_main.seen(out, 2)
        trained = sorted(pack for rank in ranks for pack in rank["fetched"])
        assert sorted([*range(ranks[0]["num_raw"]), *ranks[0]["repeated"]]) == trained
        plans = {rank["raw"] for rank in ranks}
        assert 1 == len(plans)
    assert plans == {rank["raw"] for rank in rank_main.seen(tmp_path / "out0", 2)}


def test_sharded_ranks_have_the_gradients_of_the_plain_order(server, write_run, execute, tmp_path):
    """
    Real FSDP over gloo, which meets in every microbatch: a step of six packs gives the same
    gradients when its microbatches are of like work, and ranks wait less.
    """
    path = str(write_run(training={"max_steps": 1, "packing_max_dropped_share": 1}, template={"max_length": 400}))
    execute(path)  # the ranks find the plan

    assert [0, 0] == finished(server.ranks(2, sharded_order_main.main, path, str(tmp_path), folder=tmp_path))

    for rank in range(2):
        (plain, waited, expected), (by_work, waits, gradients) = torch.load(tmp_path / f"found{rank}.pt")
        assert plain != by_work
        assert waits < waited
        assert all(gradient.norm() > 0 for name, gradient in expected.items() if name.endswith("proj.weight"))
        assert apart(gradients, expected) < FLOAT32
