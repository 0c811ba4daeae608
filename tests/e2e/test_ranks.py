"""
Several ranks: one plan, the same number of steps, every aligned pack once an epoch, and no hang
when one fails.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from packplan.adapters.ranks.torch_group import OneRank
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.split import plan_split
from packplan.app.wiring import stores
from packplan.app.wiring.gather import gather
from tests.e2e import rank_main
from tests.network import free_port
from tests.processes import DEADLINE_S, finished

pytestmark = pytest.mark.slow


def check_run(ranks: list[dict], *, epochs: int, accumulation: int) -> None:
    """Hold what a group of ranks did against its plan."""
    world_size, (first, *_) = len(ranks), ranks
    per_rank = first["num_aligned"] // world_size
    assert 1 == len({(r["raw"], r["aligned"], r["num_aligned"], r["steps"], r["planned_steps"]) for r in ranks})
    assert first["steps"] == first["planned_steps"] == epochs * math.ceil(per_rank / accumulation)
    orders = []
    for epoch in range(epochs):
        parts = [r["fetched"][epoch * per_rank : (epoch + 1) * per_rank] for r in ranks]
        kept = range(min(first["num_aligned"], first["num_raw"]))
        assert sorted([*kept, *first["repeated"]]) == sorted(chain.from_iterable(parts))
        orders.append(parts)
    assert epochs == 1 or orders[0] != orders[1]
    assert all(epochs * per_rank == len(r["fetched"]) for r in ranks)
    losses = [[entry["loss"] for entry in r["history"] if "loss" in entry] for r in ranks]
    assert all(loss == pytest.approx(losses[0]) for loss in losses)


KEYS = {"num_train_epochs": 2, "effective_batch_size": 4, "packing_max_dropped_share": 1}


def test_three_ranks_consume_every_aligned_pack_once_an_epoch(start_ranks, write_run, few_scenes, demo, tmp_path):
    """
    With a ragged window, padding, evaluation, and packs without images beside packs with some; one
    rank plans alike.
    """
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(demo / "data" / "val.jsonl")}
    keys = {**KEYS, "effective_batch_size": 6, "eval_strategy": "epoch", "gradient_checkpointing": True}
    overlay = {"custom": custom, "training": keys, "template": {"max_length": 300}}
    path = write_run("qwen3_vl", name="three", **overlay)
    assert [0, 0, 0] == finished(start_ranks(3, path, tmp_path / "out"))
    ranks = rank_main.seen(tmp_path / "out", 3)

    check_run(ranks, epochs=2, accumulation=2)
    assert ranks[0]["num_aligned"] > ranks[0]["num_raw"]
    assert ranks[0]["num_aligned"] // 3 % 2, "no ragged window to try"
    config = stores.read_config(write_run("qwen3_vl", name="one", **overlay))
    one = plan_split(gather(config).splits["train"], group=OneRank(), deadline=Deadline(0))
    assert any(one.table[pack, 2].sum() == 0 for pack in one.raw.packs), "no pack without images to try"
    assert one.raw_checksum == ranks[0]["raw"]


def test_the_loss_of_a_step_and_of_an_evaluation_do_not_depend_on_the_ranks(
    start_ranks, write_run, execute, text_jsonl, tmp_path
):
    """
    One step over the same four packs, whoever holds which; then an evaluation whose repeated packs
    weigh nothing.
    """
    keys = {"learning_rate": 0.0, "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "effective_batch_size": 4,
            "train_dataloader_shuffle": False, "packing_max_dropped_share": 1}  # fmt: skip
    overlay = {"custom": {"val_jsonl": str(text_jsonl)}, "training": keys, "template": {"max_length": 100}}
    result = execute(write_run("qwen2", name="alone", **overlay))
    assert 1 == len(result.planned["eval"].raw.packs) % 2, "repeats would be even, and weigh nothing in a mean anyway"
    alone = logged(result.history)
    for world_size in (2, 4):
        out = tmp_path / f"out{world_size}"
        path = write_run("qwen2", name=f"ranks{world_size}", **overlay)
        assert [0] * world_size == finished(start_ranks(world_size, path, out))

        assert alone == pytest.approx(logged(rank_main.seen(out, world_size)[0]["history"]), rel=1e-5)


def logged(history: list[dict]) -> list[float]:
    """Return the first loss of training and of evaluation."""
    return [next(entry[key] for entry in history if key in entry) for key in ("loss", "eval_loss")]


def test_ranks_leave_out_the_same_records_at_every_start(start_ranks, write_run, text_jsonl, tmp_path):
    """
    Of training and evaluation: packs and losses are those of files without them, at the first start
    (rank 0 finds them) and at a later one, which measures nothing.
    """
    lines = text_jsonl.read_text().splitlines()
    good_indices = [1, 2, 3, *range(6, len(lines) + 3)]
    bad = ['{"messages": []}', "{", '{"text": "a", "images": ["none.png"]}', "3"]
    for split, good in {"train": lines, "val": lines[:9]}.items():
        mixed = [bad[0], *good[:3], bad[1], bad[2], *good[3:], bad[3]]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(mixed) + "\n")
        (tmp_path / f"{split}-good.jsonl").write_text("\n".join(good) + "\n")
    keys = {**KEYS, "eval_strategy": "epoch", "num_train_epochs": 1}
    skips = {"on_bad_record": "skip", "max_bad_share": "0.5"}
    seen = {}
    for number, (of, more) in enumerate({"": skips, " again": skips, "-good": {}}.items()):
        suffix, name = of.replace(" again", ""), "good" if of == "-good" else "skipping"
        custom = {key: str(tmp_path / f"{split}{suffix}.jsonl") for split, key in SPLITS.items()}
        path = write_run("qwen2", name=name, custom={**custom, **more}, training=keys)
        out = tmp_path / f"out{number}"
        assert [0, 0] == finished(start_ranks(2, path, out))
        seen[of] = rank_main.seen(out, 2)
        check_run(seen[of], epochs=1, accumulation=2)
        logs = [(out / f"rank{rank}.log").read_text() for rank in range(2)]
        assert (of == " again") == ("train: the lengths of all 30 samples are stored" in logs[0])
        assert ("train: 4 of 34 records cannot become samples and are left out" in logs[0]) == bool(more)

    for of, ranks in seen.items():
        for found, expected in zip(ranks, seen["-good"], strict=True):
            indices = range(len(lines)) if of == "-good" else good_indices
            assert [[indices[sample] for sample in pack] for pack in expected["raw_packs"]] == found["raw_packs"], of
            assert expected["fetched"] == found["fetched"]
            assert measured(expected["history"]) == measured(found["history"])


SPLITS = {"train": "train_jsonl", "val": "val_jsonl"}


def measured(history: list[dict]) -> list[float]:
    """Return all losses, of training and of evaluation."""
    return [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]


def test_torchrun_starts_two_ranks(write_run, tmp_path):
    """The launcher that users use, each rank an interpreter of its own; dropping the remainder."""
    path = write_run("qwen2", training={**KEYS, "dataloader_drop_last": True})
    launcher = Path(sys.executable).with_name("torchrun")
    run = subprocess.run(
        [launcher, "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
         rank_main.__file__, path, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert 0 == run.returncode, run.stderr[-4000:]
    ranks = rank_main.seen(tmp_path, 2)
    check_run(ranks, epochs=2, accumulation=2)
    assert ranks[0]["num_aligned"] == ranks[0]["num_raw"] // 2 * 2
    assert "packplan: optimizer steps:" in run.stderr


def test_a_failure_of_rank_zero_reaches_the_others_with_its_reason(start_ranks, write_run, tmp_path):
    """
    A fault of ours keeps its traceback on rank 0; the other rank ends within seconds, saying what
    rank 0 said.
    """
    out = tmp_path / "out"
    statuses = finished(start_ranks(2, write_run("qwen2"), out, "measure"))

    assert [1, 2] == statuses
    assert "Traceback" in (out / "rank0.log").read_text()
    waiting = (out / "rank1.log").read_text()
    assert "rank 0 failed: ZeroDivisionError: planted" in waiting
    assert "Traceback" not in waiting


def test_a_folder_that_rank_zero_cannot_write_is_told_to_all(server, write_run, tmp_path):
    """The user's fault on every rank, with the key."""
    out = tmp_path / "out"
    path = write_run("qwen2", training={"output_dir": "/dev/null/run"})
    statuses = finished(server.ranks(2, rank_main.main, str(path), str(out), folder=out))

    assert [2, 2] == statuses
    for rank in range(2):
        said = (out / f"rank{rank}.log").read_text()
        assert "/dev/null/run/static_packing/train cannot be written" in said
        assert "choose a training.output_dir" in said


def test_more_ranks_than_packs_may_not_drop(start_ranks, write_run, tmp_path):
    """An error on every rank, before training, with both numbers."""
    out = tmp_path / "out"
    path = write_run(
        "qwen2", template={"max_length": 16384}, training={"dataloader_drop_last": True, "packing_drop_last": False}
    )
    statuses = finished(start_ranks(2, path, out))

    assert [2, 2] == statuses
    for rank in range(2):
        assert "1 pack cannot feed 2 ranks" in (out / f"rank{rank}.log").read_text()


def test_sigterm_to_one_rank_ends_all_at_the_same_step(start_ranks, write_run, tmp_path):
    """They agree, save one checkpoint, and exit with 0."""
    out = tmp_path / "out"
    path = write_run("qwen2", training={"num_train_epochs": 500, "effective_batch_size": 2})
    ranks = start_ranks(2, path, out)
    ranks[0].wait_until("'loss'")
    os.kill(ranks[1].pid, signal.SIGTERM)

    assert [0, 0] == finished(ranks)
    first, second = rank_main.seen(out, 2)
    assert first["terminated"]
    assert second["terminated"]
    assert first["steps"] == second["steps"] < first["planned_steps"]
    assert (tmp_path / "run" / f"checkpoint-{first['steps']}" / "model.safetensors").is_file()


def test_one_rank_alone_needs_no_group():
    """The contract of a group, on one rank."""
    group = OneRank()

    assert {"a": 1} == group.from_rank_zero(lambda report: report("") or {"a": 1}, timeout_s=0)
    assert ("x",) == group.gather("x")
    assert group.any(True)  # noqa: FBT003
    assert not group.any(False)  # noqa: FBT003
