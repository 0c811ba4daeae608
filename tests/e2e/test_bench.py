"""The benchmark measures real packages, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.app.bench.__main__ import main
from packplan.app.bench.distributions import DISTRIBUTIONS, trace
from packplan.app.bench.measure import Measured, NotMeasured, measure
from packplan.app.bench.measuring import reading
from packplan.app.bench.peers import PEERS
from packplan.app.bench.process import OwnProcess
from packplan.app.bench.training.like_lengths import LikeLengths
from packplan.app.bench.training.ways import DEFAULT_WAYS, WAYS, Ratio, Row, compared, scaling_table, ways_table
from packplan.app.bench.turns import take_turns
from packplan.app.bench.work import ranks as bench_ranks
from packplan.app.bench.work.mixes import made_mix
from packplan.core.bounds import lower_bound
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.errors import DataSetError
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packs import Packs
from packplan.core.plan import build_raw_plan
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats
from tests.e2e import bench_small
from tests.processes import finished

ROOT = Path(__file__).parents[2]


def has_ended(pid: str) -> bool:
    """
    Whether a process that was killed is gone, or waits for whoever adopted it; a busy machine may
    take a moment.
    """
    status, deadline = Path(f"/proc/{pid}/status"), time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if "zombie" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_the_command_compares_all_planners_and_prints_one_document(server, tmp_path):
    """As a user runs it: every planner and installed peer has figures, the plot is written."""
    wanted = ["--samples", "900", "--distributions", "sft-2048", "--repeat", "1", "--json"]
    run = server.packplan("bench", "planner", *wanted, "--plot", tmp_path / "plot.svg")

    rows = json.loads(run.printed)["rows"]

    assert [(900, name) for name in [*ALGORITHMS, *PEERS]] == [(row["samples"], row["planner"]) for row in rows]
    for row in rows:
        assert row["problem"] is None
        assert row["packs"] >= row["lower_bound"] > 0
        assert row["gap"] == (row["packs"] - row["lower_bound"]) / row["lower_bound"]
        assert row["seconds"] > 0
    assert "</svg>" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
    lengths = DISTRIBUTIONS["sft-2048"].lengths(900, seed=0)
    packed = {row["planner"]: row["packs"] for row in rows}
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
        assert has_ended(pid)


@pytest.mark.slow
def test_what_a_process_prints_is_not_printed(capfd):
    """Neither stream of its libraries is this command's; what it answers comes."""

    def work(_):
        os.write(1, b"of a library")
        os.write(2, b"a warning of it")
        return {"answer": 3}

    process = OwnProcess(work)
    try:
        assert {"answer": 3} == process.next_message(60)
    finally:
        process.end()
    assert ("", "") == capfd.readouterr()


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacity"), [("chat", 2048), ("sft", 2048), ("detcap", 12288), ("detcap", 8192)])
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


def test_reading_is_timed_in_every_format(monkeypatch, capsys):
    """The same rows in each; ratios are to the first."""
    monkeypatch.setattr(reading, "SETTLED_NS", 0)

    assert 0 == main(["records", "--reading", "20", "--side", "4", "--json"])

    rows = json.loads(capsys.readouterr().out)
    assert reading.REFERENCE == rows[0]["format"]
    assert 1 == rows[0]["fetch_ratio"]
    assert {"gzip, base64", "Parquet", "Arrow"} < {row["format"] for row in rows}
    for row in rows:
        assert row["fetch_us"] / rows[0]["fetch_us"] == row["fetch_ratio"] > 0
        assert min(row["first_start_s"], row["later_start_s"]) > 0
    assert 2 == main(["records", "--reading", "0"])


def test_distributions_are_drawn_from_their_seed():
    """The same again, from 1 to the capacity; another seed, other lengths."""
    for distribution in DISTRIBUTIONS.values():
        lengths = distribution.lengths(500, seed=1)
        assert np.array_equal(lengths, distribution.lengths(500, seed=1))
        assert not np.array_equal(lengths, distribution.lengths(500, seed=2))
        assert 1 <= lengths.min() <= lengths.max() <= distribution.capacity


@pytest.mark.slow
def test_measuring_is_measured_on_made_data(server, tmp_path):
    """
    One document: every kind both ways; a photograph's header far cheaper than its pixels; memory
    and warm start bounded.
    """
    wanted = ["--workers", "1", "--samples", "10", "--text-rows", "96", "--json"]
    files = {"log": tmp_path / "log", "out": tmp_path / "out"}
    run = server.start(bench_small.lengths, *wanted, **files, env={"TMPDIR": tmp_path})
    assert 0 == run.wait(), run.said[-3000:]

    document = json.loads(run.printed)

    cases = [(kind, way, 1) for kind in ("text", "small image", "photograph") for way in ("headers", "full")]
    assert cases == [(row["kind"], row["way"], row["workers"]) for row in document["rows"]]
    cpu = {(row["kind"], row["way"]): row["cpu_ms"] for row in document["rows"]}
    assert document["photo_full_over_header_cpu_ratio"] == cpu["photograph", "full"] / cpu["photograph", "headers"] > 10
    assert 0 < document["rank_memory_bytes"] < 60e6
    assert 0 < document["warm_start_s"] < 60
    assert 1_000_000 == document["stored_samples"]
    text = document["text"]
    assert 64 == text["num_rows"]
    assert text["tokenizer_s"] / text["measured_s"] == text["ratio"] > 0.5
    assert text["full_s"] > text["measured_s"]


@pytest.mark.parametrize("wrong", [["--workers", "0"], ["--text-rows", "32"], ["--samples", "32"]])
def test_too_few_workers_and_rows_are_refused(wrong, capsys):
    """Status 2, before anything is measured."""
    assert 2 == main(["lengths", *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_memory_is_measured_over_enough_rows(capsys):
    """Of fewer, a tenth would be no run."""
    assert 2 == main(["records", "--rows", "639"])
    assert "--rows" in capsys.readouterr().err


@pytest.mark.slow
def test_training_is_measured_in_every_way(server):
    """
    The same samples in each way, round by round; packs of growing length; what our parts add is a
    ratio near 1.
    """
    document, scaling, overhead = (
        json.loads(server.packplan("bench", "train", "--samples", 5, "--json", *words.split()).printed)
        for words in ("--kinds images --packs 300 --repeat 2", "--kinds text --packs 300 600 --repeat 1 --scaling",
                      "--packs 300 --repeat 2 --overhead")
    )  # fmt: skip

    assert 1 == document["threads"]
    rows = {row["way"]: row for row in document["rows"]}
    assert list(DEFAULT_WAYS) == list(rows)
    packed, dense, padded, like, alone = rows.values()
    assert ["varlen", "sdpa", "varlen", "varlen", "varlen"] == [row["attention"] for row in rows.values()]
    assert 0 == packed["padding_share"] == alone["padding_share"] < like["padding_share"] < padded["padding_share"] < 1
    assert 1 == packed["batch_size"] == alone["batch_size"] < like["batch_size"] == padded["batch_size"]
    assert padded["num_steps"] == like["num_steps"] == alone["num_steps"]
    # What samples need is computed in packs and alone; a dense mask, and padding, compute more.
    assert packed["flops"] == alone["flops"] < min(dense["flops"], like["flops"]) < padded["flops"]
    assert packed["at_most"] == padded["flops"] / packed["flops"]
    for row in rows.values():
        assert 2 == len(row["speeds"])
        assert min(row["useful_tokens_per_s"], row["peak_mb"], row["encode_ms"]) > 0
    ratios = np.divide(packed["speeds"], padded["speeds"])
    assert {"median": np.median(ratios), "low": ratios.min(), "high": ratios.max()} == packed["over_padded"]
    assert [300, 600] == [row["budget"] for row in scaling["rows"]]
    short, long = scaling["rows"]
    assert short["flops"] == long["flops"]
    assert short["num_steps"] > long["num_steps"]
    assert short["over_reference"] is None
    assert long["over_reference"]["high"] == max(np.divide(long["speeds"], short["speeds"]))
    assert "varlen" == overhead["attention"]
    assert 2 == len(overhead["ratios"])
    assert 0.5 < overhead["ratio"] < 2


def test_a_model_is_asked_once_whether_it_may_pack(demo, monkeypatch, tmp_path):
    """
    Not by each way, kind and length of packs, which have folders of their own: each reads the
    answer there.
    """
    from packplan.app.bench.training import cost
    from packplan.app.wiring.stores import stored_verdict

    plain, asked = cost.verdict_of, []
    monkeypatch.setattr(cost, "verdict_of", lambda config: asked.append(config) or plain(config))
    model = ModelConfig(model=str(demo / "models" / "qwen2"), attn_impl="varlen")
    runs = [
        RunConfig(
            model=model, template=TemplateConfig(max_length=length), custom=CustomConfig(train_jsonl=("none.jsonl",)),
            training=TrainingConfig(output_dir=str(tmp_path / str(length)), trainer={"use_cpu": True}),
        )
        for length in (300, 600)
    ]  # fmt: skip
    for run in runs:
        cost._ask_once(run, tmp_path / "verdicts")

    assert runs[:1] == asked
    assert [plain(runs[0])] * 2 == [stored_verdict(run) for run in runs]


def test_workloads_take_turns(tmp_path):
    """
    Part by part in turn until each is done; memory is each one's own; the result is what it
    returned.
    """
    log, ticks = tmp_path / "log", []

    def workload(name, num_parts, num_bytes):
        def call(turns):
            for part in range(num_parts):
                turns.wait()
                with log.open("a") as file:
                    file.write(f"{name}{part} ")
            return int(np.ones(num_bytes, dtype=np.int8).sum(dtype=np.int64))

        return lambda: call

    workloads = {"a": workload("a", 3, 64_000_000), "b": workload("b", 1, 1)}
    turned = take_turns(workloads, limit_s=60, on_turn=lambda: ticks.append(1))

    assert "a0 b0 a1 a2 " == log.read_text()
    assert 4 == len(ticks)
    assert {"a": 64_000_000, "b": 1} == {name: one.result for name, one in turned.items()}
    assert 60e6 < turned["a"].peak_bytes < 100e6
    assert turned["b"].peak_bytes < 20e6


def test_a_workload_that_fails_is_named_and_the_others_end(tmp_path):
    """
    In its second turn, while another waits for one: an error by its name, and no process is left.
    """

    def waiting():
        (tmp_path / "pid").write_text(str(os.getpid()))
        return lambda turns: [turns.wait() for _ in range(9)]

    def failing(turns):
        turns.wait()
        turns.wait()
        return 1 / 0

    with pytest.raises(DataSetError, match="failing one cannot be measured: ZeroDivisionError"):
        take_turns({"waiting": waiting, "failing one": lambda: failing}, limit_s=60, on_turn=lambda: None)

    assert has_ended((tmp_path / "pid").read_text())


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 3))
def test_batches_of_like_length_pad_least(lengths, batch_size, epoch):
    """
    Each sample once, in as many batches; no order of batches of these sizes has less padding;
    another epoch, another order.
    """
    options = {"num_packs": len(lengths), "world_size": 1, "dataloader_drop_last": False,
     "gradient_accumulation_steps": 1,
               "num_train_epochs": 4, "batch_size": batch_size}  # fmt: skip
    schedule = LikeLengths(**options, lengths=np.array(lengths))

    batches = schedule.batches(epoch, rank=0)

    assert sorted(range(len(lengths))) == sorted(index for batch in batches for index in batch)
    assert [len(batch) for batch in EpochSchedule(**options).batches(epoch, rank=0)] == [
        len(batch) for batch in batches
    ]
    # Every batch but the first needs a longest sample, and none can do with less than this.
    longest_first = sorted(lengths, reverse=True)
    least = sum(longest_first[start] * len(longest_first[start : start + batch_size])
                for start in range(0, len(lengths), batch_size))  # fmt: skip
    assert least == sum(max(lengths[index] for index in batch) * len(batch) for batch in batches)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 5))
def test_pairs_are_counted_in_every_forward_pass(lengths, batch_size):
    """
    Whole rows count as a mask needs them, packed or padded; of each sample as far as its diagonal,
    packed or alone.
    """
    plan = build_raw_plan(lengths, packing_length=60, drop_last=False)
    options = {"world_size": 1, "dataloader_drop_last": False, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    packs = EpochSchedule(num_packs=len(plan.packs), **options)
    batches = EpochSchedule(num_packs=len(lengths), batch_size=batch_size, **options)
    array = np.array(lengths)
    packed = EpochStats.of(PackStats.of(plan, array), packs, 0)
    singles = attrs.evolve(plan, packs=Packs.from_lists([[index] for index in range(len(lengths))]))
    padded = EpochStats.of(PackStats.of(singles, array, packed=False), batches, 0)
    rows = [[lengths[index] for index in batch] for batch in batches.batches(0, rank=0)]

    causal = sum(sum(range(1, length + 1)) for length in lengths)
    assert causal == WAYS["packed"].pairs(packed, packs.num_steps(0))
    assert sum(sum(array[pack]) ** 2 for pack in plan.packs) == WAYS["packed-dense"].pairs(packed, packs.num_steps(0))
    assert sum(len(row) * max(row) ** 2 for row in rows) == WAYS["padded"].pairs(padded, batches.num_steps(0))
    if batch_size == 1:
        assert causal == WAYS["alone"].pairs(padded, batches.num_steps(0))


def test_rows_are_compared_round_by_round():
    """
    A machine that is twice as slow in one round changes no ratio; what is not there is not compared
    with.
    """
    row = Row(kind="text", budget=512, way="packed", attention="varlen", batch_size=1, num_steps=9, padding_share=0.0,
              flops=2e9, speeds=(30.0, 15.0, 30.0), peak_mb=46.0, encode_ms=0.3)  # fmt: skip
    padded = attrs.evolve(row, way="padded", batch_size=4, flops=3e9, speeds=(20.0, 10.0, 15.0))

    packed, other = compared([row, padded])

    assert (Ratio(1.5, 1.5, 2.0), 1.5) == (packed.over_padded, packed.at_most)
    assert (None, None, None) == (packed.over_sorted, packed.over_reference, other.over_padded)
    longer = compared([row, attrs.evolve(row, budget=4096, speeds=(15.0, 7.5, 15.0))])
    assert [None, Ratio(0.5, 0.5, 0.5)] == [one.over_reference for one in longer]
    for table in (ways_table([packed, other]), scaling_table(longer)):
        assert 1 == len({len(line) for line in table})


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
    """
    In a loop and fused, on the same row: near each other, the fused one keeps no copy of the
    logits.
    """
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
    """
    Packing computes less than dynamic batching, and that less than padding; balancing is even, and
    needs no more rows.
    """
    wanted = [
        "shard",
        "--sequences",
        "256",
        "--global-batch",
        "128",
        "--workers",
        "4",
        "--budget",
        "12000",
        "--batches",
        "3",
    ]

    assert 0 == main([*wanted, "--json"])

    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    balanced, dealt = rows["packed, balanced"], rows["packed, round robin"]
    assert balanced["computed_share"] < rows["dynamic"]["computed_share"] < rows["padded"]["computed_share"] == 1
    assert 1 <= balanced["work_imbalance"] < dealt["work_imbalance"]
    assert balanced["microbatches"] <= dealt["microbatches"]
    assert 1 <= balanced["excess"] < 1.02
    assert 0 == main(wanted)
    assert 6 == len(capsys.readouterr().out.splitlines())


def test_two_ranks_take_the_steps_of_both_orders(server, tmp_path, monkeypatch, capsys):
    """
    Each step twice, by both ranks, to the work that is predicted; the command prints what they
    took. The samples are drawn alike wherever they are drawn.
    """
    task = bench_ranks.Task(num_steps=1, num_rounds=1, seed=0)
    monkeypatch.setattr(bench_ranks, "PACKING_LENGTH", bench_small.PACKING_LENGTH)
    monkeypatch.setattr(bench_ranks, "SIZES", bench_small.SIZES)
    started = server.ranks(2, bench_small.rank, str(tmp_path), folder=tmp_path)
    mix = bench_ranks.drawn_mix(1, seed=0)
    plain, by_work = bench_ranks.orders(mix)
    assert sorted(plain.tolist()) == sorted(by_work.tolist()) == list(range(8))
    assert max(map(sum, (mix.lengths[members] for members in mix.packs))) <= bench_ranks.PACKING_LENGTH
    assert [0, 0] == finished(started)
    taken = np.array([json.loads((tmp_path / f"times{rank}.json").read_text()) for rank in range(2)])

    rounds = bench_ranks.steps_of(taken, mix, task)

    assert (2, 1, 1, 2, 2) == taken.shape
    assert taken.min() > 0
    ((step,),) = rounds
    sums = [mix.works[order].reshape(4, 2).sum(axis=0).max() for order in (plain, by_work)]
    assert sums[0] / sums[1] == pytest.approx(step.predicted)
    assert step.predicted > 1
    assert step.as_they_come_s == taken[:, 0, 0, 0, 0].max()
    monkeypatch.setattr(
        "packplan.app.bench.work.command.measured_rounds", lambda asked: rounds if asked == task else None
    )
    wanted = ["work", "--measured", "1", "--steps", "1"]
    assert 0 == main(wanted)
    assert ["seconds", "processor time of the busier rank"] == [
        line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]
    ]
    assert 0 == main([*wanted, "--json"])
    assert step.predicted == json.loads(capsys.readouterr().out)["predicted"]


def test_work_is_compared_with_other_ways_to_even_it(capsys):
    """Ours are below random steps and no worse than others; no pack is too full; all is told."""
    wanted = ["work", "--samples", "6000", "--ranks", "4,8", "--accumulation", "1,4", "--packing-lengths", "8192"]

    assert 0 == main([*wanted, "--json"])

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"vision", "chat"} == {row["data"] for row in rows}
    ways = {(row["data"], row["ranks"], row["accumulation"], row["way"]): row for row in rows}
    assert 2 * 2 * 2 * 9 == len(ways) == len(rows)
    for data in ("vision", "chat"):
        for ranks in (4, 8):
            one, four = (
                {way: row for (*group, way), row in ways.items() if group == [data, ranks, accumulation]}
                for accumulation in (1, 4)
            )
            assert one["ours: balanced"]["mean_step"] < one["random"]["mean_step"] == one["ours: by work"]["mean_step"]
            assert four["ours: by work"]["mean_step"] <= four["karmarkar-karp"]["mean_step"]
            assert four["karmarkar-karp"]["mean_step"] < four["random"]["mean_step"]
            assert one["ours: balanced"]["packs"] <= 1.005 * one["random"]["packs"]
            assert one["sampling and filtering"]["packs"] > one["ours: balanced"]["packs"]
            assert one["ours: balanced"]["saved"] > 0 == one["random"]["saved"]
            assert one["ours: grouped"]["mean_step"] < one["random"]["mean_step"]
            assert one["ours: grouped"]["step_spread"] > one["random"]["step_spread"] > 0
            assert one["ours: balanced, grouped"]["step_spread"] < one["ours: grouped"]["step_spread"]
            assert (one["ours: grouped"]["image_spread"] > 1.5 * one["random"]["image_spread"]) == (data == "vision")
    assert all(row["breaches"] == 0 and 1 <= row["mean_step"] <= row["worst_step"] for row in rows)
    assert all(0 <= row[ratio] < 1 for row in rows for ratio in ("pad_ratio", "vision_distance", "language_distance"))
    assert 0 == main(["work", "--samples", "2000", "--data", "chat", "--ranks", "2", "--accumulation", "1"])
    assert 2 + 9 == len(capsys.readouterr().out.splitlines())


def test_packs_of_one_sample_may_be_left_out_of_steps(capsys):
    """
    Long samples count, or not, or no pack of one does: each has its floor, for one pack of a rank.
    """
    wanted = ["work", "--samples", "2000", "--data", "vision", "--ranks", "4", "--packing-lengths", "4096",
              "--ways", "ours: balanced"]  # fmt: skip
    found = {}
    for aside in ("none", "long", "alone"):
        assert 0 == main([*wanted, "--accumulation", "1,2", "--aside", aside, "--json"])
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert ["random", "ours: balanced"] * 2 == [row["way"] for row in rows]
        found[aside] = {(row["way"], row["accumulation"]): row for row in rows}

    ours, random = ({aside: rows[way, 1] for aside, rows in found.items()} for way in ("ours: balanced", "random"))

    samples = made_mix(2000, seed=0)
    assert int((samples.tokens >= 4096).sum()) == ours["none"]["packs"] - ours["long"]["packs"] > 0
    assert ours["alone"]["packs"] < ours["long"]["packs"]
    assert ours["none"]["floor"] > ours["long"]["floor"] > ours["alone"]["floor"] >= 1
    assert ours["none"]["mean_step"] > ours["long"]["mean_step"] > ours["alone"]["mean_step"]
    assert random["alone"]["mean_step"] > 1.02 > ours["alone"]["mean_step"]
    assert all(0 == row["breaches"] for rows in found.values() for row in rows.values())
    assert all((row["floor"] is None) == (accumulation > 1) for (_, accumulation), row in found["long"].items())
    assert all((row["saved"] is None) == (aside == "alone") for aside, rows in found.items() for row in rows.values())
