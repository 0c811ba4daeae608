"""`plan time` trains and times steps of a run by its own trainer, and leaves nothing behind."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from packplan.adapters.forecast.calibration import StepClock
from packplan.app.plan import __main__ as plan
from tests.e2e.ready import IN_CI
from tests.made.pictures import showing
from tests.processes import _packplan, finished
from tests.records import write_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def uneven(tmp_path):
    """Write records of many lengths, and return their file."""
    records = [showing(answer="blue " * (1 + n * n % 61)) for n in range(40)]
    return str(write_lines(tmp_path / "uneven.jsonl", records))


def test_steps_evaluations_and_checkpoints_are_timed_and_counted(write_run, uneven, capfd, monkeypatch):
    """After each of their steps, and the last; what was trained is thrown away."""
    keys = {"effective_batch_size": 2, "save_strategy": "steps", "save_steps": 0.5, "eval_strategy": "epoch"}
    path = write_run("qwen2", training=keys, custom={"train_jsonl": uneven, "val_jsonl": uneven})
    monkeypatch.setattr("packplan.app.opening.forecasts.REPEATS", 1)

    (earlier := path.parent / "run" / "checkpoint-2").mkdir(parents=True)

    assert 0 == plan.main(["time", str(path), "--json", "--quiet"])
    printed = capfd.readouterr()
    told = json.loads(printed.out)
    earlier.rmdir()

    assert "overwrites" not in printed.err
    epoch, total = len(told["steps_of_epoch"]), told["steps"]
    assert told["epoch_seconds"] == pytest.approx(sum(told["steps_of_epoch"]))
    assert (epoch, math.ceil(total / 2)) == (told["evaluation_every"], told["checkpoint_every"])
    assert told["measured_steps"] > 0 < told["checkpoint_seconds"]
    assert "cpu" == told["device"]
    pauses = total / epoch * told["evaluation_seconds"] + 2 * told["checkpoint_seconds"]
    assert told["seconds"] == pytest.approx(total / epoch * told["epoch_seconds"] + pauses)
    kept = {file.name for file in (path.parent / "run").iterdir()}
    assert not [name for name in kept if name.startswith(("checkpoint", "calibrating"))]


@pytest.mark.parametrize(("workers", "first"), [(0, 7.0), (2, 4.0)])
def test_a_first_step_is_timed_without_the_start_of_its_loaders(workers, first):
    """Where processes load, which start with the epoch; evaluation and checkpoint count apart."""
    trainer = SimpleNamespace(wait_seconds=5.0, args=SimpleNamespace(dataloader_num_workers=workers))
    clock = StepClock(trainer, iter([100.0, 107.0, 109.0, 112.0, 116.0]).__next__)

    clock.on_epoch_begin()
    for waited in (3, 1):
        trainer.wait_seconds += waited
        clock.on_step_end()
    clock.on_evaluate()
    clock.on_save()

    assert ([first, 2.0], 3.0, 4.0) == (clock.step_s, clock.evaluation_s, clock.checkpoint_s)


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=IN_CI)])
def test_two_ranks_measure_together(shares, write_run, server, uneven, tmp_path):
    """Rank 0 prints; also where both share the long packs."""
    keys = {"effective_batch_size": 2, "packing_drop_last": False}
    path = write_run("qwen2", training=keys, custom={"train_jsonl": uneven})
    words = ("plan", "time", str(path), "training.save_strategy=steps", "training.save_steps=2", "--quiet")
    words += ("training.sequence_parallel_size=auto", "template.max_length=100") * shares

    assert [0, 0] == finished(server.ranks(2, _packplan, *words, folder=tmp_path / "measured"))

    printed = [(tmp_path / "measured" / f"rank{rank}.log").read_text() for rank in range(2)]
    assert ["predicted time" in text for text in printed] == [True, False]
    assert "on 2 ranks (cpu), from" in printed[0]
    assert re.search("a checkpoint .*after every 2 steps", printed[0])
