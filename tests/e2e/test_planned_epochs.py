"""Epochs with plans of their own: known before the first step, trained as they were counted."""

import copy
import gc
import json
import logging
import re
import shutil
import weakref
from collections import Counter
from pathlib import Path

import attrs
import pytest
import yaml

from packplan.adapters.ranks.torch_group import OneRank
from packplan.app.opening.policies import epoch_recipe, policy_of_split
from packplan.app.opening.runs import read_config
from packplan.app.opening.stores import open_stores
from packplan.app.plan.__main__ import main as plan_main
from packplan.app.plan.stored import open_lengths, open_split
from packplan.app.planning.epochs import EpochPlanner, PlannedEpochs, lengths_of_records
from packplan.app.planning.schedule import partial_window_line
from packplan.core.errors import ArgumentError, ConfigError, MismatchError, NotBuiltError, StaleError
from packplan.core.schedule import PackStats
from tests.e2e import rank_main
from tests.e2e.ready import train
from tests.processes import finished
from tests.records import chat, write_lines

pytestmark = pytest.mark.slow

SIZES = {"chat": (40, 5), "code": (25, 12), "long": (12, 30)}
"""Source -> its records, and the longest of them in words."""

CURRICULUM = {
    "curriculum": [
        {"by": "tokens", "tokens_per_epoch": 1500, "sources": [
            {"jsonl": "chat", "ratio": 3}, {"jsonl": "code", "ratio": 1},
        ]},
        {"by": "tokens", "tokens_per_epoch": 1500, "sources": [
            {"jsonl": "chat", "ratio": 1, "replacement": True}, {"jsonl": "code", "ratio": 1},
            {"jsonl": "long", "ratio": 2, "replacement": True},
        ]},
    ]
}  # fmt: skip

KEYS = {"num_train_epochs": 3, "effective_batch_size": 2, "packing_drop_last": False, "lr_scheduler_type": "constant"}


@pytest.fixture
def write_mix(tmp_path, write_run):
    """Return a function that writes three sources, a mix of them and its run, which it returns."""
    for name, (count, most) in SIZES.items():
        answers = [{"role": "assistant", "content": "blue " * (1 + n * 7 % most)} for n in range(count)]
        asked = [chat({"role": "user", "content": f"say {n}"}, answer) for n, answer in enumerate(answers)]
        write_lines(tmp_path / f"{name}.jsonl", asked)

    def write(mix: dict = CURRICULUM, name: str = "run", custom: dict | None = None, **keys) -> Path:
        path = tmp_path / f"{name}-mix.yaml"
        path.write_text(re.sub(r"(jsonl: )(\w+)", rf"\1{tmp_path}/\2.jsonl", yaml.safe_dump(mix)))
        planned = {"fusion_config": str(path), "fusion_schedule": "planned", "train_jsonl": None}
        return write_run(
            "qwen2", name=name, template={"max_length": 160}, custom={**planned, **(custom or {})},
            training={**KEYS, **keys},
        )  # fmt: skip

    return write


def trained_samples(seen: list[dict], start: int, stop: int) -> Counter:
    """Return the samples of some batches of each rank."""
    return Counter(sample for one in seen for pack in one["samples"][start:stop] for sample in pack)


def planner_of(path: Path) -> EpochPlanner:
    """Return the planner of a run whose plans are built."""
    config = read_config(path)
    lengths, policy = open_lengths(open_stores(config, "train")), policy_of_split(config, "train")
    samples = lengths_of_records(policy, lengths.rows.table, lengths.origin.files)
    return EpochPlanner(policy, epoch_recipe(config, "train"), samples)


def test_a_curriculum_on_two_ranks_goes_on_with_three(write_mix, start_ranks, tmp_path):
    """Each step trains the planned packs; on other ranks, what is left of the epoch once."""
    path = write_mix(name="two", save_strategy="steps", save_steps=1, effective_batch_size=4)
    assert [0, 0] == finished(start_ranks(2, path, tmp_path / "out"))
    two = rank_main.seen(tmp_path / "out", 2)
    records, steps = two[0]["epochs"], two[0]["steps"]
    manifest = json.loads((tmp_path / "two" / "static_packing" / "train" / "schedule_ws2.json").read_text())
    epochs = manifest["epochs"]

    assert [one | {"steps": due["steps"]} for one, due in zip(records, epochs, strict=True)] == epochs
    assert sum(one["steps"] for one in epochs) == manifest["total_steps"] == steps
    assert two[0]["planned_steps"] == steps == two[1]["steps"]
    planner, first = planner_of(path), 0
    for one in epochs:  # two batches a step
        packs, last = planner.plan(one["epoch"]).raw.packs, first + 2 * one["steps"]
        trained, planned, first = trained_samples(two, first, last), Counter(packs.indices.tolist()), last
        assert not planned - trained
        assert (trained - planned).total() <= packs.sizes().max()

    stop = epochs[0]["steps"] + 1
    shutil.copytree(tmp_path / "two" / "static_packing", tmp_path / "three" / "static_packing")
    again = write_mix(
        name="three", effective_batch_size=3, resume_from_checkpoint=str(tmp_path / "two" / f"checkpoint-{stop}")
    )
    assert [0, 0, 0] == finished(start_ranks(3, again, tmp_path / "more"))
    three = rank_main.seen(tmp_path / "more", 3)
    packs = planner.plan(1).raw.packs
    num_batches = -(-(len(packs) - 4) // 3)
    visits = trained_samples(two, 2 * epochs[0]["steps"], 2 * stop) + trained_samples(three, 0, num_batches)
    assert not Counter(packs.indices.tolist()) - visits
    assert (visits - Counter(packs.indices.tolist())).total() <= 2 * packs.sizes().max()
    assert (
        three[0]["planned_steps"] == three[0]["steps"] == stop + num_batches + -(-len(planner.plan(2).raw.packs) // 3)
    )


def test_a_resumed_run_is_the_one_that_was_not_stopped(write_mix, execute, tmp_path):
    """From the middle of a later epoch; another mix is refused, and more epochs are none."""
    whole = execute(write_mix(name="whole", save_strategy="steps", save_steps=1, dataloader_num_workers=1))
    stop = whole.schedule.num_epoch_steps(0) + 2
    checkpoint = str(tmp_path / "whole" / f"checkpoint-{stop}")
    shutil.copytree(tmp_path / "whole" / "static_packing", tmp_path / "again" / "static_packing")

    resumed = execute(write_mix(name="again", resume_from_checkpoint=checkpoint, num_train_epochs=4))

    losses = [[entry["loss"] for entry in run.history if "loss" in entry] for run in (whole, resumed)]
    assert losses[0] == losses[1][: len(losses[0])]
    assert whole.schedule.total_steps + resumed.schedule.num_epoch_steps(3) == resumed.num_steps
    assert not hasattr(whole.planned["train"], "raw")
    mix = copy.deepcopy(CURRICULUM)
    mix["curriculum"][1]["sources"][0]["ratio"] = 2
    for keys, named in (({"mix": mix}, "mix"), ({"packing_epochs": "replanned"}, "replanned")):
        with pytest.raises(StaleError, match=rf"{named} was "):
            execute(write_mix(**keys, name="again", resume_from_checkpoint=checkpoint))


def test_show_tells_every_epoch(write_mix, write_run, capsys, monkeypatch):
    """Its samples, packs and steps, and what it draws of each source."""
    path = str(write_mix())
    again = str(write_run("qwen2", name="again", training={**KEYS, "packing_epochs": "replanned"}))
    monkeypatch.setattr("packplan.adapters.progress.LINE_S", 0)
    for one, num in ((path, 77), (again, 30)):
        assert 0 == plan_main(["build", one])
        assert {f"{num} of {num} samples", "3 of 3 epochs"} <= {
            *re.findall(r"\d+ of \d+ \w+", said := capsys.readouterr().err)
        }
        assert "planning train, " in said

    assert 0 == plan_main(["whatif", path])
    assert "assume that all epochs have the plan of the first" in capsys.readouterr().err

    def show(of: str, *words: str) -> str:
        capsys.readouterr()
        assert 0 == plan_main(["show", of, *words])
        return capsys.readouterr().out

    document = json.loads(show(path, "--epoch", "1", "--json"))["splits"]["train"]
    epochs = document["epochs"]
    assert [0, 1, 2] == [one["epoch"] for one in epochs["epochs"]]
    assert sum(one["steps"] for one in epochs["epochs"]) == epochs["total_steps"] == document["schedule"]["total_steps"]
    assert epochs["epochs"][1]["checksum"] == document["checksums"]["raw_plan"]
    assert re.search(r"fill .* sources .*chat\.jsonl 2.*of the tokens\)", show(path, "--epoch", "1"), re.DOTALL)
    fewer = open_split(read_config(path, ["training.num_train_epochs=2"]), "train", world_size=1)
    assert 2 == len(fewer.plan.epochs)
    level, note = partial_window_line(read_config(path), fewer.epochs)
    assert logging.INFO == level, "no batch size would help each epoch"
    assert re.match(r"the last optimizer step of \d of 2 epochs has fewer", note)
    with pytest.raises(NotBuiltError):
        open_split(read_config(path, ["training.num_train_epochs=4"]), "train", world_size=1)
    with pytest.raises(ConfigError, match="--epoch is 3"):
        open_split(read_config(path), "train", world_size=1, epoch=3)
    one = re.search(r"sample (\d+): ", show(path, "--epoch", "2", "--pack", "0"))
    assert "in epoch 2, counted from 0: step" in show(path, "--epoch", "2", "--sample", one[1])
    replanned = json.loads(show(again, "--json"))["splits"]["train"]["epochs"]["epochs"]
    assert 3 == len({one["checksum"] for one in replanned}) == len(replanned)
    with pytest.raises(ConfigError, match="--epoch needs a run"):
        open_split(read_config(again, ["training.packing_epochs=same"]), "train", world_size=1, epoch=1)


def test_a_mix_that_asks_for_more_than_was_measured_is_refused_before_training(write_mix):
    """By key; what shows before is refused as in `test_curriculum`."""
    mix = {"by": "tokens", "tokens_per_epoch": 10**6, "sources": CURRICULUM["curriculum"][0]["sources"]}

    with pytest.raises(ConfigError, match=r"sources\[0\].*set replacement: true"):
        train(read_config(write_mix(mix)), OneRank())


def test_two_plans_at_most_are_held_and_each_is_the_one_that_was_counted(write_mix, execute):
    """The next is planned while one is trained; another, or one that drops too much, is refused."""
    path = write_mix(max_steps=1, num_train_epochs=1)
    execute(path)
    planner = planner_of(path)
    records = tuple(planner.make_record(planner.plan(epoch)) for epoch in range(6))
    made: list[weakref.ref] = []

    class Noted(EpochPlanner):
        def plan(self, epoch):
            plan = super().plan(epoch)
            made.append(weakref.ref(plan.raw.packs))
            return plan

    epochs = PlannedEpochs(Noted(planner.policy, planner.recipe, planner.samples), records, works=None)
    for epoch in range(6):
        stats = epochs.stats(epoch)
        assert isinstance(stats, PackStats)
        assert planner.plan(epoch).raw.packs == stats.packs
        if epoch < 5:
            assert epochs._held[epoch + 1].result().packs == planner.plan(epoch + 1).raw.packs
        gc.collect()
        assert sum(packs() is not None for packs in made) <= 2

    wrong = (attrs.evolve(records[0], checksum="0" * 64), *records[1:])
    with pytest.raises(MismatchError, check=lambda error: error.kind == "ranks_disagree"):
        PlannedEpochs(planner, wrong, works=None).stats(0)

    strict = attrs.evolve(planner.policy, min_fill_ratio="0.99", drop_last=True, max_dropped_share=0)
    with pytest.raises(ArgumentError, match="would never be trained"):
        attrs.evolve(planner, policy=strict).plan(1)
