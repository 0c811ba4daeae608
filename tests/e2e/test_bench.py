"""The benchmark measures real packages, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from app.bench.__main__ import main
from app.bench.distributions import DISTRIBUTIONS, trace
from app.bench.measure import Measured, NotMeasured, measure
from app.bench.peers import PEERS
from core.bounds import lower_bound
from core.packers import ALGORITHMS, pack

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_command_compares_all_planners_and_prints_one_document(server, tmp_path):
    """As a user runs it: every planner and installed peer has figures, the plot is written."""
    wanted = ["--samples", "300", "900", "--distributions", "sft-2048", "--repeat", "1", "--json"]
    run = server.packplan("bench", "planner", *wanted, "--plot", tmp_path / "plot.svg")

    rows = json.loads(run.printed)["rows"]

    assert [(n, name) for n in (300, 900) for name in [*ALGORITHMS, *PEERS]] == [
        (row["samples"], row["planner"]) for row in rows
    ]
    for row in rows:
        assert row["problem"] is None
        assert row["packs"] >= row["lower_bound"] > 0
        assert row["gap"] == (row["packs"] - row["lower_bound"]) / row["lower_bound"]
        assert row["seconds"] > 0
    assert "</svg>" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
    lengths = DISTRIBUTIONS["sft-2048"].lengths(900, seed=0)
    packed = {row["planner"]: row["packs"] for row in rows if row["samples"] == 900}
    assert packed["certified"] == len(pack(lengths, capacity=2048, algorithm="certified"))
    assert packed["binpacking"] == packed["constant_volume"]


@pytest.mark.slow
def test_the_table_has_a_line_for_each_planner(capsys):
    """Columns aligned, so that it can be pasted into a page."""
    planners = ["best_fit_decreasing", "concatenative"]

    assert 0 == main(["planner", "--samples", "200", "--distributions", "detcap-8192", "--planners", *planners])

    lines = capsys.readouterr().out.splitlines()
    assert 4 == len(lines)
    assert 1 == len({len(line) for line in lines})
    assert planners == [line.split("|")[3].strip() for line in lines[2:]]


@pytest.mark.parametrize(
    "wrong",
    [["--samples", "0"], ["--repeat", "0"], ["--limit-s", "0"], ["--seed", "-1"], ["--plot", "/none/of/it.svg"]],
)
def test_wrong_options_are_named(wrong, capsys):
    """Status 2, before anything is measured."""
    assert 2 == main(["planner", *wrong])
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_planner_over_the_limit_is_ended_with_what_it_started(tmp_path):
    """Its process and that process's child are gone; the reason is in its row."""

    def prepare():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        return lambda: time.sleep(600)

    outcome = measure(prepare, lambda _: None, repeat=1, limit_s=3)

    assert NotMeasured("over 3 s") == outcome
    for pid in (tmp_path / "pids").read_text().split():
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "zombie" in status.read_text()


@pytest.mark.slow
def test_a_call_is_measured_in_seconds_and_bytes():
    """An array of 64 MB is seen; what a call raises is its result."""
    outcome = measure(lambda: lambda: np.ones(8_000_000), lambda array: array.size, repeat=3, limit_s=60)

    assert isinstance(outcome, Measured)
    assert (3, 8_000_000) == (outcome.num_runs, outcome.result)
    assert 60e6 < outcome.peak_bytes < 100e6
    assert NotMeasured("ZeroDivisionError: division by zero") == measure(
        lambda: lambda: 1 / 0, str, repeat=1, limit_s=60
    )
    assert NotMeasured("its process died") == measure(lambda: lambda: os._exit(3), str, repeat=1, limit_s=60)


@pytest.mark.parametrize(("name", "capacity"), [("chat", 2048), ("sft", 2048), ("detcap", 12288), ("detcap", 8192)])
def test_certified_meets_the_bound_on_real_lengths(name, capacity):
    """Proven to be the fewest packs; no other algorithm has fewer, and modified first fit no more than first fit."""
    lengths = trace(name)
    lengths = lengths[lengths <= capacity]
    packs = {algorithm: len(pack(lengths, capacity=capacity, algorithm=algorithm)) for algorithm in ALGORITHMS}

    assert packs["certified"] == lower_bound(lengths, capacity=capacity, known=packs["certified"])
    assert packs["certified"] == min(packs.values())
    assert packs["modified_first_fit_decreasing"] <= packs["first_fit_decreasing"]


def test_distributions_are_drawn_from_their_seed():
    """The same again, from 1 to the capacity; another seed, other lengths."""
    for distribution in DISTRIBUTIONS.values():
        lengths = distribution.lengths(500, seed=1)
        assert np.array_equal(lengths, distribution.lengths(500, seed=1))
        assert not np.array_equal(lengths, distribution.lengths(500, seed=2))
        assert 1 <= lengths.min() <= lengths.max() <= distribution.capacity


@pytest.mark.slow
def test_measuring_is_measured_on_made_data(server, tmp_path):
    """One document: every kind both ways; a photograph's header far cheaper than its pixels; memory and warm start bounded."""
    run = server.packplan("bench", "lengths", "--workers", "1", "--samples", "48", "--json", env={"TMPDIR": tmp_path})

    document = json.loads(run.printed)

    cases = [(kind, way, 1) for kind in ("text", "small image", "photograph") for way in ("headers", "full")]
    assert cases == [(row["kind"], row["way"], row["workers"]) for row in document["rows"]]
    cpu = {(row["kind"], row["way"]): row["cpu_ms"] for row in document["rows"]}
    assert document["photo_full_over_header_cpu_ratio"] == cpu["photograph", "full"] / cpu["photograph", "headers"] > 10
    assert 0 < document["rank_memory_bytes"] < 60e6
    assert 0 < document["warm_start_s"] < 60
    assert 1_000_000 == document["stored_samples"]


@pytest.mark.parametrize("wrong", [["--workers", "0"], ["--samples", "32"]])
def test_too_few_workers_and_samples_are_refused(wrong, capsys):
    """Status 2, before anything is measured."""
    assert 2 == main(["lengths", *wrong])
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
def test_training_is_measured_packed_and_padded():
    """The same samples both ways; padding counted from the plan; what our parts add is a ratio near 1."""
    wanted = "train --packs 600 --samples 30 --repeat 2 --json"
    command = [sys.executable, "-m", "app.bench", *wanted.split()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": variables, "capture_output": True, "text": True, "timeout": 240}

    rows = json.loads(subprocess.run([*command, "--kinds", "images"], check=True, **options).stdout)["rows"]
    overhead = json.loads(subprocess.run([*command, "--overhead"], check=True, **options).stdout)

    assert [("images", "packed"), ("images", "padded")] == [(row["kind"], row["way"]) for row in rows]
    assert 0 == rows[0]["padding_share"] < rows[1]["padding_share"] < 1
    assert 1 == rows[0]["batch_size"] < rows[1]["batch_size"]
    for row in rows:
        assert min(row["useful_tokens_per_s"], row["step_s"], row["peak_bytes"], row["encode_ms"]) > 0
    assert 2 == len(overhead["ratios"])
    assert 0.5 < overhead["ratio"] < 2


def test_a_gpu_that_is_not_there_is_said(capsys):
    """Status 2."""
    import torch

    if not torch.cuda.is_available():
        assert 2 == main(["train", "--device", "cuda"])
        assert "sees no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_streams_are_measured(capsys):
    """Every distribution that is asked for; packs and drops as the carry buffer gives them."""
    wanted = ["chat-2048", "vlm-8192"]

    assert 0 == main(["stream", "--samples", "3000", "--distributions", *wanted, "--repeat", "1", "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert wanted == [row["distribution"] for row in rows]
    for row in rows:
        lengths = DISTRIBUTIONS[row["distribution"]].lengths(3000, seed=0)
        best = len(pack(lengths, capacity=DISTRIBUTIONS[row["distribution"]].capacity, algorithm="best_fit_decreasing"))
        assert row["gap"] == row["packs"] / best - 1
        assert min(row["samples_per_s"], row["argsorts"]) > 0
    assert 0 == main(["stream", "--samples", "500", "--distributions", "zipf-8192", "--repeat", "1"])
    assert 3 == len(capsys.readouterr().out.splitlines())


def test_losses_are_measured_both_ways(capsys):
    """In a loop and fused, on the same row: near each other, the fused one keeps no copy of the logits."""
    wanted = ["loss", "--vocabulary", "64", "96", "--sequences", "5", "--length", "7", "--repeat", "2"]

    assert 0 == main([*wanted, "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(64, 5, 7), (96, 5, 7)] == [(row["vocabulary"], row["num_sequences"], row["length"]) for row in rows]
    for row in rows:
        assert min(row["loop_ms"], row["fused_ms"], row["ratio"]) > 0
        assert max(row["loss_difference"], row["gradient_difference"]) < 1e-5
        assert 0 < row["fused_kept_bytes"] < row["loop_kept_bytes"]
    assert 0 == main(wanted)
    lines = capsys.readouterr().out.splitlines()
    assert 4 == len(lines)
    assert 1 == len(set(map(len, lines)))


def test_sharding_is_measured_in_every_mode(capsys):
    """Packing computes less than dynamic batching, and that less than padding; balancing is even, and needs no more rows."""
    wanted = ["shard", "--sequences", "256", "--chunk", "128", "--workers", "4", "--budget", "12000", "--batches", "3"]

    assert 0 == main([*wanted, "--json"])

    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    balanced, dealt = rows["packed, balanced"], rows["packed, round robin"]
    assert balanced["computed_share"] < rows["dynamic"]["computed_share"] < rows["padded"]["computed_share"] == 1
    assert 1 <= balanced["work_imbalance"] < dealt["work_imbalance"]
    assert balanced["microbatches"] <= dealt["microbatches"]
    assert 1 <= balanced["excess"] < 1.02
    assert 0 == main(wanted)
    assert 6 == len(capsys.readouterr().out.splitlines())
