"""Commands that foretell a run's time, over stored plans and calibrations that are made up."""

import json
import math
from functools import partial

import attrs
import cattrs
import numpy as np
import pytest

from packplan.app.plan import __main__ as command
from packplan.app.wiring import forecasts
from packplan.app.wiring.forecasts import told_error, told_forecast
from packplan.app.wiring.runs import read_config
from packplan.core.forecast import Calibration, MeasuredStep, Pause, RunForecast, StepTime, Timing
from tests.stored import store_run

CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip

TIME = StepTime(2.0, 0.5, 0.0, 1e-6, 0.0)
"""Attention alone decides, unlike in FLOPs."""


@pytest.fixture
def store(tmp_path):
    """Return a function that stores a run whose model has sizes, and whose attention is named."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return partial(store_run, tmp_path, model={"model": str(tmp_path), "attn_impl": "sdpa"})


@pytest.fixture
def said(capfd):
    """Return a function that runs a command, and returns its status and what it printed."""

    def run(*arguments):
        status = command.main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return run


def calibrate(path, *overrides, world_size=2, **others):
    """Store a calibration of `TIME` for a run, perhaps of another machine or way to train."""
    config = read_config(path, overrides)
    steps = [MeasuredStep(1 + n % 3, 1e6 * (n % 4), 1e5 * (n % 5), 1e4 * (n % 7), 1.0) for n in range(20)]
    calibration = Calibration("a made machine", tuple(attrs.evolve(one, seconds=one.predicted(TIME)) for one in steps))
    key = forecasts.calibration_key(config, world_size=world_size, attention="sdpa")
    forecasts.open_calibrations(config).save(
        attrs.evolve(key, inputs=key.inputs | others), cattrs.unstructure(calibration)
    )
    return path


def test_a_calibration_that_fits_is_used_and_its_error_is_said(store, said):
    """Each step of an epoch is told."""
    path = calibrate(store(training={"effective_batch_size": 4, "num_train_epochs": 2}))

    status, out, err = said("time", path, "--json", "--world-size", "2")
    told = json.loads(out)

    assert (0, "") == (status, err)
    assert "20 steps measured on a made machine" == told["basis"]
    assert told["uncertainty"] == pytest.approx(0, abs=1e-4)
    assert told["epoch_seconds"] == pytest.approx(sum(told["steps_of_epoch"]))
    assert 2 * told["epoch_seconds"] == pytest.approx(told["seconds"])  # it saves after 500 steps alone
    assert min(told["steps_of_epoch"]) > TIME.step + 2 * TIME.pack
    table = said("time", path, "--world-size", "2")[1]
    assert all(words in table for words in ("20 steps measured on a made machine", "an optimizer step"))


@pytest.mark.parametrize(
    ("name", "other"),
    [("machine", "elsewhere"), ("model.torch_dtype", "float16"), ("attention", "eager"), ("ranks", 4)],
)
def test_a_calibration_of_something_else_is_not_used_and_that_is_said(store, said, name, other):
    """The reason names both; nothing is guessed."""
    path = calibrate(store(), **{name: other})

    _, out, err = said("time", path, "--world-size", "2")

    assert f"a stored calibration is not used: {name}" in err
    assert str(other) in err
    assert out.startswith("no step was measured on 2 ranks: --calibrate")
    assert "null" == said("time", path, "--world-size", "2", "--json")[1].strip()


def test_evaluations_and_checkpoints_are_counted(store, said):
    """After each of their steps, and the last; unmeasured evaluations take a third of training."""
    trainer = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 0.5}
    path = store(eval_lengths=[40, 50, 60], training={"num_train_epochs": 1, "effective_batch_size": 4, **trainer})
    calibrate(path)
    _, out, _ = said("time", path, "--json")
    told = json.loads(out)

    assert (4, math.ceil(told["steps"] / 2)) == (told["evaluation_every"], told["checkpoint_every"])
    assert told["evaluation_seconds"] > 0
    assert told["seconds"] == pytest.approx(
        told["epoch_seconds"] + math.ceil(told["steps"] / 4) * told["evaluation_seconds"]
    )
    assert "an evaluation" in said("time", path)[1]
    for strategy, every in (("no", 0), ("epoch", told["steps"]), ("best", 4)):
        other = json.loads(said("time", path, "--json", f"training.save_strategy={strategy}")[1])
        assert every == other["checkpoint_every"]


def test_ranks_that_meet_in_each_microbatch_wait_in_each(store, said):
    """Sharded ones, whatever their packs are assigned by."""
    path = store(training={"effective_batch_size": 8, "packing_balance": "none"})

    def seconds(*words):
        calibrate(path, *words)
        return json.loads(said("time", path, "--json", "--world-size", "2", *words)[1])["epoch_seconds"]

    assert seconds() < seconds("training.fsdp=full_shard")


def test_a_damaged_calibration_is_named_with_what_to_do(store, said):
    path = calibrate(store())
    (file,) = forecasts.open_calibrations(read_config(path))._folder.glob("*.json")
    file.write_text(file.read_text().replace("1000000.0", "1000001.0"))

    status, _, err = said("time", path, "--world-size", "2")

    assert 3 == status
    assert "delete it, and measure again" in err


def test_a_calibration_is_of_the_ranks_that_are_there(store, said):
    assert 2 == said("time", store(), "--calibrate", "--world-size", "2")[0]


def test_what_is_told_of_a_run_has_its_numbers():
    """Before it and after it; a run that was ended early is compared up to there."""
    timing = Timing(TIME, "3 steps measured on a", others=(TIME,) * 2)
    forecast = RunForecast(
        timing=timing, steps=np.full(4, 1800.0), others=np.array([7000.0, 7400.0]), first=0, last=8, tokens=100,
        evaluation=Pause(0, 0), checkpoint=Pause(100.0, 8),
    )  # fmt: skip

    assert all(number in told_forecast(forecast, 2) for number in ("4.03 h", "8 optimizer", "2 ranks", "5.6%"))
    assert all(number in told_error(forecast, 8, 14400) for number in ("4.00 h", "4.03 h", "0.7% too long"))
    assert all(number in told_error(forecast, 4, 9000) for number in ("2.50 h", "2.00 h", "20.0% too short"))
