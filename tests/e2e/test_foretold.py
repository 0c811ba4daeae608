"""Training does as show foretells."""

import json

import pytest

from packplan.app.plan import __main__ as plan
from packplan.app.planning.schedule import split_schedule
from packplan.app.wiring.runs import read_config
from packplan.app.wiring.trainers import open_arguments
from packplan.core.align import align_plan
from packplan.core.plan import build_raw_plan

pytestmark = pytest.mark.slow


def test_training_does_what_show_foretold(write_run, execute, few_scenes, capfd):
    """Built without training, then trained."""
    keys = {"effective_batch_size": 4, "num_train_epochs": 2, "data_seed": 7, "save_strategy": "epoch"}
    few = {"custom": {"train_jsonl": str(few_scenes)}, "template": {"max_length": 500}}
    path = write_run(training=keys, **few)
    assert 0 == plan.main(["build", str(path), "--quiet"])
    capfd.readouterr()
    assert 0 == plan.main(["show", str(path), "--json"])
    shown = json.loads(capfd.readouterr().out)["splits"]["train"]

    result = execute(path)

    assert shown["schedule"]["total_steps"] == result.num_steps
    assert shown["checksums"]["raw_plan"] == result.planned["train"].raw_checksum
    assert shown["checksums"]["aligned_plan"] == result.planned["train"].checksum
    assert (7, True) == (result.schedule.seed, result.schedule.shuffle)
    logged = [entry for entry in result.history if "work" in entry][: shown["schedule"]["steps_per_epoch"]]
    works = [entry["work"] for entry in logged]
    assert shown["schedule"]["work_per_step"] == pytest.approx(sum(works) / len(works))
    plan_ = shown["plan"]
    assert plan_["planned_samples"] / plan_["num_samples"] == pytest.approx(logged[-1]["coverage"])


def test_the_schedule_is_ordered_as_the_trainers_arguments_say(write_run):
    """ms-swift's defaults are those that looking without it assumes."""
    aligned = align_plan(build_raw_plan([8] * 5, packing_length=8), world_size=1, dataloader_drop_last=False)
    for settings in ({}, {"data_seed": 7, "train_dataloader_shuffle": False}):
        config = read_config(write_run(training=settings))
        schedule = split_schedule(config, "train", aligned)
        arguments = open_arguments(config, world_size=1)

        assert (arguments.data_seed, arguments.train_dataloader_shuffle) == (schedule.seed, schedule.shuffle)
