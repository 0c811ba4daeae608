"""Several ranks: one plan, equal steps, every aligned pack once an epoch, and no hang."""

import math
import os
import signal
from itertools import chain

import pytest

from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer.checkpoints import find_checkpoint
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_splits
from packplan.app.planning.plan import Ranks, measure_and_plan
from tests.e2e import rank_main
from tests.e2e.ready import logged_losses
from tests.network import free_port
from tests.processes import finished

pytestmark = pytest.mark.slow


def test_three_ranks_consume_every_aligned_pack_once_an_epoch(start_ranks, write_run, few_scenes, demo, tmp_path):
    """With a ragged window, padding, evaluation and packs without images; one rank plans alike."""
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(demo / "data" / "val.jsonl")}
    keys = {"num_train_epochs": 2, "effective_batch_size": 6, "packing_max_dropped_share": 1, "eval_strategy": "epoch",
            "gradient_checkpointing": True}  # fmt: skip
    overlay = {"custom": custom, "training": keys, "template": {"max_length": 300}}
    path = write_run("qwen3_vl", name="three", **overlay)
    assert [0, 0, 0] == finished(start_ranks(3, path, tmp_path / "out"))
    ranks = rank_main.seen(tmp_path / "out", 3)

    first, per_rank = ranks[0], ranks[0]["num_aligned"] // 3
    assert 1 == len({(r["raw"], r["aligned"], r["num_aligned"], r["steps"], r["planned_steps"]) for r in ranks})
    assert first["steps"] == first["planned_steps"] == 2 * math.ceil(per_rank / 2)
    assert per_rank % 2, "no ragged window to try"
    orders = [[r["fetched"][start : start + per_rank] for r in ranks] for start in (0, per_rank)]
    assert first["num_aligned"] > first["num_raw"]
    every = sorted([*range(first["num_raw"]), *first["repeated"]])
    assert [every, every] == [sorted(chain.from_iterable(parts)) for parts in orders]
    assert orders[0] != orders[1]
    assert [2 * per_rank] * 3 == [len(r["fetched"]) for r in ranks]
    losses = [logged_losses(rank["history"], "eval_loss") for rank in ranks]
    assert [pytest.approx(losses[0])] * 3 == losses
    one = measure_and_plan(
        open_splits(read_config(write_run("qwen3_vl", name="one", **overlay)))["train"], Ranks(OneRank(), timeout_s=0)
    )
    assert any(one.table[pack, 2].sum() == 0 for pack in one.raw.packs), "no pack without images to try"
    assert one.raw_checksum == first["raw"]


def test_sigterm_to_the_processes_of_one_rank_ends_all_ranks_at_the_same_step(start_ranks, write_run, tmp_path):
    """They agree, save one checkpoint, for which workers go on to load data, and exit with 143."""
    keys = {"num_train_epochs": 500, "effective_batch_size": 2, "dataloader_num_workers": 1}
    ranks = start_ranks(2, write_run("qwen2", training=keys), tmp_path)
    ranks[0].wait_until("  loss ")
    os.killpg(ranks[1].pid, signal.SIGTERM)

    assert [143, 143] == finished(ranks)
    first, second = rank_main.seen(tmp_path, 2)
    assert (True, True) == (first["terminated"], second["terminated"])
    assert first["steps"] == second["steps"] < first["planned_steps"]
    assert f"SIGTERM: a checkpoint is saved at step {first['steps']} of " in ranks[0].said
    assert "are assigned to ranks for equal work in each step" in " ".join(ranks[0].said.split())
    assert (tmp_path / "run" / f"checkpoint-{first['steps']}" / "model.safetensors").is_file()


def test_two_hosts_train_from_one_plan_that_only_the_first_stores(server, write_run, tmp_path):
    """Hosts share no folder: the plan travels; each has a whole checkpoint, and ranks agree."""
    port, saves = free_port(), {"save_strategy": "steps", "save_steps": 2, "save_on_each_node": True}
    keys = {"max_steps": 2, "effective_batch_size": 2, **saves}
    runs = [write_run("qwen2", name=f"host{rank}", training=keys) for rank in range(2)]
    ranks = [
        server.start(
            rank_main.main, str(path), str(tmp_path), log=tmp_path / f"rank{rank}.log",
            env={"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank, path in enumerate(runs)
    ]  # fmt: skip

    assert [0, 0] == finished(ranks)
    first, second = rank_main.seen(tmp_path, 2)
    assert first["aligned"] == second["aligned"]
    assert 2 == first["steps"] == second["steps"]
    assert sorted(first["fetched"] + second["fetched"]) == sorted({*first["fetched"], *second["fetched"]})
    assert (tmp_path / "host0" / "static_packing" / "train" / "raw_plan.json").is_file()
    assert not (tmp_path / "host1" / "static_packing").exists()
    for host in ("host0", "host1"):
        saved = find_checkpoint(str(tmp_path / host / "checkpoint-2"), "", group=OneRank())
        assert 2 == saved.resume_state.progress.step
