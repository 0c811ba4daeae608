"""Benchmarks measure what they name, and print it as a table or as one document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.child import Child, NotMeasuredError, measure
from benchmarks.distributions import DISTRIBUTIONS, made_mix, trace
from benchmarks.peers import PEERS
from benchmarks.train import WAYS, operations
from packplan.core.bounds import lower_bound
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.schedule import EpochSchedule
from packplan.core.work import WorkModel
from tests.e2e import bench_small
from tests.processes import lives, wait_for


@pytest.fixture
def document(server, tmp_path):
    """Return a function that runs a benchmark in a process of its own, and returns its document."""

    def run(*words: str) -> dict:
        files = {"log": tmp_path / "log", "out": tmp_path / "out"}
        done = server.start(bench_small.run, *words, "--json", **files, env={"TMPDIR": tmp_path})
        assert 0 == done.wait(), done.said[-3000:]
        return json.loads(done.printed)

    return run


@pytest.mark.slow
def test_all_planners_are_compared(document):
    """Every planner and installed peer has figures."""
    rows = document("planner", "--samples", "900", "--distributions", "sft-2048", "--repeat", "1")["rows"]

    assert [(900, name) for name in [*ALGORITHMS, *PEERS]] == [(row["samples"], row["planner"]) for row in rows]
    for row in rows:
        assert row["problem"] is None
        assert row["packs"] >= row["lower_bound"] > 0
        assert row["gap"] == (row["packs"] - row["lower_bound"]) / row["lower_bound"]
        assert row["seconds"] > 0
    lengths = DISTRIBUTIONS["sft-2048"].lengths(900, seed=0)
    packed = {row["planner"]: row["packs"] for row in rows}
    assert packed["certified"] == len(pack(lengths, capacity=2048, algorithm="certified"))
    assert packed["binpacking"] == packed["constant_volume"]


@pytest.mark.slow
def test_draws_are_compared_with_the_algorithms_own_packs(document):
    """Every algorithm that can be drawn has figures, within its limit of packs."""
    rows = document("redraw", "--samples", "2000", "--distributions", "chat-4096", "--repeat", "1")["rows"]

    assert [name for name, one in ALGORITHMS.items() if not one.keeps_order] == [row["planner"] for row in rows]
    for row in rows:
        assert row["problem"] is None
        assert row["more_packs"] <= 0.005
        assert row["own_seconds"] > 0 < row["times_own"]
        assert 0 <= row["again_share"] < 1


@pytest.mark.parametrize(
    "wrong", [["planner", "--samples", "0"], ["planner", "--seed", "-1"], ["train", "--width", "100"]]
)
def test_wrong_options_are_named(wrong, capsys):
    """Status 2, before anything is measured."""
    with pytest.raises(SystemExit) as ended:
        main(wrong)

    assert 2 == ended.value.code
    assert wrong[1] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [["--parts", "kinds", "--samples", "32"], ["--parts", "chats", "--rows", "32"]])
def test_too_few_samples_are_refused(wrong, capsys):
    """Those that warm up are not measured."""
    assert 2 == main(["lengths", *wrong])
    assert f"{wrong[2]} is 32, but" in capsys.readouterr().err


@pytest.mark.slow
def test_a_call_over_the_limit_is_ended_with_what_it_started(tmp_path):
    """Its process and that process's child are gone."""

    def prepare():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        return lambda: time.sleep(600)

    with pytest.raises(NotMeasuredError, match=r"^over 2 s$"):
        measure(prepare, lambda _: None, repeat=1, limit_s=2)

    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(lives, pids)), "a process is left")


@pytest.mark.slow
def test_children_compute_their_values_in_turn(tmp_path):
    """One value each time that one is asked; all end, also where one fails."""
    log = tmp_path / "log"

    def values(name):
        (tmp_path / name).write_text(str(os.getpid()))
        for number in range(2):
            with log.open("a") as file:
                file.write(f"{name}{number} ")
            yield number
        yield 1 / 0

    def in_turn():
        with Child(lambda: values("a")) as first, Child(lambda: values("b")) as second:
            for number in range(3):
                assert [number, number] == [one.next(60) for one in (first, second)]

    with pytest.raises(NotMeasuredError, match="ZeroDivisionError: division by zero"):
        in_turn()

    assert "a0 b0 a1 b1 " == log.read_text()
    pids = [int((tmp_path / name).read_text()) for name in "ab"]
    wait_for(lambda: not any(map(lives, pids)), "a child is left")


@pytest.mark.slow
def test_a_call_is_measured_in_seconds_and_bytes(capfd):
    """An array of 64 MB is seen, and nothing that the call prints; a process that dies is named."""

    def made():
        os.write(1, b"of a library")
        os.write(2, b"a warning of it")
        return np.ones(8_000_000)

    cost = measure(lambda: made, lambda array: array.size, repeat=3, limit_s=60)

    assert (3, 8_000_000) == (cost.num_runs, cost.result)
    assert 60e6 < cost.peak_bytes < 100e6
    assert 0 < cost.seconds
    assert ("", "") == capfd.readouterr()
    with pytest.raises(NotMeasuredError, match="its process died"):
        measure(lambda: lambda: os._exit(3), str, repeat=1, limit_s=60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacity"), [("chat", 2048), ("detcap", 8192)])
def test_certified_meets_the_bound_on_real_lengths(name, capacity):
    """
    Proven to be the fewest packs; no other algorithm has fewer, and modified first fit no more than
    first fit. The balanced, which would look for the fewest again, are beside them elsewhere.
    """
    lengths = trace(name)
    lengths = lengths[lengths <= capacity]
    packs = {
        algorithm: len(pack(lengths, capacity=capacity, algorithm=algorithm))
        for algorithm in ALGORITHMS
        if algorithm != "balanced"
    }

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
def test_lengths_are_measured_on_made_data(document):
    """Every kind both ways; a photograph's header is far cheaper than its pixels."""
    wanted = ["--parts", "kinds", "chats", "--workers", "1", "--samples", "10", "--rows", "48"]
    rows = document("lengths", *wanted)["rows"]

    kinds = [(kind, way, 1) for kind in ("text", "small image", "photograph") for way in ("headers", "full encode")]
    assert kinds == [(row["sample"], row["way"], row["workers"]) for row in rows[:6]]
    cpu = {(row["sample"], row["way"]): row["cpu_ms"] for row in rows}
    assert cpu["photograph", "full encode"] > 10 * cpu["photograph", "headers"]
    texts, tokenizer, library, encode = (row["cpu_ms"] for row in rows if row["sample"] == "chat")
    assert texts < 2 * tokenizer
    assert library < tokenizer
    assert texts < encode


@pytest.mark.slow
def test_lengths_are_measured_beside_other_tools(document):
    """On the same samples; images by their headers are far cheaper than their pixels."""
    found = document("lengths", "--parts", "beside", "--samples", "12", "--workers", "2")

    ours, swift, trl = "packplan measure", "ms-swift, AddLengthPreprocessor", "TRL, apply_chat_template"
    kinds = ("image of 640x480", "four images of 640x480", "video")
    pairs = [("chat", ours), ("chat", swift), ("chat", trl), *((kind, way) for kind in kinds for way in (ours, swift))]
    assert pairs == [(row["sample"], row["way"]) for row in found["rows"]]
    cpu = {(row["sample"], row["way"]): row["cpu_ms"] for row in found["rows"]}
    assert cpu["four images of 640x480", swift] > 3 * cpu["four images of 640x480", ours]


@pytest.mark.slow
def test_lengths_are_measured_over_numbers_of_records(document):
    """The command itself, on files that are in the page cache and that are not."""
    found = document("lengths", "--parts", "slope", "--records", "8", "16", "--widths", "80", "--rounds", "1")

    runs = [f"{number} x image of 80x60, {cache} cache" for cache in ("warm", "cold") for number in (8, 16)]
    assert runs == [row["sample"] for row in found["rows"]]
    assert all(row["workers"] == 2 and row["cpu_ms"] > 0 for row in found["rows"])


def test_a_line_through_costs_says_its_error():
    """None where they lie on it; else one that holds the true slope."""
    from benchmarks import slope

    exact = [slope.Spent(number, 0.0, 1 + number / 4, 0.0, 0, 0) for number in (10, 20, 40, 80)]
    moved = [attrs.evolve(run, cpu_s=run.cpu_s + shift) for run, shift in zip(exact, (1, -1, -1, 1), strict=True)]

    line, wider = (slope.Line.through(runs, lambda run: run.cpu_s) for runs in (exact, moved))

    assert (0.25, 1.0, 0.0) == pytest.approx(attrs.astuple(line), abs=1e-9)
    assert 0 < abs(wider.slope - 0.25) < wider.error


@pytest.mark.slow
def test_training_is_measured_in_every_way(document):
    """The same samples in each way, round by round, at each packing length."""
    ways = ["packed", "padded", "padded-sorted"]
    sizes = ["--width", "128", "--layers", "1", "--samples", "5", "--rounds", "2", "--kinds", "images"]
    rows = document("train", *sizes, "--packs", "300", "--ways", *ways)["rows"]

    assert ways == [row["way"] for row in rows]
    packed, padded, like = rows
    assert {"varlen"} == {row["attention"] for row in rows}
    assert 0 == packed["padding_share"] < like["padding_share"] < padded["padding_share"] < 1
    assert 1 == packed["batch_size"] < like["batch_size"] == padded["batch_size"]
    assert padded["num_steps"] == like["num_steps"]
    assert packed["flops"] < like["flops"] < padded["flops"]
    for row in rows:
        assert 2 == len(row["seconds"])
        assert min(*row["seconds"], row["peak_bytes"], row["tokens_per_sample"]) > 0
    for name, other in (("over_padded", padded), ("over_sorted", like)):
        ratios = np.divide(other["seconds"], packed["seconds"])
        found = {"median": np.median(ratios), "low": ratios.min(), "high": ratios.max()}
        assert {**found, "allowed": other["flops"] / packed["flops"]} == packed[name]
    assert padded["over_padded"] is like["over_sorted"] is None


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 3))
def test_batches_of_like_length_pad_least(lengths, batch_size, epoch):
    """
    Each sample once, in as many batches; no order of batches of these sizes has less padding;
    another epoch, another order.
    """
    from benchmarks.training import SortedSchedule

    options = {
        "num_packs": len(lengths),
        "world_size": 1,
        "dataloader_drop_last": False,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 4,
        "batch_size": batch_size,
    }

    batches = SortedSchedule(**options, lengths=np.array(lengths)).batches(epoch, rank=0)

    assert sorted(range(len(lengths))) == sorted(index for batch in batches for index in batch)
    assert [*map(len, EpochSchedule(**options).batches(epoch, rank=0))] == [*map(len, batches)]
    # Every batch but the first needs a longest sample, and none can do with less than this.
    longest_first = sorted(lengths, reverse=True)
    groups = [longest_first[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    least = sum(group[0] * len(group) for group in groups)
    assert least == sum(max(lengths[index] for index in batch) * len(batch) for batch in batches)


@given(st.lists(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1))
def test_operations_are_those_of_every_forward_pass(batches):
    """Dense masks take whole rows; packs take each token with those before it in its sample."""
    work = WorkModel(per_position=7, per_pair=3)
    widths = [max(map(sum, batch)) for batch in batches]
    positions = sum(len(batch) * width for batch, width in zip(batches, widths, strict=True))
    useful = sum(tokens for batch in batches for row in batch for tokens in row)
    squares = sum(len(batch) * width**2 for batch, width in zip(batches, widths, strict=True))
    causal = sum(sum(range(1, tokens + 1)) for batch in batches for row in batch for tokens in row)

    assert (7 * positions + 3 * squares + 5, 1 - useful / positions) == operations(WAYS["padded"], batches, work, 5.0)
    assert (7 * positions + 3 * causal) == operations(WAYS["packed"], batches, work, 0.0)[0]


def test_a_gpu_that_is_not_there_is_named(document):
    """Before anything is trained."""
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="sees no GPU"):
            document("train", "--device", "cuda")


RL = ["rl", "--sequences=256", "--global-batch=128", "--workers=4", "--budget=12000", "--batches=3"]


@pytest.mark.parametrize(
    ("wanted", "num_rows"),
    [
        (["planner", "--samples", "200", "--distributions", "detcap-8192", "--planners", "best_fit_decreasing"], 1),
        (RL, 4),
        (["work", "--samples", "2000", "--data", "chat", "--ranks", "2", "--accumulation", "1"], 7),
    ],
)
def test_a_table_is_aligned_and_names_the_machine(capsys, wanted, num_rows):
    """A line for each row, below those of the head."""
    assert 0 == main(wanted)

    *table, _, machine = capsys.readouterr().out.splitlines()
    assert 2 + num_rows == len(table)
    assert 1 == len({len(line) for line in table})
    assert f"cores {os.cpu_count()}; " in machine
    assert f"numpy {np.__version__}" in machine


def test_sharding_is_measured_in_every_mode(capsys):
    """
    Packing computes less than dynamic batching, and that less than padding; balancing is even, and
    needs no more rows.
    """
    assert 0 == main([*RL, "--json"])

    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    balanced, dealt = rows["packed, balanced"], rows["packed, round robin"]
    assert balanced["computed_share"] < rows["dynamic"]["computed_share"] < rows["padded"]["computed_share"] == 1
    assert 1 <= balanced["work_imbalance"] < dealt["work_imbalance"]
    assert balanced["microbatches"] <= dealt["microbatches"]


def test_work_is_compared_with_other_ways_to_even_it(capsys):
    """Assigned, grouped and balanced packs are more even than random ones, at the known costs."""
    wanted = ["work", "--samples", "6000", "--ranks", "4,8", "--accumulation", "1,4", "--packing-lengths", "8192"]

    assert 0 == main([*wanted, "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    cases = {(row["data"], row["ranks"], row["accumulation"]): {} for row in rows}
    for row in rows:
        cases[row["data"], row["ranks"], row["accumulation"]][row["way"]] = row
        assert 1 <= row["mean_step"] <= row["worst_step"]
    assert [7] * 8 == [*map(len, cases.values())]
    for (data, _, accumulation), one in cases.items():
        if accumulation == 4:
            assert one["by work"]["mean_step"] < one["random"]["mean_step"]
            continue
        assert one["balanced"]["mean_step"] < one["random"]["mean_step"] == one["by work"]["mean_step"]
        assert one["balanced"]["packs"] <= 1.005 * one["random"]["packs"]
        assert one["balanced"]["saved"] > 0 == one["random"]["saved"]
        assert one["grouped"]["mean_step"] < one["random"]["mean_step"]
        assert one["grouped"]["step_spread"] > one["random"]["step_spread"] > 0
        assert one["balanced, grouped"]["step_spread"] < one["grouped"]["step_spread"]
        assert (one["grouped"]["image_spread"] > 1.5 * one["random"]["image_spread"]) == (data == "vision")


def test_packs_of_one_sample_may_be_left_out_of_steps(capsys):
    """
    Long samples count, or not, or no pack of one does: each has its floor, for one pack of a rank.
    """
    wanted = ["work", "--samples", "2000", "--data", "vision", "--ranks", "4", "--packing-lengths", "4096",
              "--ways", "balanced"]  # fmt: skip
    found = {}
    for aside in ("none", "long", "alone"):
        assert 0 == main([*wanted, "--accumulation", "1,2", "--aside", aside, "--json"])
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert ["random", "balanced"] * 2 == [row["way"] for row in rows]
        found[aside] = {(row["way"], row["accumulation"]): row for row in rows}

    ours, random = ({aside: rows[way, 1] for aside, rows in found.items()} for way in ("balanced", "random"))

    samples = made_mix(2000, seed=0)
    assert int((samples.tokens >= 4096).sum()) == ours["none"]["packs"] - ours["long"]["packs"] > 0
    assert ours["alone"]["packs"] < ours["long"]["packs"]
    assert ours["none"]["floor"] > ours["long"]["floor"] > ours["alone"]["floor"] >= 1
    assert ours["none"]["mean_step"] > ours["long"]["mean_step"] > ours["alone"]["mean_step"]
    assert random["alone"]["mean_step"] > 1.02 > ours["alone"]["mean_step"]
    assert all((row["floor"] is None) == (accumulation > 1) for (_, accumulation), row in found["long"].items())
    assert all((row["saved"] is None) == (aside == "alone") for aside, rows in found.items() for row in rows.values())
