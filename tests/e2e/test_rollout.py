"""Dynamic packing in training: every sample is trained or counted, ranks end together."""

import json
import logging
import os
import re
import shutil
import signal
import statistics
import weakref
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from packplan.adapters.loaders.packs import NORMALISER
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer.streams.dataset import StreamDataset
from packplan.adapters.trainer.streams.trainer import StreamTrainer
from packplan.app import check, sft
from packplan.app.cli.command import run_command
from packplan.app.opening.ranks import join_ranks
from packplan.app.opening.runs import read_config
from packplan.app.opening.trainers import open_checkpoint
from packplan.app.plan import __main__ as plan
from packplan.app.sft.stream import prepare_stream, train_stream
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ConfigError, DataSetError, StaleError
from packplan.core.schedule import ResumeState
from packplan.core.stream import StreamOptions
from tests.e2e.ready import IN_CI
from tests.e2e.test_resume import assert_equal
from tests.processes import finished
from tests.records import write_lines
from tests.stored import asked

pytestmark = pytest.mark.slow

LENGTHS = np.random.default_rng(1).integers(1, 110, 300).tolist()


class Token:
    """Lives as long as its sample; a set asks for a hash, which a dict has not."""


class Marked:
    """Encodes numbers as samples of a length, each with a token."""

    records = SimpleNamespace(location=str)

    def __init__(self):
        self.living, self.asked, self.most = weakref.WeakSet(), [], 0

    def encode(self, index):
        self.asked.append(index)
        self.living.add(token := Token())
        self.most = max(self.most, len(self.living))
        return {"length": min(LENGTHS[index], 99), "token": token}


@pytest.mark.parametrize("packing_length", [100, 20])
def test_what_was_emitted_or_skipped_is_not_held(packing_length):
    """A stream of any length needs the memory of its buffer, and encodes each record once."""
    options = StreamOptions(packing_length=packing_length, packing_buffer=16, allow_single_long=False)
    samples = Marked()
    dataset = StreamDataset(samples, lambda _: np.arange(len(LENGTHS)), options, rank=0, world_size=1)

    assert 1 < len([None for _ in dataset])
    assert samples.most <= 2 * 16 + 1
    assert samples.asked == [*range(len(LENGTHS))]


def write_turns(path: Path, *records: list[tuple[str, str]]) -> str:
    """Write records of turns, each with its role; return the path."""
    rows = ({"messages": [{"role": role, "content": said} for role, said in turns]} for turns in records)
    return str(write_lines(path, rows))


@pytest.fixture
def write_rollout(write_run, text_jsonl):
    """Return a function that writes a run of the rollout variant on text."""

    def write(custom: dict | None = None, name: str = "run", **training) -> Path:
        # Some records are longer than the packs of the run named `long`.
        return write_run(
            "qwen2", name=name, template={"max_length": 50 if name == "long" else 160},
            custom={"train_jsonl": str(text_jsonl), "trainer_variant": "rollout", **(custom or {})},
            training={"max_steps": 6, "effective_batch_size": 2, "packing_buffer": 8, "packing_mode": "dynamic",
                      "lr_scheduler_type": "constant", **training},
        )  # fmt: skip

    return write


def run(path, on_ready=id):
    """Train a stream; return its steps, whether it was terminated, and its log."""
    config = read_config(path)
    on_ready(trainer := prepare_stream(config, OneRank()))
    train_stream(config, trainer)
    return trainer.state.global_step, trainer.was_terminated, [dict(entry) for entry in trainer.state.log_history]


class Watched:
    """Notes the packs of each step and microbatch of a trainer, and is told before each one."""

    def __init__(self, before=id):
        self.packs, self.before = {}, before

    def __call__(self, trainer):
        plain, size, numbers = trainer.training_step, trainer.args.gradient_accumulation_steps, Counter()

        def step(model, inputs, *arguments, **options):
            number = trainer.state.global_step
            self.before(number * size + numbers[number])
            self.packs[number, numbers[number]] = inputs["input_ids"].tolist(), inputs["sample_lengths"]
            numbers[number] += 1
            return plain(model, inputs, *arguments, **options)

        trainer.training_step = step


COUNTS = (
    "epoch_samples", "epoch_packs", "epoch_long_samples", "epoch_skipped_samples", "epoch_dropped_samples",
    "epoch_dropped_packs",
)  # fmt: skip


def test_a_stream_is_trained_epoch_after_epoch(write_rollout, text_jsonl):
    """In an order of each epoch; evaluation unpacked; epochs say what became of samples."""
    path = write_rollout({"val_jsonl": str(text_jsonl)}, max_steps=11, eval_strategy="epoch",
                         packing_min_fill_ratio="0.5")  # fmt: skip
    watched = Watched()
    steps, terminated, history = run(path, watched)

    assert (11, False) == (steps, terminated)
    logged = [entry for entry in history if "loss" in entry]
    assert 11 == len(logged)
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert all(0.5 <= entry["fill"] <= 1 and entry["samples_per_pack"] > 1 for entry in logged)
    ends = [entry for entry in history if "epoch_samples" in entry]
    for number, entry in enumerate(ends):
        assert entry["epoch_long_samples"] / entry["epoch_packs"] == entry["epoch_long_pack_share"]
        assert all(type(entry[name]) is int for name in COUNTS)
        assert entry["epoch_packs"] == 2 * sum(step["epoch"] == number for step in logged)
    *whole, cut = ends
    assert len(whole) > 1
    assert all(30 == entry["epoch_samples"] for entry in whole)
    epochs = [entry["epoch"] for entry in whole]
    assert list(range(1, len(ends))) == epochs
    assert len(whole) < cut["epoch"] < len(ends)
    assert epochs == [entry["epoch"] for entry in history if "eval_loss" in entry][: len(whole)]
    first, second = (
        [watched.packs[entry["step"] - 1, place] for entry in logged if entry["epoch"] == epoch for place in range(2)]
        for epoch in (0, 1)
    )
    assert first[0] != second[0]


class NoiseOfSamples:
    """Adds to the embeddings of each sample the noise that NEFTune gives it alone."""

    def __init__(self, alpha):
        self.alpha, self.lengths = alpha, ()

    def __call__(self, trainer):
        plain = trainer.training_step
        trainer.model.get_input_embeddings().register_forward_hook(self.add)

        def step(model, inputs, *arguments, **options):
            self.lengths = inputs["sample_lengths"]
            return plain(model, inputs, *arguments, **options)

        trainer.training_step = step

    def add(self, module, _, embedded):
        noise, width = torch.rand_like(embedded) * 2 - 1, embedded.shape[-1]
        alone = [part / (part.shape[1] * width) ** 0.5 for part in noise.split(self.lengths, dim=1)]
        return embedded + self.alpha * torch.cat(alone, dim=1) if module.training else embedded


def test_noise_of_a_stream_is_that_of_each_sample_alone(write_rollout):
    """NEFTune's, by the tokens of the sample, not of its pack: losses are those of such noise."""
    keys = {"max_steps": 2, "effective_batch_size": 1}
    with_noise, by_hand, without = (
        [entry["loss"] for entry in run(write_rollout(**keys, **noise), on_ready)[2] if "loss" in entry]
        for noise, on_ready in (({"neftune_noise_alpha": 40}, id), ({}, NoiseOfSamples(40)), ({}, id))
    )

    assert by_hand == pytest.approx(with_noise, rel=1e-5)
    assert abs(by_hand[0] - without[0]) > 0.01


@pytest.mark.parametrize(
    ("allowed", "counted", "says"),
    [
        (True, "epoch_long_samples", "a pack by itself"),
        (False, "epoch_skipped_samples", "is skipped; training.packing_"),
    ],
)
def test_long_samples_are_logged_one_by_one(write_rollout, text_jsonl, caplog, allowed, counted, says):  # noqa: PLR0917  # fixtures
    """With record, length and limit; fill of steps and epoch counts them as full."""
    logging.getLogger("packplan").propagate = True
    keys = {"packing_allow_single_long": allowed, "packing_buffer": 2, "packing_drop_last": False}
    with caplog.at_level(logging.INFO, logger="packplan"):
        _, _, history = run(write_rollout(name="long", max_steps=-1, effective_batch_size=1, **keys))

    (end,) = (entry for entry in history if "epoch_samples" in entry)
    fills = [entry["fill"] for entry in history if "loss" in entry]
    assert statistics.fmean(fills) == pytest.approx(end["epoch_fill_mean"])
    assert (len(fills), allowed) == (end["epoch_packs"], end["epoch_long_pack_share"] > 0)
    lines = [line for line in caplog.messages if says in line]
    assert len(lines) >= end[counted] > 0
    assert all(f"{text_jsonl}, line " in line and "at least the packing length of 50" in line for line in lines)


def test_a_stream_that_its_steps_end_says_what_it_lost(write_rollout, caplog):
    """Each sample that came is in one of the numbers, in every log; the end warns."""
    logging.getLogger("packplan").propagate = True
    keys = {"max_steps": 40, "packing_allow_single_long": False, "packing_min_fill_ratio": "0.97", "packing_buffer": 4,
            "dataloader_num_workers": 2, "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3, "eval_packing": True, "effective_batch_size": 1}  # fmt: skip
    with caplog.at_level(logging.INFO):
        _, _, history = run(write_rollout(name="long", **keys))

    logged = [entry for entry in history if "loss" in entry]
    names = ["stream_samples", "stream_long_samples", "stream_skipped_samples", "stream_dropped_samples"]
    assert all(name in entry for entry in logged for name in names)
    assert all((values := [entry[name] for entry in logged]) == sorted(values) for name in names)
    (end,) = (line for line in caplog.messages if line.startswith("the stream has ended: "))
    came, trained, dropped, packs, _, _, skipped, waiting, long, *_ = map(int, re.findall(r"\d+", end))
    assert came == trained + dropped + skipped + waiting
    assert min(dropped, packs, skipped, trained) > 0 == long
    assert sum(entry["samples_per_pack"] for entry in logged) == trained
    assert [came, long, skipped, dropped] == [logged[-1][name] for name in names]
    assert end.endswith("training.packing_drop_last: false, or lower training.packing_min_fill_ratio")
    assert "packing forces training.per_device_train_batch_size from 2 to 1" in caplog.text
    assert "packing forces training.per_device_eval_batch_size from 3 to 1" in caplog.text


@pytest.mark.parametrize(
    ("buffer", "known", "says"),
    [
        (4, 4, r"raise training\.packing_buffer \(now 4\)"),
        (4, 512, r"raise template\.max_length \(now 50\)"),
        (13, 13, None),
    ],
)
def test_packs_underfilled_before_the_end_of_an_epoch_warn_once(write_rollout, tmp_path, caplog, buffer, known, says):  # noqa: PLR0917  # fixtures
    """By number and share, and by the buffer if it is small; the last packs of an epoch do not."""
    logging.getLogger("packplan").propagate = True
    turns = ([("user", "say"), ("assistant", "red " * (1 + n % 6))] for n in range(12))  # 39 to 44 tokens of 50
    custom = {"train_jsonl": write_turns(tmp_path / "turns.jsonl", *turns)}
    keys = {"max_steps": -1, "num_train_epochs": 1, "effective_batch_size": 1, "packing_drop_last": False,
            "packing_min_fill_ratio": "0.9"}  # fmt: skip

    def say_buffer(trainer):
        trainer.options = attrs.evolve(trainer.options, packing_buffer=known)

    with caplog.at_level(logging.WARNING, logger="packplan"):
        steps, _, history = run(write_rollout(custom, name="long", packing_buffer=buffer, **keys), say_buffer)

    (end,) = (entry for entry in history if "epoch_samples" in entry)
    assert 12 == steps == end["epoch_underfilled_packs"]
    warned = [line for line in caplog.messages if "so far" in line]
    assert bool(says) == len(warned)
    assert all(re.search(rf"^2 of 2 packs so far \(100%\) were trained below .*{says}", line) for line in warned)


def test_a_stream_that_teaches_nothing_is_an_error(write_run, tmp_path):
    """Its answers are truncated; a plan would refuse them before training."""
    path = write_turns(tmp_path / "turns.jsonl", [("user", "blue " * 60), ("assistant", "red")])
    path = write_run(
        "qwen2", template={"max_length": 50, "truncation_strategy": "right"},
        custom={"train_jsonl": path, "trainer_variant": "rollout"},
        training={"max_steps": 1, "packing_mode": "dynamic"},
    )  # fmt: skip

    with pytest.raises(DataSetError, match="none of the samples of 1 step had a supervised token"):
        run(path)


@pytest.mark.parametrize("variant", ["sft", "rollout"])
def test_an_evaluation_that_teaches_nothing_is_left_out(write_rollout, execute, tmp_path, variant):
    """Before the first step too, in a plan and in a stream: the answers are truncated."""
    cut = write_turns(tmp_path / "cut.jsonl", [("user", "blue " * 60), ("assistant", "red")])
    whole = write_turns(tmp_path / "whole.jsonl", *[[("user", "say"), ("assistant", "red")]] * 4)
    of_plan = {"packing_mode": "static", "packing_buffer": 512} if variant == "sft" else {}
    path = write_rollout({"train_jsonl": whole, "val_jsonl": cut, "trainer_variant": variant}, name="long",
                         max_steps=1, eval_on_start=True, packing_drop_last=False, **of_plan)  # fmt: skip
    path.write_text(path.read_text().replace("max_length: 50", "max_length: 50\n  truncation_strategy: right"))

    history = execute(path).history if variant == "sft" else run(path)[2]

    assert [1] == [entry["step"] for entry in history if "loss" in entry]
    assert not [entry for entry in history if "eval_loss" in entry]


def test_what_needs_a_plan_refuses_a_stream(write_rollout, capsys):
    """`packplan plan build` and `packplan check`; the records can still be looked through."""
    path = str(write_rollout())

    for main, arguments in ((plan.main, ["build", path]), (check.main, [path])):
        assert 2 == main(arguments)
        assert "there is no plan" in capsys.readouterr().err


@pytest.mark.covers
@pytest.mark.parametrize(
    ("custom", "training", "error", "says"),
    [
        ({}, {"resume_from_checkpoint": "last"}, ConfigError, "finds no complete checkpoint"),
        ({"fusion_config": "mix.yaml"}, {}, ConfigError, "both name the data"),
        ({}, {"effective_batch_size": 500}, DataSetError, "epoch 0 has no step, since a rank has fewer than 500 packs"),
    ],
)
def test_what_does_not_go_together_is_refused(write_rollout, custom, training, error, says):
    """An epoch without a step too, instead of going round for ever."""
    with pytest.raises(error, match=says):
        run(write_rollout(custom, **training))


class KilledError(Exception):
    """Ends a run in the middle of a step, as SIGKILL would: nothing more is saved."""


CLOCK = {"tokens_per_second", "train_runtime", "train_steps_per_second", "train_loss", "total_flos"}


def told(history) -> list[dict]:
    """Return what was logged, but for the clock's and the run's."""
    return [{key: entry[key] for key in entry.keys() - CLOCK} for entry in history]


def test_a_stream_that_is_killed_ends_as_one_run_does(write_rollout, text_jsonl, tmp_path):
    """Killed in random steps: the same packs, losses, counts and weights, with dropout."""
    data = tmp_path / "few.jsonl"
    data.write_text("".join(text_jsonl.read_text().splitlines(keepends=True)[:9]))
    custom = {"train_jsonl": str(data)}
    keys = {"max_steps": -1, "num_train_epochs": 2, "packing_buffer": 5, "save_strategy": "steps", "save_steps": 1,
            "tuner_type": "lora", "lora_dropout": 0.2, "packing_drop_last": False, "packing_min_fill_ratio": "0.8",
            "dataloader_num_workers": 2, "effective_batch_size": 3}  # fmt: skip
    whole = Watched()
    steps, _, history = run(write_rollout(custom, name="long", **keys), whole)

    kills = np.random.default_rng(5).choice(range(3, 3 * steps), 4, replace=False).tolist()
    # Adapters begin at random.
    shutil.copytree(tmp_path / "long" / "checkpoint-1", tmp_path / "killed" / "checkpoint-1")
    keys |= {"output_dir": str(tmp_path / "killed"), "resume_from_checkpoint": "last"}

    def die(microbatch):
        if microbatch in kills:
            kills.remove(microbatch)
            raise KilledError

    killed = Watched(die)
    while kills:
        with pytest.raises(KilledError):
            run(write_rollout(custom, name="long", **keys), killed)
    again, _, resumed = run(write_rollout(custom, name="long", **keys), killed)

    assert steps == again
    assert {place: pack for place, pack in whole.packs.items() if place[0]} == killed.packs
    assert told(history) == told(resumed)
    assert_equal(tmp_path / "killed" / f"checkpoint-{steps}", tmp_path / "long" / f"checkpoint-{steps}")


def on_rank(config, out, killed_in):
    """Train a stream as one rank; note each pack, and die in a step if one is given."""
    plain = StreamTrainer.training_step

    def noted(trainer, model, inputs, *arguments, **options):
        step, ids = trainer.state.global_step, inputs["input_ids"][0].tolist()
        samples = [ids[start:stop] for start, stop in pairwise([0, *accumulate(inputs["sample_lengths"])])]
        supervised = int((inputs["labels"] != IGNORED_LABEL).sum())
        pack = {"step": step, "samples": samples, "weight": inputs[NORMALISER], "supervised": supervised}
        with Path(out, f"packs{os.environ['RANK']}.jsonl").open("a") as lines:
            lines.write(json.dumps(pack) + "\n")
        if step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(trainer, model, inputs, *arguments, **options)

    StreamTrainer.training_step = noted
    return sft.main([config])


def test_ranks_with_unequal_data_train_all_of_it_also_on_other_ranks(server, write_rollout, tmp_path):
    """Killed on two ranks, on one, on two again: each sample twice, empty packs weigh nothing."""
    answers = ["blue " * (3 + 40 * (n % 2)) for n in range(25)]
    turns = ([("user", f"say {n}"), ("assistant", answer)] for n, answer in enumerate(answers))
    custom = {"train_jsonl": write_turns(tmp_path / "unequal.jsonl", *turns)}
    keys = {"max_steps": -1, "num_train_epochs": 2, "effective_batch_size": 2, "packing_drop_last": False,
            "save_strategy": "steps", "save_steps": 1}  # fmt: skip
    packs, killed = [], (2, 13, None)  # the 13th step ends the first epoch, as the next start finds out
    for number, (world_size, kill) in enumerate(zip((2, 1, 2), killed, strict=True)):
        out = tmp_path / f"start{number}"
        path = str(asked(write_rollout(custom, name="long", **keys)))
        ranks = server.ranks(world_size, on_rank, path, str(out), kill, folder=out)
        assert [0 if kill is None else -signal.SIGKILL] * world_size == finished(ranks)
        lines = "".join(file.read_text() for file in sorted(out.glob("packs*.jsonl"))).splitlines()
        packs += [pack for pack in map(json.loads, lines) if kill is None or pack["step"] < kill]
        keys["resume_from_checkpoint"] = "last"
        said = (out / "rank0.log").read_text()
        assert (number > 0) == ("the epoch began on other ranks or loader workers" in said)

    samples = Counter(tuple(sample) for pack in packs for sample in pack["samples"])
    assert len(answers) == len(samples)
    assert {2} == set(samples.values())
    lines = [json.loads(line) for line in (tmp_path / "long" / "logging.jsonl").read_text().splitlines()]
    ends = {line["epoch"]: line for line in lines if "epoch_samples" in line}
    assert [1, 2] == [*ends]
    assert all((25, 0) == (line["epoch_samples"], line["epoch_dropped_samples"]) for line in ends.values())
    assert sum(line["epoch_packs"] for line in ends.values()) == sum(bool(pack["samples"]) for pack in packs)
    weightless = [pack for pack in packs if not pack["samples"]]
    assert weightless
    assert {(0, 0)} == {(pack["weight"], pack["supervised"]) for pack in weightless}
    assert {2} == set(Counter(pack["step"] for pack in packs).values())


BATCH_SIZES = range(1, 9)


def on_rank_by_batch_size(config, out):
    """Train an epoch for each number of packs of a rank in a step, as one rank; note each pack."""
    plain, packs = StreamTrainer.training_step, []

    def noted(trainer, model, inputs, *arguments, **options):
        packs.append((trainer.state.global_step, inputs["sample_lengths"]))
        return plain(trainer, model, inputs, *arguments, **options)

    def command():
        StreamTrainer.training_step = noted
        with join_ranks(run := read_config(config)) as group:
            for size in BATCH_SIZES:
                run = read_config(config, [f"training.effective_batch_size={size * group.world_size}"])
                train_stream(run, prepare_stream(run, group))
                Path(out, f"{size} of rank {group.rank}.json").write_text(json.dumps(packs))
                packs.clear()

    return run_command(command, verbose=False)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(num, marks=IN_CI) for num in (1, 3))])
def test_each_batch_size_trains_every_sample_once(server, write_rollout, tmp_path, world_size):
    """For 1 to 8 packs of each rank in a step, however many a rank lacks in the last one."""
    turns = ([("user", "say"), ("assistant", "red " * (1 + n))] for n in range(10))
    custom = {"train_jsonl": write_turns(tmp_path / "turns.jsonl", *turns)}
    path = write_rollout(custom, name="long", max_steps=-1, effective_batch_size=world_size, packing_drop_last=False)

    ranks = server.ranks(world_size, on_rank_by_batch_size, str(asked(path)), str(tmp_path), folder=tmp_path)

    assert [0] * world_size == finished(ranks)
    trained, lacking = set(), 0
    for size in BATCH_SIZES:
        of_ranks = [json.loads((tmp_path / f"{size} of rank {rank}.json").read_text()) for rank in range(world_size)]
        trained.add(tuple(sorted(length for packs in of_ranks for _, lengths in packs for length in lengths)))
        assert {size} == {number for packs in of_ranks for number in Counter(step for step, _ in packs).values()}
        lacking = max(lacking, *(sum(not lengths for _, lengths in packs) for packs in of_ranks))
    (lengths,) = trained
    assert 10 == len(set(lengths)) == len(lengths)
    assert lacking > 1


def test_a_stopped_stream_is_saved_and_resumed_as_itself_alone(
    write_rollout, text_jsonl, monkeypatch, tmp_path, caplog
):
    """SIGTERM saves and logs the cut epoch; other settings and runs of plans are refused."""
    logging.getLogger("packplan").propagate = True
    keys = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 100,
            "eval_strategy": "steps", "eval_steps": 100}  # fmt: skip
    data = {"val_jsonl": str(text_jsonl)}
    stopping = Watched(lambda microbatch: microbatch == 5 and os.kill(os.getpid(), signal.SIGTERM))

    with caplog.at_level(logging.INFO):
        assert (3, True) == run(write_rollout(data, **keys), stopping)[:2]
    assert "SIGTERM: a checkpoint is saved at step 3 of a run of 1 epoch" in caplog.text
    checkpoint, logged = tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "logging.jsonl"
    (cut,) = [line for line in map(json.loads, logged.read_text().splitlines()) if "epoch_samples" in line]
    assert 0 < cut["epoch"] < 1
    assert 6 == cut["epoch_packs"]

    keys["resume_from_checkpoint"] = str(checkpoint)
    for key, stored, now in (("packing_buffer", 8, 9), ("seed", 42, 1)):
        with pytest.raises(StaleError, match=rf"training\.{key} was {stored}, now {now}"):
            run(write_rollout(data, **{**keys, key: now}))
    says = r"(?s)binpacking was '2.*', now 'other'.*the rules of packing was 2, now 3"
    with monkeypatch.context() as patched, pytest.raises(StaleError, match=says):
        patched.setattr("packplan.app.sft.stream.PACKER_VERSION", "other")
        patched.setattr("packplan.app.sft.stream.RULES_VERSION", 3)
        run(write_rollout(data, **keys))
    config = read_config(write_rollout(data, **keys))
    with pytest.raises(ConfigError, match=r"but another custom\.trainer_variant made it: restore that"):
        open_checkpoint(config, OneRank(), ResumeState)

    steps, terminated, history = run(write_rollout(data, **keys))
    assert not terminated
    assert steps > 3
    assert [steps] == [entry["step"] for entry in history if "eval_loss" in entry]
    totals = [json.loads(line)["global_step/max_steps"] for line in logged.read_text().splitlines()]
    assert f"{steps}/{steps}" == totals[-1]
    assert all(int(total.split("/")[1]) < 3 * steps for total in totals)  # estimates
    keys["resume_from_checkpoint"] = "last"
    assert steps == run(write_rollout(data, **keys))[0]
    assert "nothing is left to train" in caplog.text
