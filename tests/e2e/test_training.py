"""A real ms-swift trainer, fed with packs: what it runs is what was planned."""

import json
import logging
import math
import os
import re
import signal
import time
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from packplan.adapters.trainer.console import RunConsole
from packplan.adapters.trainer.trainer import PlanTrainer
from packplan.app.opening.runs import read_config
from packplan.app.opening.trainers import open_arguments
from packplan.app.plan.__main__ import main as plan_main
from packplan.app.planning.schedule import schedule_of_split
from packplan.app.sft.train import _check_and_log_end
from packplan.core.align import align_plan
from packplan.core.errors import ConfigError, RecordError, StaleError
from packplan.core.plan import build_raw_plan
from tests.e2e.ready import chats, logged_losses
from tests.records import asked, chat, write_lines
from tests.strategies import plain_schedule

pytestmark = pytest.mark.slow


def test_a_run_trains_every_pack_once_an_epoch_and_counts_its_steps(  # noqa: PLR0917  # fixtures
    write_run, execute, few_scenes, fetched, caplog, capfd, tmp_path
):
    """Steps are announced and shown as they run; a second run measures nothing, plans the same."""
    keys = {"num_train_epochs": 2, "effective_batch_size": 3, "packing_drop_last": False, "report_to": ["tensorboard"]}
    overlay = {"custom": {"train_jsonl": str(few_scenes)}, "template": {"max_length": 350}}
    path = write_run(training=keys, **overlay)
    logging.getLogger("packplan").propagate = True
    with caplog.at_level(logging.DEBUG, logger="packplan"):
        result = execute(path)
    num_packs = len(result.planned["train"].aligned.packs)
    epochs = [fetched[:num_packs], fetched[num_packs:]]
    assert not [one for one in result.trainer.model.modules() if "add_dummy" in str(one._forward_pre_hooks)]

    assert all(list(range(num_packs)) == sorted(epoch) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [2 * math.ceil(num_packs / 3)] * 2 == [result.schedule.total_steps, result.num_steps]
    assert f" an epoch, {result.num_steps} in all on 1 rank; 3 packs a step" in caplog.text
    for said in ("N_raw_packs", "N_aligned_packs", "world_size 1", "dataloader_drop_last false", "raw_plan checksum",
                 "aligned_plan checksum", "is a pack of its own"):  # fmt: skip
        assert said in caplog.text
    assert ("trains 1 batch instead of 3" in caplog.text) == (num_packs % 3 == 1)

    lines = [json.loads(line) for line in (tmp_path / "run" / "logging.jsonl").read_text().splitlines()]
    assert result.num_steps == sum("loss" in line for line in lines)
    steps = [line for line in lines if "loss" in line]
    telemetry = {"fill", "samples_per_pack", "tokens_per_second", "work", "long_share", "coverage", "token_acc"}
    assert all(telemetry <= step.keys() and step["data_wait_seconds"] > 0 for step in steps)
    left_out = {"work_imbalance", "useful_tokens_per_second", "train_samples_per_second"}
    assert not left_out & {*chain.from_iterable(lines)}
    plan = result.planned["train"].raw
    assert [plan.planned_samples / plan.num_samples] * 2 == [
        line["epoch_coverage"] for line in lines if "epoch_coverage" in line
    ]
    samples = result.planned["train"].works.flops
    assert 2 * samples[plan.packs.indices].sum() == pytest.approx(sum(step["work"] for step in steps))
    # An epoch's line would take the accuracy of the steps since the last log along.
    assert not any("token_acc" in line for line in lines if "epoch_coverage" in line)
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    assert {f"train/{key}" for key in telemetry} <= set(EventAccumulator(str(events)).Reload().Tags()["scalars"])

    caplog.clear()
    with caplog.at_level(logging.INFO, logger="packplan"):
        again = execute(path)
    assert "the lengths of all 12 samples are stored" in caplog.text
    assert "used again" in caplog.text
    assert result.planned["train"].raw_checksum == again.planned["train"].raw_checksum
    assert logged_losses(result.history) == logged_losses(again.history)
    assert fetched[: 2 * num_packs] == fetched[2 * num_packs :]
    other = read_config(write_run(training={**keys, "seed": 7}, **overlay))
    schedule = schedule_of_split(other, "train", result.planned["train"].aligned, result.schedule.works)
    assert epochs[0] == result.schedule.order(0).tolist() != schedule.order(0).tolist()
    capfd.readouterr()
    assert 0 == plan_main(["show", str(path), "--json"])
    shown = json.loads(capfd.readouterr().out)["splits"]["train"]
    works = [step["work"] for step in steps[: shown["schedule"]["steps_per_epoch"]]]
    assert shown["schedule"]["total_steps"] == result.num_steps
    assert shown["schedule"]["work_per_step"] == pytest.approx(sum(works) / len(works))
    assert shown["checksums"]["raw_plan"] == result.planned["train"].raw_checksum
    assert shown["checksums"]["aligned_plan"] == result.planned["train"].checksum
    assert shown["plan"]["planned_samples"] / shown["plan"]["num_samples"] == pytest.approx(
        steps[len(works) - 1]["coverage"]
    )


def test_the_schedule_is_ordered_as_the_trainers_arguments_say(write_run):
    """ms-swift's defaults are those that looking without it assumes."""
    aligned = align_plan(build_raw_plan([8] * 5, packing_length=8), world_size=1, dataloader_drop_last=False)
    for settings in ({}, {"data_seed": 7, "train_dataloader_shuffle": False}):
        config = read_config(write_run(training=settings))
        schedule, arguments = schedule_of_split(config, "train", aligned), open_arguments(config, world_size=1)
        assert (arguments.data_seed, arguments.train_dataloader_shuffle) == (schedule.seed, schedule.shuffle)


def test_no_method_of_the_trainer_is_overridden_twice():
    """So `super()` is ms-swift's method, or transformers' own; but two classes enclose some."""
    own, enclosed = [], {"_inner_training_loop", "_load_optimizer_and_scheduler", "checkpoint_key", "loads_by_class"}
    own += [kind for kind in PlanTrainer.__mro__ if kind.__module__.startswith("packplan.")]
    names = [name for kind in own for name in {*vars(kind)} - enclosed if not name.startswith("__")]

    assert 8 == len(own)
    assert len(set(names)) == len(names)


class Acts(TrainerCallback):
    """Calls a function before each step with the number of those done, or with each prediction."""

    def __init__(self, *, before_step=lambda _: None, at_prediction=lambda: None) -> None:
        self._before_step, self._at_prediction = before_step, at_prediction

    def on_step_begin(self, args, state, control, **_):
        self._before_step(state.global_step)

    def on_prediction_step(self, *_, **__):
        self._at_prediction()


def test_tokens_per_second_leave_out_the_time_of_evaluating(write_run, ready, tmp_path, monkeypatch):
    """By a clock that ticks while an evaluation runs, and once a step."""
    now = [0.0]

    def tick(seconds=0.001):
        now[0] += seconds
        return now[0]

    keys = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4, "logging_steps": 2}
    data = write_lines(tmp_path / "two.jsonl", chats(2))
    trainer = ready(write_run("qwen3", custom={"val_jsonl": str(data)}, training=keys)).trainer
    monkeypatch.setattr(time, "perf_counter", tick)
    trainer.add_callback(Acts(at_prediction=lambda: tick(1000)))

    trainer.train()

    assert now[0] > 4000
    rates = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(rates) > 1
    assert all(rate > 1000 for rate in rates)


def test_a_text_model_refuses_records_with_media(write_run, ready, demo):
    """By line, before training; the way out is another model, not fewer records."""
    with pytest.raises(
        RecordError, match=r"train\.jsonl, line 1: .*reads text only: name a model that reads images in .*VL$"
    ):
        ready(write_run("qwen2", custom={"train_jsonl": str(demo / "data" / "train.jsonl")}))


def test_the_best_model_is_loaded_whole(write_run, ready, few_scenes, tmp_path):
    """The first one here, which is the worst: the weights are its checkpoint's."""
    keys = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2,
            "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
            "greater_is_better": True}  # fmt: skip
    custom = {"train_jsonl": str(few_scenes), "val_jsonl": str(write_lines(tmp_path / "two.jsonl", chats(2)))}
    trainer = ready(write_run(custom=custom, training=keys, template={"max_length": 200})).trainer

    trainer.train()

    best = tmp_path / "run" / "checkpoint-1"
    assert str(best) == trainer.state.best_model_checkpoint
    saved = type(trainer.model).from_pretrained(best).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_sigterm_saves_a_checkpoint_that_the_next_run_goes_on_from(write_run, ready, execute):
    """The running step ends, all is saved; the handler is put back."""
    keys = {"num_train_epochs": 2, "max_steps": 4, "effective_batch_size": 2}
    before = signal.getsignal(signal.SIGTERM)
    trainer = ready(write_run("qwen3", training=keys)).trainer
    trainer.add_callback(Acts(before_step=lambda done: done == 1 and os.kill(os.getpid(), signal.SIGTERM)))

    trainer.train()

    assert (True, 2) == (trainer.was_terminated, trainer.state.global_step)
    assert before == signal.getsignal(signal.SIGTERM)
    rest = execute(write_run("qwen3", training={**keys, "resume_from_checkpoint": "last"}))
    assert (2, 4) == (rest.schedule.start.step, rest.num_steps)
    assert logged_losses(trainer.state.log_history) == logged_losses(rest.history)[:2]


def test_a_step_has_one_line_of_at_most_110_characters(caplog, tmp_path):
    """So has an evaluation, with the largest numbers; the JSONL log has every number."""
    state = SimpleNamespace(global_step=900_000, max_steps=1_000_000, is_world_process_zero=True)
    step = {"loss": 1234.56789, "learning_rate": 1.5e-05, "fill": 0.98765, "tokens_per_second": 9_876_543.25}
    evaluated = {"eval_loss": 1234.5, "eval_token_acc": 0.9, "eval_runtime": 123_456.5, "eval_steps_per_second": 2.5}
    logged = [step | {"grad_norm": 2.5, **{f"metric_{n}": n for n in range(40)}}, evaluated, {"epoch_fill_mean": 0.5}]
    console = RunConsole(draws=False)
    enable_progress_bar()
    console.on_train_begin(None, state, None)
    assert not is_progress_bar_enabled(), "transformers would draw a bar of weight files between the lines"
    console.start_time -= 10**7
    with caplog.at_level(logging.INFO):
        for numbers in logged:
            console.on_log(SimpleNamespace(output_dir=str(tmp_path)), state, None, dict(numbers))
        console.on_save(None, state, None)

    assert ["1234.5679", "1234.5000", "checkpoint-900000"] == [
        re.search(r"^step .* (?:loss |saved )(\S+)", line)[1] for line in caplog.messages
    ]
    assert max(map(len, caplog.messages)) + len("packplan: ") <= 110
    written = map(json.loads, (tmp_path / "logging.jsonl").read_text().splitlines())
    assert all(numbers.items() <= line.items() for numbers, line in zip(logged, written, strict=True))


@pytest.mark.parametrize(
    ("steps", "terminated", "keys", "says"),
    [
        (3, True, {}, "SIGTERM: a checkpoint is saved at step 3 of 4;"),
        (4, False, {}, "4 optimizer steps are done;"),
        (3, False, {"early_stop_interval": 2}, "3 optimizer steps are done;"),
        (3, False, {}, None),
    ],
)
def test_a_run_says_how_it_ended(caplog, steps, terminated, keys, says):
    """Fewer steps than the four of the plan are an error, unless somebody asked for them."""
    config = SimpleNamespace(training=SimpleNamespace(trainer=keys))
    state, schedule = SimpleNamespace(global_step=steps), plain_schedule(4)
    trainer = SimpleNamespace(state=state, schedule=schedule, was_terminated=terminated, last_save=None)
    with caplog.at_level(logging.INFO), nullcontext() if says else pytest.raises(RuntimeError, match=r"3 .* 4 were"):
        _check_and_log_end(config, trainer)
    assert [says] == [line[: len(says)] for line in caplog.messages] if says else not caplog.messages


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_changed_after_planning_stops_the_run_and_is_named(write_run, ready, tmp_path, workers):
    """An image of another size in place of the planned one; from worker processes too."""
    Image.new("RGB", (90, 60)).save(tmp_path / "a.png")
    data = write_lines(tmp_path / "one.jsonl", [asked("<image>?", images=["a.png"])])
    keys = {"dataloader_num_workers": workers, "packing_drop_last": False}
    trainer = ready(write_run(custom={"train_jsonl": str(data)}, training=keys)).trainer
    Image.new("RGB", (420, 420)).save(tmp_path / "a.png")

    with pytest.raises(StaleError, match=r"sample 0 .*one\.jsonl, line 1.* length was \d+, now \d+") as raised:
        trainer.train()
    assert {"length", "patches"} == {difference.key for difference in raised.value.details["differences"]}


def test_a_text_edited_in_a_copy_after_planning_stops_the_run_and_is_named(write_run, ready, text_jsonl):
    """Of equal size, times and tokens; once the copy is deleted, the next start trains."""
    data = text_jsonl.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(list(map(json.loads, text_jsonl.read_text().splitlines()))), data)
    keys = {"dataloader_num_workers": 1, "packing_drop_last": False}
    path = write_run("qwen2", custom={"train_jsonl": str(data)}, training=keys)
    trainer = ready(path).trainer
    (copy,) = data.parent.glob("run/records/*.arrow")
    before = copy.stat()
    with copy.open("r+b") as file:
        file.write(copy.read_bytes().replace(b"say 13", b"say 31"))
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))

    named = r"sample 13 .*text\.parquet, row 14\) .*: content was .*; delete .*records.*: the next run"
    for started in (trainer, ready(path).trainer):
        with pytest.raises(StaleError, match=named):
            started.train()
    copy.unlink()
    ready(path).trainer.train()


@pytest.mark.covers
def test_channels_are_collated_with_their_packs(write_run, ready, tmp_path):
    """They reach the batch; a loss per channel is refused, since packs mix them."""
    answers = ({"role": "assistant", "content": "word " * (n + 1)} for n in range(10))
    records = [chat({"role": "user", "content": "say"}, one, channel="ab"[n % 2]) for n, one in enumerate(answers)]
    custom = {"train_jsonl": str(write_lines(tmp_path / "channels.jsonl", records))}
    keys = {"custom": custom, "template": {"max_length": 512}, "training": {"packing_drop_last": False}}
    prepared = ready(write_run("qwen2", **keys))

    batch = next(iter(prepared.trainer.get_train_dataloader()))

    pack = prepared.planned["train"].raw.packs[batch["packplan_pack"][0]]
    assert len(pack) > 1
    assert ["ab"[index % 2] for index in pack] == batch["channel"]
    keys["training"]["enable_channel_loss"] = True
    with pytest.raises(ConfigError, match="only the loss of all samples is logged"):
        read_config(write_run("qwen2", **keys))
