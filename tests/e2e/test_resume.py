"""A resumed run is the whole run; on other ranks it trains what the epoch has left."""

import json
import logging
import math
import multiprocessing
import re
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from packplan.adapters.hf.following import ServesPacks
from packplan.adapters.ranks.torch_group import OneRank
from packplan.app import sft
from packplan.app.opening.ranks import hold_output_lock
from packplan.app.opening.runs import read_config
from packplan.core.errors import ConfigError, OutputError, StaleError
from tests.e2e import rank_main
from tests.e2e.ready import chats, train
from tests.processes import finished
from tests.records import ANSWER, QUESTION, chat, write_lines

pytestmark = pytest.mark.slow


def steps(history) -> list[dict]:
    """Return what was logged of each step, but for the clock's."""
    clock = {"tokens_per_second", "useful_tokens_per_second", "data_wait_seconds"}
    return [{key: entry[key] for key in entry.keys() - clock} for entry in history if "loss" in entry]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = [*folder.glob("*model.safetensors")] or folder.glob("default/*model.safetensors")
    return load_file(path)


def assert_equal(found: Path, expected: Path) -> None:
    """Compare the weights of two checkpoints, bit for bit."""
    left, right = weights(found), weights(expected)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


KEYS = {"num_train_epochs": 2, "effective_batch_size": 2, "packing_drop_last": False, "save_strategy": "steps",
        "save_steps": 1}  # fmt: skip

SHORT = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "learning_rate": "5e-3", "logging_steps": 1,
         "report_to": "none", "gradient_checkpointing": False, "dataloader_num_workers": 0}  # fmt: skip
"""Keys of the runs of `trained`, beside `KEYS`."""


@pytest.fixture(scope="module")
def trained(demo, tmp_path_factory):
    """Return sections, checkpoint folder and result of a run of `qwen2` with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_lines(folder / "text.jsonl", [chat(QUESTION, {**ANSWER, "content": "blue circle " * 7})] * 16)
    sections = {
        "model": {"model": str(demo / "models" / "qwen2")},
        "template": {"max_length": 128, "system": "You look at scenes."},
        "custom": {"train_jsonl": str(folder / "text.jsonl")},
    }
    training = {**KEYS, **SHORT, "output_dir": str(folder / "run"), "max_steps": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump({**sections, "training": training}))
    return sections, folder / "run", train(read_config(folder / "run.yaml"), OneRank())


@pytest.mark.parametrize(
    ("model", "stop", "keys"),
    [
        ("qwen2", 5, {"tuner_type": "lora", "lora_dropout": 0.2}),
        ("qwen3", None, {"save_strategy": "epoch", "dataloader_num_workers": 2}),
        ("qwen3_vl", 2, {"save_steps": 2, "dataloader_num_workers": 2}),
    ],
)
def test_a_resume_ends_bit_for_bit_as_one_run_does(  # noqa: PLR0917  # fixtures
    write_run, execute, few_scenes, tmp_path, caplog, model, stop, keys
):
    """Losses, telemetry and weights, from mid-epoch and its end; no process is left."""
    scenes = {"custom": {"train_jsonl": str(few_scenes)}, "template": {"max_length": 500}}
    overlay, keys = scenes if model.endswith("vl") else {}, {**KEYS, **keys}
    whole = execute(write_run(model, name="whole", training=keys, **overlay))
    last, per_epoch = whole.num_steps, whole.schedule.steps_per_epoch
    assert per_epoch > 2

    checkpoint = tmp_path / "whole" / f"checkpoint-{stop or per_epoch}"
    shutil.copytree(tmp_path / "whole" / "static_packing", tmp_path / "again" / "static_packing")
    keys |= {"resume_from_checkpoint": str(checkpoint), "save_strategy": "steps", "save_steps": last}
    with caplog.at_level(logging.INFO):
        resumed = execute(write_run(model, name="again", training=keys, **overlay))

    began = f"after step {stop}: " if stop else f"after step {per_epoch}, at the start of epoch 1 "
    assert began in caplog.text
    assert not re.search("this run continues with|is estimated|equal work", caplog.text)
    assert steps(whole.history) == steps(resumed.history)
    found = tmp_path / "again" / f"checkpoint-{last}"
    assert_equal(found, tmp_path / "whole" / found.name)
    kept = "adapter_model.safetensors" if "tuner_type" in keys else "model.safetensors"
    assert [kept] == [path.name for path in found.glob("*.safetensors")]
    assert [] == multiprocessing.active_children()


@pytest.fixture
def resume(write_run, execute):
    """Return a function that goes on from a checkpoint, by sections and more keys of training."""

    def run(sections, checkpoint, **keys):
        keys = {**KEYS, **SHORT, "resume_from_checkpoint": str(checkpoint), **keys}
        return execute(write_run("qwen2", training=keys, **sections))

    return run


def test_a_checkpoint_resumes_the_run_of_its_plan_model_and_settings_alone(  # noqa: PLR0917  # fixtures
    trained, resume, write_run, execute, demo, tmp_path, caplog
):
    """
    A moved model and another attention, which is logged; else refused, before a step and with the
    stored plan as it was. `last` takes the newest of this run.
    """
    sections, folder, _ = trained
    state = json.loads((folder / "checkpoint-1" / "trainer_state.json").read_text())
    assert {"attn_impl": "varlen"} == state["stateful_callbacks"]["packplan_attention"]
    assert not re.search("varlen|packplan", (folder / "checkpoint-1" / "config.json").read_text())
    moved = {"model": shutil.copytree(demo / "models" / "qwen2", tmp_path / "moved").as_posix()}
    execute(write_run("qwen2", training={**KEYS, **SHORT, "data_seed": 7, "max_steps": 2}, **sections))
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    shutil.copytree(folder / "checkpoint-1", tmp_path / "run" / "checkpoint-1")
    with caplog.at_level(logging.INFO):
        other = {**sections, "model": {**moved, "attn_impl": "sdpa"}}
        assert 2 == resume(other, "last", save_strategy="no", max_steps=2).num_steps
    assert "trained with attention varlen; this run continues with sdpa" in caplog.text
    assert re.search("checkpoint-2 is passed over: .* seed was 7, now 42", caplog.text)

    tensors = load_file(tmp_path / "moved" / "model.safetensors")
    tensors[min(tensors)] += 1
    save_file(tensors, tmp_path / "moved" / "model.safetensors", {"format": "pt"})
    plans = (tmp_path / "run" / "static_packing" / "train").glob("*plan*")
    stored = {path: path.read_bytes() for path in plans if path.is_file()}
    assert stored
    for changed, keys, error, says in (
        ({"model": moved}, {}, StaleError, r"model\.model model\.safetensors was '"),
        ({"template": {"max_length": 200}}, {"max_steps": 5}, StaleError,
         "packing_length was 128, now 200"),
        ({}, {"data_seed": 7}, StaleError, "seed was 42, now 7"),
        ({}, {"learning_rate": "1e-5"}, StaleError, r"training\.learning_rate"),
        ({}, {"tuner_type": "lora"}, StaleError, "tuner was 'full', now 'lora'"),
        ({}, {"ignore_data_skip": True}, ConfigError, "makes a resumed run train packs twice"),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            resume(
                {name: own | changed.get(name, {}) for name, own in sections.items()}, folder / "checkpoint-1", **keys
            )
        assert stored == {path: path.read_bytes() for path in stored}, says
    assert "this run's value is used" not in caplog.text, "the run does not go on"


def test_what_is_left_is_trained_by_the_settings_of_the_resumed_run(trained, resume, fetched, tmp_path):
    """The packs left, each once; logs and saves by its own YAML."""
    sections, folder, first = trained

    keys = {"save_steps": 4, "logging_steps": 3, "restore_callback_states_from_checkpoint": True}
    resumed = resume(sections, folder / "checkpoint-2", **keys)

    assert len(first.schedule.order(0)) > 2 * 2
    assert [*first.schedule.order(0)[2 * 2 :].tolist(), *first.schedule.order(1).tolist()] == fetched
    later = range(3, resumed.num_steps + 1)
    assert [n for n in later if n % 3 == 0] == [e["step"] for e in resumed.history if "loss" in e and e["step"] > 2]
    saved = {f"checkpoint-{step}" for step in later if step % 4 == 0 or step == resumed.num_steps}
    assert saved == {path.name for path in (tmp_path / "run").glob("checkpoint-*")}


def test_a_checkpoint_is_evaluated_alone_by_a_run_that_ends_there(trained, resume):
    """As docs/training.md says, with its weights, which are not trained further."""
    sections, folder, _ = trained
    data = {"val_jsonl": sections["custom"]["train_jsonl"]}
    keys = {"eval_on_start": True, "max_steps": 2, "eval_strategy": "no"}
    found = resume({**sections, "custom": sections["custom"] | data}, folder / "checkpoint-2", **keys)

    assert [2] == [entry["step"] for entry in found.history if "eval_loss" in entry]


def test_a_model_of_a_hub_is_known_by_its_name_in_another_trainer(demo):
    """And one in a folder by its files, wherever it is; one that was made in memory by nothing."""

    def known(name):
        model = SimpleNamespace(config=SimpleNamespace(name_or_path=name))
        trainer = SimpleNamespace(args=TrainingArguments(), model=model, fixed_arguments=ServesPacks.fixed_arguments)
        inputs = dict(ServesPacks._identity(trainer).fixed.inputs)
        return {name: value for name, value in inputs.items() if name.startswith("model.")}

    assert {"model.model": "some/base"} == known("some/base")
    assert "model.model config.json" in known(str(demo / "models" / "qwen2"))
    assert {} == known("")


def test_where_what_is_left_fills_no_batch_the_next_epoch_goes_on(write_run, execute, tmp_path, caplog):
    """Neither a step nor a crash; at the last epoch, no step."""
    num = 8
    data = write_lines(tmp_path / "eight.jsonl", chats(num))

    def run(**keys):
        keys = {"packing": False, "dataloader_drop_last": True, "num_train_epochs": 2, "save_strategy": "steps",
                "save_steps": num - 1, **keys}  # fmt: skip
        return execute(write_run("qwen2", custom={"train_jsonl": str(data)}, training=keys))

    run(max_steps=num - 1)
    resumes = {"per_device_train_batch_size": 2, "resume_from_checkpoint": str(tmp_path / f"run/checkpoint-{num - 1}")}
    resumed = run(**resumes)

    assert (0, num // 2) == (resumed.schedule.num_remaining_batches(0), resumed.num_steps - (num - 1))
    assert all(entry["epoch"] > 1 for entry in resumed.history if "loss" in entry and entry["step"] >= num)
    assert "nothing is left to train" not in caplog.text
    assert num - 1 == run(**resumes, num_train_epochs=1).num_steps
    assert "nothing is left to train" in caplog.text


def test_other_ranks_finish_the_epoch_with_what_it_has_left(start_ranks, write_run, tmp_path):
    """Each pack that is left once, fillers aside; then whole epochs, in the announced steps."""
    keys, out = {**KEYS, "per_device_train_batch_size": 1}, tmp_path / "on3"
    path = write_run("qwen3", training={**keys, "max_steps": 1}, template={"max_length": 128})
    assert [0, 0] == finished(start_ranks(2, path, tmp_path / "first"))
    keys |= {"save_strategy": "no", "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}
    path = write_run("qwen3", name="again", training={**keys, "effective_batch_size": 6}, template={"max_length": 128})

    assert [0, 0, 0] == finished(start_ranks(3, path, out))
    assert "now on 3 ranks instead of 2" in (out / "rank0.log").read_text()
    before, after = rank_main.seen(tmp_path / "first", 2), rank_main.seen(out, 3)
    every = set(range(before[0]["num_raw"]))
    left = every - {rank["fetched"][0] for rank in before}
    batches = math.ceil(len(left) / 3)
    for part, packs in ((slice(batches), left), (slice(batches, None), every)):
        trained = Counter(chain.from_iterable(rank["fetched"][part] for rank in after))
        assert packs == set(trained)
        assert -len(packs) % 3 == trained.total() - len(packs)
    num_steps = 1 + math.ceil(batches / 2) + math.ceil(math.ceil(len(every) / 3) / 2)
    assert [(num_steps, num_steps)] * 3 == [(rank["steps"], rank["planned_steps"]) for rank in after]
    epochs = [entry["epoch"] for entry in after[0]["history"] if "loss" in entry]
    assert sorted(epochs) == epochs
    assert 2 == epochs[-1]
    covered = [entry["epoch_coverage"] for entry in after[0]["history"] if "epoch_coverage" in entry]
    assert [covered[-1]] * 2 == covered[-2:]


def test_ranks_meet_where_rank_zero_cannot_write(write_run):
    """It says why, and the others, which wait for it, that it is rank 0's."""
    config = read_config(write_run("qwen2", training={"output_dir": "/dev/null/run"}))
    for rank, error, says in ((0, OutputError, "/dev/null/run cannot be written"), (1, ConfigError, "rank 0 cannot")):
        group = Mock(rank=rank, **{"any.return_value": True})
        with pytest.raises(error, match=says), hold_output_lock(config, group):
            raise AssertionError
        group.any.assert_called_once_with(rank == 0)


def test_two_runs_do_not_train_into_one_folder(write_run, tmp_path, capsys):
    """The second is refused by key, as long as the first trains."""
    path = write_run("qwen2", training=KEYS)
    with hold_output_lock(read_config(path), OneRank()):
        assert 2 == sft.main([str(path)])
    assert re.search(r"training\.output_dir is .*which another run is writing into", capsys.readouterr().err)
