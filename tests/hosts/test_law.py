"""Plans in trainers of transformers and TRL: steps, and what is refused; see `make test-hosts`."""

import os
import re
import shutil
import signal
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import packplan as pp
from packplan.adapters.hf import following, telemetry, training
from packplan.adapters.loaders.packs import PackInputs, flatten
from packplan.adapters.loaders.rows import FACTS_FILE, pad_rows
from packplan.core.errors import (
    ArgumentError,
    ConfigError,
    CorruptArtefactError,
    MismatchError,
    ModelError,
    RunError,
    StaleError,
)  # fmt: skip
from packplan.hf import row_lengths, unpad, use_plan
from tests.hosts.law import CELLS, CONFIGS, PACKING_LENGTH, cell_of, fork_ranks, main, model_of, rows_of, trainer_of
from tests.processes import ROOT

# isort: split
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.integrations.neftune import activate_neftune
from trl import GRPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def cells(apart, tmp_path_factory):
    """Folder in which all cells have run."""
    folder = tmp_path_factory.mktemp("cells")
    apart(main, str(folder), folder=folder)
    return folder


@pytest.mark.parametrize("name", CELLS)
def test_a_trainer_trains_and_evaluates_the_plan_as_its_samples_alone(cells, name):
    """
    Each microbatch of each rank is the schedule's, to the last of the steps that were counted
    before; a killed run goes on with what is left. A step's loss and gradients, as
    `assert_step_loss` asks before the first, and the evaluation, in which a pack is repeated on
    two ranks, are means over the samples alone.
    """
    out, ranks = cells / name, CELLS[name][-1]["ranks"]
    assert ranks == len([*out.glob("held*")]), [path.read_text()[-2000:] for path in out.glob("errors*")]


ROWS = rows_of("qwen2")

PLAN = pp.plan([len(row["input_ids"]) for row in ROWS], PACKING_LENGTH)


class Streamed(IterableDataset):
    """Rows one after the other, without a number."""

    def __iter__(self):
        return iter(ROWS)


@cache
def probed_model():
    """Return a model for all trainers, since a probe takes as long as the rest of a case."""
    unpad(model := model_of("qwen2", "packplan"), logits=False)
    return model


def trainer_with(out, rows=ROWS, host="transformers", model=None, **settings):
    """Return a trainer with these rows and settings."""
    return trainer_of(cell_of(host, "qwen2"), model or probed_model(), rows, out, **settings)


def follow_plan(out, rows=ROWS, plan=PLAN, *, eval_plan=None, row_ranks=1, **given):
    """Return a trainer that follows a plan."""
    trainer = trainer_with(out, rows, **given)
    use_plan(trainer, plan, eval_plan=eval_plan, sequence_parallel_size=row_ranks)
    return trainer


def train_longer_row(out):
    """Train a row that has one more token than planned."""
    follow_plan(out, [*ROWS[:3], {name: [*ROWS[3][name], 25] for name in ROWS[3]}, *ROWS[4:]])


def train_by_other_loader(out, change):
    """Train by a loader that somebody put in the place of the plan's."""
    trainer = follow_plan(out, num_train_epochs=1)
    loader = trainer.get_train_dataloader()
    batches = change(loader.batch_sampler.schedule.batches(0, rank=0))
    other = DataLoader(loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn)
    trainer.get_train_dataloader = lambda: other
    trainer.train()


def resume_without_plan(out):
    """Resume a plan from a checkpoint that was trained without one."""
    trainer = trainer_with(out, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.data_collator = lambda _: dict.fromkeys(("input_ids", "labels"), torch.tensor([[20, 21]]))
    trainer.train()
    follow_plan(out).train(resume_from_checkpoint=True)


def resume_changed(out, *given, damaged=False, **settings):
    """Train a step, and resume with other rows, plan or settings, or another digit of the state."""
    follow_plan(out, max_steps=1, save_strategy="steps", save_steps=1).train()
    state = out / "checkpoint-1" / "trainer_state.json"
    if damaged:
        state.write_text(state.read_text().replace('"global_step": 1', '"global_step": 2'))
    follow_plan(out, *given, **settings).train(resume_from_checkpoint=True)


def start_two_processes(out):
    """Train in one of two processes, neither of which knows of the other."""
    trainer = trainer_with(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        use_plan(trainer, PLAN)


def evaluate_shared_rows(out):
    """Evaluate without a plan where ranks share rows."""
    trainer = follow_plan(out)
    trainer.row_groups = object()
    trainer.evaluate()


def change_planned_trainer(out):
    """Set after `use_plan` what a plan was made for, and again what it was."""
    trainer = follow_plan(out, per_device_train_batch_size=2, max_steps=2)
    trainer.args.per_device_train_batch_size = 2
    trainer.train()
    assert 1 == trainer.args.per_device_train_batch_size
    trainer.args.max_steps, trainer.train_dataset = 5, ROWS[:10]
    trainer.train()


def plan_leaking_model(out):
    """Train a model of a family whose attention ignores where samples begin."""
    config = AutoConfig.for_model("bloom", vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    follow_plan(out, model=AutoModelForCausalLM.from_config(config))


REFUSED = {
    "include_for_metrics": (ArgumentError, partial(follow_plan, include_for_metrics=["inputs"])),
    "label_smoothing_factor": (ArgumentError, partial(follow_plan, label_smoothing_factor=0.1)),
    "train_sampling_strategy": (ArgumentError, partial(follow_plan, train_sampling_strategy="group_by_length")),
    r"use_plan\(trainer, args": (ArgumentError, partial(follow_plan, host="trl", packing=True)),
    r"eval_plan=args": (ArgumentError, partial(follow_plan, host="trl", eval_packing=True)),
    "2 processes": (ArgumentError, start_two_processes),
    "already": (ArgumentError, lambda out: use_plan(follow_plan(out), PLAN)),
    "Streamed": (ArgumentError, partial(follow_plan, rows=Streamed(), max_steps=1)),
    "27 samples.* 1 row:": (ArgumentError, partial(follow_plan, eval_dataset=ROWS[:1], eval_plan=PLAN)),
    "dict of data sets": (ArgumentError, partial(follow_plan, eval_dataset={"a": ROWS}, eval_plan=PLAN)),
    "has no train_dataset": (ArgumentError, partial(follow_plan, rows=None, max_steps=1)),
    "not a type": (ArgumentError, lambda _: use_plan(GRPOTrainer, PLAN)),
    "not a Linear": (ArgumentError, lambda _: row_lengths(torch.nn.Linear(1, 1))),
    "not a Plan": (ArgumentError, lambda out: use_plan(PLAN, trainer_with(out))),
    "plan is of type RawPlan": (ArgumentError, partial(follow_plan, plan=PLAN.raw)),
    "plan is of type float": (ArgumentError, partial(follow_plan, plan=4096.0)),
    "plan is of type Packs": (ArgumentError, partial(follow_plan, plan=PLAN.packs)),
    "eval_plan is -3,": (ArgumentError, partial(follow_plan, eval_plan=-3)),
    "plan is True,": (ArgumentError, partial(follow_plan, plan=True)),
    "GRPOTrainer makes batches that no plan.* balance": (
        ArgumentError,
        lambda _: use_plan(object.__new__(GRPOTrainer), PLAN),
    ),
    "1 rank cannot form groups of 2: [^;]*$": (ArgumentError, partial(follow_plan, row_ranks=2)),
    "groups of 2: .*; the evaluation has no": (ArgumentError, partial(follow_plan, row_ranks=2, eval_strategy="epoch")),
    "^the evaluation has no plan": (ArgumentError, evaluate_shared_rows),
    r"max_steps was 2, now 5\n  train_dataset had 27 rows, now 10 others": (ArgumentError, change_planned_trainer),
    "saved by Trainer, but this is SFTTrainer": (ArgumentError, partial(resume_changed, host="trl")),
    "sample 3": (StaleError, train_longer_row),
    "bloom": (ModelError, plan_leaking_model),
    "served pack 0,": (MismatchError, partial(train_by_other_loader, change=sorted)),
    "served no further pack,": (MismatchError, partial(train_by_other_loader, change=lambda batches: batches[:-2])),
    "progress of a plan": (ArgumentError, resume_without_plan),
    "is damaged": (CorruptArtefactError, partial(resume_changed, damaged=True)),
}
"""Key of the message -> class, and what is done."""


@pytest.mark.parametrize("key", REFUSED)
def test_what_a_trainer_would_not_train_as_planned_is_refused(key, tmp_path):
    """Settings, rows, ranks, loaders, models and checkpoints: none is trained."""
    error, run = REFUSED[key]
    with pytest.raises(error, match=key):
        run(tmp_path)


def test_no_run_goes_on_with_another_one(tmp_path):
    """By the names of what differs: the plan, a setting, and two rows in each other's place."""
    lengths = PLAN.lengths.tolist()
    second = next(index for index, length in enumerate(lengths) if length in lengths[:index])
    rows, first = [*ROWS], lengths.index(lengths[second])
    rows[first], rows[second] = rows[second], rows[first]

    with pytest.raises(StaleError) as raised:
        resume_changed(tmp_path, rows, pp.plan(lengths, 2 * PACKING_LENGTH), optim="adamw_torch")

    differences = {one.key: one for one in raised.value.details["differences"]}
    assert {"plan", "data", "optim"} <= differences.keys()
    lengths = differences["packing_length"]
    assert (PACKING_LENGTH, 2 * PACKING_LENGTH) == (lengths.stored, lengths.current)


class CountedRows(list):
    """Rows that count how often each is read."""

    def __init__(self, rows):
        super().__init__(rows)
        self.reads = Counter()

    def __getitem__(self, index):
        self.reads[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("plan", [PLAN, PACKING_LENGTH], ids=["plan", "number"])
def test_rows_are_read_once_before_the_first_step_and_never_for_a_resume(plan, tmp_path):
    """A resumed run trusts the digests of its checkpoint, and served rows have to have them."""
    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "dataloader_num_workers": 0}
    rows, once = CountedRows(ROWS), dict.fromkeys(range(len(ROWS)), 1)
    trainer = follow_plan(tmp_path, rows, plan, **saves)
    assert once == rows.reads
    rows.reads.clear()

    trainer.train()

    first, second = (
        [index for (pack,) in step.batches for index in PLAN.packs[pack]] for step in trainer.schedule.steps()
    )
    assert {*first, *second} == {*rows.reads}
    assert max(rows.reads.values()) <= 2, "a pack of the first step is compared with its samples"
    rows.reads.clear()
    folder = str(tmp_path / "checkpoint-1")
    resumed = follow_plan(tmp_path, rows, plan, resume_from_checkpoint=folder, **saves)
    assert not rows.reads
    resumed.train(resume_from_checkpoint=folder)
    assert {*second} == {*rows.reads}
    rows.reads.clear()
    follow_plan(tmp_path, rows, PLAN, **saves | {"max_steps": 1}).train()
    assert once == {index: min(1, number) for index, number in rows.reads.items()}, "a run that starts reads all"
    index = second[0]
    other = [*ROWS[:index], {name: [*values[:-1], 3] for name, values in ROWS[index].items()}, *ROWS[index + 1 :]]
    with pytest.raises(StaleError, match=rf"sample {index} .*digest was"):
        follow_plan(tmp_path, other, **saves).train(resume_from_checkpoint=folder)


def test_a_step_has_as_many_packs_as_it_had_rows(tmp_path, caplog):
    """
    The effective batch stays, one pack after the other, and what changes its meaning is told. No
    rate of packs is logged as one of samples.
    """
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "save_strategy": "steps"}
    trainer = trainer_with(tmp_path, eval_steps=5, warmup_steps=99, save_steps=400, **settings)
    trainer.args.max_length = max(PLAN.lengths)  # as TRL has it

    schedule = use_plan(trainer, PLAN)

    assert -(-len(PLAN.packs) // 12) == schedule.steps_per_epoch
    assert (1, 12) == (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps)
    told = ("trains 4 packs instead of a batch of 4 rows", "save_steps", "eval_steps", "warmup_steps", "max_length")
    assert all(name in caplog.text for name in told)
    metrics = trainer.train().metrics
    assert schedule.total_steps == trainer.state.global_step
    assert "train_steps_per_second" in metrics
    assert not [
        name for entry in (metrics, *trainer.state.log_history) for name in entry if "samples_per_second" in name
    ]


def test_a_number_plans_packs_of_the_trainer_s_own_rows(tmp_path, capsys):
    """As a plan of its lengths that is made by hand; one table is printed of what is trained."""
    trainer = trainer_with(tmp_path, eval_dataset=ROWS[:9])
    schedule = use_plan(trainer, PACKING_LENGTH, eval_plan=max(PLAN.lengths) + 1)

    assert PLAN.checksum == trainer.pack_batches.state.plan
    title, *table = capsys.readouterr().out.splitlines()
    assert "packplan: Trainer trains planned packs:" == title
    rows = dict(row.strip().split("  ", 1) for row in table)
    assert ["attention", "data", "packs", "plan", "training"] == sorted(rows.keys() - {"long"})
    assert PLAN.checksum[:12] == rows["plan"].strip()
    assert f"{schedule.steps_per_epoch} steps an epoch, {schedule.total_steps} in all on 1 rank" in rows["training"]


def test_a_run_prints_what_it_compares_and_where_it_goes_on(tmp_path, capsys):
    """Before the first step, which takes longer by it; a resumed run, what it has trained."""
    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    for folder in (None, str(tmp_path / "checkpoint-1")):
        trainer = follow_plan(tmp_path, **saves)
        capsys.readouterr()
        trainer.train(resume_from_checkpoint=folder)

        printed = " ".join(capsys.readouterr().out.split())
        (num,) = re.findall(
            r"comparing a pack of (\d+) samples? with its samples alone, before the first step", printed
        )
        assert f"{int(num) + 1} forward and backward passes" in printed
        assert bool(folder) == ("training continues after step 1: 1 pack of epoch 0 is trained" in printed)


SAVES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def train_with(trainer, resume=None, **methods):
    """Train with a callback of these methods of a trainer; return the loss of each step."""
    callback = TrainerCallback()
    for name, method in methods.items():
        setattr(callback, name, lambda *_, method=method, **__: method(trainer))
    trainer.add_callback(callback)
    status = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as ended:
        status = ended.code
    assert (143 if trainer.was_terminated else None) == status
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def kill_in_third_step(trainer):
    """Send SIGTERM to this process while the third step is trained."""
    if trainer.state.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def fresh_trainer(out, **given):
    """Return a trainer that follows the plan, with a model of its own."""
    return follow_plan(out, model=model_of("qwen2", "packplan"), **SAVES | given)


@pytest.mark.parametrize("host", ["transformers", "trl"])
def test_sigterm_saves_a_checkpoint_from_which_the_run_goes_on(host, tmp_path, capsys):
    """After the running step, with the losses of a run that was not stopped."""
    whole = train_with(fresh_trainer(tmp_path / "whole", host=host))
    before, trainer = signal.getsignal(signal.SIGTERM), fresh_trainer(tmp_path / "run", host=host)

    first = train_with(trainer, on_step_begin=kill_in_third_step)

    folder = str(tmp_path / "run" / "checkpoint-3")
    assert (True, 3, folder) == (trainer.was_terminated, trainer.state.global_step, trainer.last_save)
    assert before == signal.getsignal(signal.SIGTERM)
    said = " ".join(capsys.readouterr().out.split())
    assert f"SIGTERM: a checkpoint is saved at step 3 of 4; resume_from_checkpoint {folder} continues" in said
    assert whole == train_with(fresh_trainer(tmp_path / "run", host=host), resume=folder)
    assert whole[:3] == first


def test_nothing_comes_between_sigterm_and_the_end(tmp_path, monkeypatch):
    """Neither an evaluation, nor a second save of the checkpoint; a later `train` ends the plan."""
    by_epoch = {"save_strategy": "epoch", "eval_strategy": "epoch", "eval_dataset": ROWS, "eval_plan": PLAN}
    trainer, saved = fresh_trainer(tmp_path, **by_epoch), []
    save = trainer._save_checkpoint
    monkeypatch.setattr(
        trainer, "_save_checkpoint", lambda *given: (saved.append(trainer.state.global_step), save(*given))
    )

    train_with(trainer, on_step_begin=kill_in_third_step)

    assert [3] == saved
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.train(resume_from_checkpoint=True)
    assert (False, 4) == (trainer.was_terminated, trainer.state.global_step)


def test_a_process_that_a_callback_forks_ends_by_sigterm(tmp_path):
    """As it would without a plan; a pool of `multiprocessing` waits for this when it ends."""
    ended = []

    def fork(_):
        if child := os.fork():
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)

    trainer = fresh_trainer(tmp_path, max_steps=1)
    train_with(trainer, on_step_begin=fork)

    assert ([-signal.SIGTERM], False) == (ended, trainer.was_terminated)


def test_weights_alone_of_a_resumed_run_have_no_digests_to_miss(tmp_path, caplog):
    """Training goes on from them, as the trainer allows it, and says what starts again."""
    train_with(fresh_trainer(tmp_path, max_steps=2))
    train_with(fresh_trainer(tmp_path, save_only_model=True), resume=str(tmp_path / "checkpoint-2"))

    trainer, restarts = fresh_trainer(tmp_path, max_steps=5), "the optimizer and the learning-rate schedule start again"
    assert restarts not in caplog.text
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert 5 == trainer.state.global_step
    assert restarts in caplog.text


def test_a_changed_setting_of_a_resumed_run_is_told_with_both_values(tmp_path, capsys):
    """By the names that the script gives; a setting that is the same is not."""
    train_with(fresh_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=1))
    train_with(fresh_trainer(tmp_path, gradient_accumulation_steps=1), resume=str(tmp_path / "checkpoint-2"))
    given = {"per_device_train_batch_size": 2, "max_grad_norm": 0.5, "max_steps": 5, "gradient_accumulation_steps": 1}
    train_with(fresh_trainer(tmp_path, **given), resume=str(tmp_path / "checkpoint-4"))

    change = r"changed since \S+(\d), and this run's value is used: (\S+ was \S+, now \S+)"
    told = re.findall(change, " ".join(capsys.readouterr().out.split()))
    assert [
        ("2", "max_steps was '2', now '4'"),
        ("4", "max_grad_norm was '0.0', now '0.5'"),
        ("4", "max_steps was '4', now '5'"),
        ("4", "per_device_train_batch_size was '1', now '2'"),
    ] == told


@pytest.mark.parametrize("when", ["before", "in training"])
def test_a_handler_of_the_script_for_sigterm_is_kept(when, tmp_path):
    """It is called, stays after training, and training goes on to its end."""
    called = []

    def handle(*_):
        called.append(True)

    def install(_=None):
        signal.signal(signal.SIGTERM, handle)

    before, trainer = signal.getsignal(signal.SIGTERM), fresh_trainer(tmp_path)
    installs = {"on_train_begin": install} if when == "in training" else install() or {}
    try:
        train_with(trainer, on_step_begin=kill_in_third_step, **installs)
        assert handle == signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ([True], 4) == (called, trainer.state.global_step)


def test_a_changed_byte_of_any_file_is_found_before_a_resume_loads_it(tmp_path, monkeypatch):
    """Also a shorter file, and one that is gone."""
    train_with(fresh_trainer(tmp_path, max_steps=2))
    folder, loaded = tmp_path / "checkpoint-2", []
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda *_, **__: loaded.append(True))
    trainer, files = fresh_trainer(tmp_path), [path for path in folder.rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.pt", FACTS_FILE, "trainer_state.json"} < {one.name for one in files}
    for path in files:
        held = path.read_bytes()
        middle = len(held) // 2
        for other in (held[:middle] + bytes([held[middle] ^ 1]) + held[middle + 1 :], held[:-2], None):
            path.unlink() if other is None else path.write_bytes(other)
            with pytest.raises((ArgumentError, CorruptArtefactError)):
                trainer.train(resume_from_checkpoint=True)
        path.write_bytes(held)

    assert [] == loaded
    trainer.train(resume_from_checkpoint=True)
    assert [True] == loaded


@pytest.mark.parametrize("host", ["transformers", "trl"])
@pytest.mark.parametrize("says", [r"the (loss|gradient norm) of optimizer step 2", "eval_loss"])
def test_a_loss_that_is_not_finite_ends_the_run(host, says, tmp_path):
    """At once, also a gradient norm, and an evaluation that has no plan; nothing is saved."""
    evaluates = {"eval_strategy": "steps" if says == "eval_loss" else "no", "eval_steps": 1}
    evaluates["eval_plan"] = PLAN if host == "transformers" else None

    with pytest.raises(RunError, match=rf"{says} is (nan|inf), so the run ended"):
        train_with(fresh_trainer(tmp_path, host=host, learning_rate=1e30, warmup_steps=0, **evaluates))

    assert not [*tmp_path.glob("checkpoint-*")]


def test_what_is_no_checkpoint_is_refused_by_what_it_lacks(tmp_path):
    """And by the name of an older one, if there is one."""
    train_with(fresh_trainer(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-5").mkdir()
    older = "copy it again, or name another checkpoint, such as {}/checkpoint-{}"
    for name, fact in {
        "checkpoint-4": f"its optimizer.pt is missing: {older.format(tmp_path, 2)}",
        "checkpoint-5": f"has no trainer_state.json, which is written last into a checkpoint: "
        f"{older.format(tmp_path, 4)}",
        "file": "is a file: name the folder",
        "last": "or pass True for the last one (only packplan sft and rl take last)",
    }.items():
        with pytest.raises(ArgumentError, match=re.escape(fact)):
            fresh_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / name))


def test_weights_that_are_nan_are_not_saved(tmp_path):
    """The checkpoint before is the last, and no folder is begun."""
    trainer = fresh_trainer(tmp_path)

    def ruin(trainer):
        if trainer.state.global_step == 4:
            next(trainer.model.parameters()).data.view(-1)[0] = torch.nan

    with pytest.raises(RunError, match=r"the trained weights after optimizer step 4 \(.* is nan, so the run ended"):
        train_with(trainer, on_step_end=ruin)

    assert ["checkpoint-2"] == [one.name for one in tmp_path.glob("checkpoint-*")]


@pytest.mark.parametrize("host", ["transformers", "trl"])
def test_the_log_has_the_fill_and_tokens_of_each_step(host, tmp_path):
    """Those of its packs in the plan; at an epoch's end, of all its packs."""
    trainer = follow_plan(tmp_path, host=host, model=model_of("qwen2", "packplan"), num_train_epochs=1)

    train_with(trainer)

    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    packs = [[pack for (pack,) in step.batches] for step in trainer.schedule.steps()]
    loads = PLAN.packs.loads(PLAN.lengths)
    assert len(packs) == len(steps)
    for step, held in zip(steps, packs, strict=True):
        assert step["fill"] == pytest.approx(float(loads[held].mean()) / PACKING_LENGTH)
        assert step["samples_per_pack"] == pytest.approx(sum(len(PLAN.packs[pack]) for pack in held) / len(held))
        assert min(step["tokens_per_second"], step["work"]) > 0
    assert 1.0 == steps[-1]["coverage"]
    (epoch,) = (entry for entry in trainer.state.log_history if "epoch_fill_mean" in entry)
    assert epoch["epoch_fill_mean"] == pytest.approx(float(loads.mean()) / PACKING_LENGTH)


def test_a_packing_length_that_few_samples_fit_is_warned_of(tmp_path, caplog, capsys):
    """
    As when a number of rows is given in its place; with a length that most of them fit. So are
    samples with more tokens than the model has positions.
    """
    trainer = trainer_with(tmp_path)
    trainer.model.config.max_position_embeddings = 5
    use_plan(trainer, 4)

    longer = f"warning: {int((PLAN.lengths > 5).sum())} of {len(ROWS)} samples have more tokens than the 5 positions"
    assert f"{longer} of the model, up to {PLAN.lengths.max()}: " in " ".join(capsys.readouterr().out.split())
    assert f"of {len(ROWS)} samples are longer than a pack of 4 tokens, so each is a pack by itself" in caplog.text
    enough = sorted(PLAN.lengths)[-(-95 * (len(ROWS) - 1) // 100)]
    share = 100 * sum(length <= enough for length in PLAN.lengths.tolist()) // len(PLAN.lengths)
    assert f"With a packing length of {enough}, {share} % of the samples would fit" in caplog.text


def test_numbers_of_steps_that_nobody_chose_are_not_warned_of(tmp_path, caplog):
    """Neither of saving nor of evaluating, which takes the number of logging by default."""
    settings = {"save_strategy": "steps", "eval_strategy": "steps", "logging_steps": 500}  # by default, too
    use_plan(trainer := trainer_with(tmp_path, max_steps=1, **settings), PLAN)

    assert (500, 500) == (trainer.args.save_steps, trainer.args.eval_steps)
    assert not re.search("save_steps|eval_steps", caplog.text)


def mean_of_batch(outputs, labels, num_items_in_batch=None):
    """Return the mean over the tokens of a batch, whatever the step has."""
    return training.token_mean(outputs, labels)


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    """Return the token mean, with the sum of the rows' largest logits, which padding has too."""
    return (
        training.token_mean(outputs, labels, num_items_in_batch) + 1e-2 * outputs["logits"].amax() / num_items_in_batch
    )


def collate_across(rows):
    """Collate rows; each learns what the row before it begins with."""
    batch = pad_rows(rows)
    for row in range(1, len(rows)):
        batch["labels"][row, 1] = batch["input_ids"][row - 1, 0]
    return batch


def collate_wide(rows):
    """Collate rows whose tokens have positions of the whole pack."""
    batch = pad_rows(rows)
    positions = batch["attention_mask"].flatten().cumsum(0).view(batch["attention_mask"].shape) - 1
    return batch | {"position_ids": 7 * positions // len(rows)}


FAULTY = {
    "a mean over the batch": {"compute_loss_func": mean_of_batch},
    "a term of the batch": {"compute_loss_func": mean_of_rows},
    "labels of another row": {"data_collator": collate_across},
    "positions by the number of rows": {"data_collator": collate_wide},
}
"""Fault of a trainer that the probe of its model cannot see -> attributes that make it."""


@pytest.mark.parametrize("host", ["transformers", "trl"])
@pytest.mark.parametrize("fault", FAULTY)
def test_the_first_pack_is_compared_with_its_samples(tmp_path, fault, host):
    """Before weights change, unless the user leaves it out; training goes on as without."""
    weights = []
    for check in (True, False):
        trainer = trainer_with(tmp_path, host=host, model=model_of("qwen2", "packplan"), max_steps=1)
        vars(trainer).update(FAULTY[fault])
        before = [one.clone() for one in trainer.model.parameters()]
        use_plan(trainer, PLAN, check=check)
        with pytest.raises(MismatchError, match=r"pack \d+ .*; (divide|the loss agrees)") if check else nullcontext():
            trainer.train()
        weights.append(not all(map(torch.equal, before, trainer.model.parameters())))
    assert [False, True] == weights


def train_with_a_fault_on_one_rank(rank, out):
    """Train on this rank: the first one cannot compare, and the second one's labels are wrong."""
    trainer = follow_plan(out, host="trl", model=model_of("qwen2", "packplan"))
    if rank == 1:
        trainer.collate = PackInputs(collate_across)
    else:
        trainer.reference = None  # which is called between the passes of the pack and of its samples
    with pytest.raises(MismatchError, match=r"on rank 1, pack \d+ does not train like its \d+ samples alone: "):
        trainer.train()
    (out / f"ended{rank}").touch()


def train_other_runs(rank, out):
    """Differ from the other rank in arguments (also after `use_plan`), plan, rows or a fault."""

    def refused(key, rows=ROWS, plan=PLAN, *, error=MismatchError, metrics=None, row_ranks=1, **settings):
        trainer = trainer_with(out, rows, model=model_of("qwen2", "packplan"), **settings)
        trainer.compute_metrics = metrics
        with pytest.raises(error, match=key):
            use_plan(trainer, plan, sequence_parallel_size=row_ranks)
            trainer.args.learning_rate *= 1 + rank
            trainer.train()

    refused("learning_rate: 0.01 on rank 0; 0.02 on rank 1$", run_name=f"run {rank}", seed=rank, data_seed=1)
    refused("seed: 0 on rank 0; 1 on rank 1$", seed=rank)
    refused("weight_decay: 0.0 on rank 0; 0.1 on rank 1$", weight_decay=rank / 10)
    refused("rows of train_dataset: 20 on rank 0; 21 on rank 1$", ROWS[: 20 + rank], PACKING_LENGTH)
    refused("digest of row 0: .* on rank 0; .* on rank 1\n", ROWS[rank : 20 + rank], PACKING_LENGTH)
    refused("packing length of plan: 64 on rank 0; 65 on rank 1$", plan=PACKING_LENGTH + rank)
    refused(
        "compute_metrics is set", metrics=len if rank else None, row_ranks=2, error=ArgumentError if rank else RunError
    )
    (out / f"ended{rank}").touch()


class RowsOnDisk(list):
    """Rows on a disk that may fail, each time with the same error."""

    fails, error = False, OSError(5, "Input/output error", "rows.arrow")

    def __getitem__(self, index):
        if self.fails:
            raise self.error
        return super().__getitem__(index)


def read_what_one_rank_cannot(rank, out):
    """Fail on the second rank alone wherever files are read; both ranks name rank and file."""
    rows, saves = RowsOnDisk(ROWS), {"model": model_of("qwen2", "packplan"), **SAVES, "max_steps": 2}

    def ends(says, run, *given, error=OSError, **options):
        with pytest.raises(error if rank else RunError, match=says if rank else f"rank 1 failed: .*{says}"):
            run(*given, **options)

    trainer = follow_plan(out / "run", rows, eval_plan=PLAN, **saves)
    trainer.train()
    rows.fails = rank == 1
    ends("rows.arrow", trainer.evaluate)
    ends("rows.arrow", trainer.train)
    ends("rows.arrow", follow_plan, out / "run", rows, PACKING_LENGTH, **saves)
    (out / "none").mkdir(exist_ok=True)
    rows.fails, trainer.args.output_dir = False, str(out / ("none" if rank else "run"))
    with pytest.raises(MismatchError, match='checkpoint: "checkpoint-2" on rank 0; absent on rank 1'):
        trainer.train(resume_from_checkpoint=True)
    for name, (says, error) in DAMAGED.items():
        shutil.copytree(out / "run" / "checkpoint-2", folder := out / f"{name}{rank}" / "checkpoint-2")
        if rank:
            (folder / name).write_bytes(b"x" * 8 + (folder / name).read_bytes()[8:])
        ends(says, trainer.train, resume_from_checkpoint=str(folder), error=error)
    trainer.train(resume_from_checkpoint=str(out / "run" / "checkpoint-2"))
    (out / f"ended{rank}").touch()


DAMAGED = {
    "trainer_state.json": ("trainer_state.json", CorruptArtefactError),
    "model.safetensors": (
        "is .*checkpoint-2, whose weights this run cannot load: .*header too large; rest",
        ConfigError,
    ),
}
"""File of a checkpoint -> message, and error of the rank whose copy of it is damaged."""


@pytest.mark.parametrize("run", [train_with_a_fault_on_one_rank, train_other_runs, read_what_one_rank_cannot])
def test_a_fault_of_one_rank_ends_all(run, apart, tmp_path):
    """With the rank's name, though the other one has given up its own comparison midway."""
    apart(fork_ranks, 2, run, tmp_path, folder=tmp_path)

    assert 2 == len([*tmp_path.glob("ended*")])


def test_the_comparison_changes_nothing_of_the_training(tmp_path):
    """Losses, weights and random state, with dropout and checkpointed layers."""
    found = []
    for check in (True, False):
        model = model_of("qwen2", "packplan", attention_dropout=0.2)
        trainer = trainer_with(tmp_path, model=model, max_steps=2, gradient_checkpointing=True, neftune_noise_alpha=5)
        use_plan(trainer, PLAN, check=check)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, torch.get_rng_state(), [*trainer.model.parameters()]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert all(map(torch.equal, found[0][2], found[1][2]))


ALPHA = 5.0


def noise_of(model):
    """Return a list of the largest noise that embeddings add to each token, by call."""
    found = []

    def note(module, args, output):
        if module.neftune_noise_alpha:  # the comparison of the first pack adds none
            found.append((output - module.weight[args[0]]).abs().amax(-1).flatten().detach())

    model.get_input_embeddings().register_forward_hook(note)
    return found


def noise_due(lengths):
    """Return the bound of noise of each token, given the tokens by which it is scaled."""
    lengths = torch.as_tensor(lengths)
    return (ALPHA / (lengths * CONFIGS["qwen2"]["hidden_size"]).sqrt()).repeat_interleave(lengths)


def near_bound(found, due):
    """Whether noise stays below its bounds, and most of them are nearly reached."""
    return bool((found <= 1.0001 * due).all()) and float((found / due).mean()) > 0.93


@pytest.mark.parametrize("host", ["transformers", "trl"])
def test_noise_is_that_of_each_sample_alone(host, tmp_path):
    """NEFTune's, which shrinks with the tokens of a row, is scaled by those of the sample."""
    trainer = trainer_with(tmp_path, host=host, model=model_of("qwen2", "packplan"), max_steps=2)
    trainer.neftune_noise_alpha = ALPHA
    use_plan(trainer, PLAN)
    found = []

    train_with(trainer, on_train_begin=lambda trainer: found.append(noise_of(trainer.model)))

    packs = [pack for step in [*trainer.schedule.steps()][:2] for (pack,) in step.batches]
    assert len(packs) == len(found[0])
    for pack, noise in zip(packs, found[0], strict=True):
        assert near_bound(noise, noise_due([int(PLAN.lengths[index]) for index in PLAN.packs[pack]]))


def test_noise_of_a_row_is_scaled_by_its_samples():
    """Where positions tell the samples, as in `packplan sft` and the plugin."""
    model = model_of("qwen2").train()
    trainer = SimpleNamespace(
        model=model, neftune_noise_alpha=ALPHA, neftune_hook_handle=activate_neftune(model, ALPHA)
    )
    ids, positions = torch.arange(20, 60)[None], torch.cat([torch.arange(8), torch.arange(32)])[None]

    with following.noise_by_sample(trainer):
        found = noise_of(model)
        model(input_ids=ids, position_ids=positions)

    assert near_bound(found[0], noise_due([8, 32]))


def test_noise_without_padding_is_that_of_the_padded_call():
    """By the width of the batch, and not by the tokens of the row that is computed."""
    model = model_of("qwen2").train()
    unpad(model)
    activate_neftune(model, ALPHA)
    mask = torch.arange(40) < torch.tensor([[40], [7], [25]])
    ids = torch.arange(20, 140).view(3, 40) * mask

    found = noise_of(model)
    model(input_ids=ids, attention_mask=mask.long())

    (noise,) = (one for one in found if len(one) == mask.sum())
    assert near_bound(noise, noise_due([40])[:1])


def experts_that_balance(weight):
    """Return a tiny mixture of experts whose routers have a loss of this weight."""
    sizes = CONFIGS["qwen2"] | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes, output_router_logits=True, router_aux_loss_coef=weight)
    return AutoModelForCausalLM.from_config(config, attn_implementation="packplan")


def routed_losses(out, weight, row_ranks=1):
    """Train a step of three packs; return its loss."""
    trainer = trainer_with(out, model=experts_that_balance(weight), gradient_accumulation_steps=3, max_steps=1)
    trainer.eval_dataset = None
    use_plan(trainer, PLAN, sequence_parallel_size=row_ranks)
    trainer.train()
    return trainer, next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def share_rows_of_experts(rank, out):
    """Write the loss of a step on ranks that share each row."""
    _, loss = routed_losses(out, 0.5, row_ranks=2)
    (out / f"loss{rank}").write_text(str(loss))


def test_the_loss_of_routers_counts_once_in_a_step(apart, tmp_path):
    """As the mean over its packs by their supervised tokens, also where two ranks share a row."""
    trainer, loss = routed_losses(tmp_path, 0.5)
    _, plain = routed_losses(tmp_path, 0.0)
    model, each = experts_that_balance(0.5), []
    for (pack,) in next(iter(trainer.schedule.steps())).batches:
        batch = trainer.collate([trainer.train_packs[pack]])
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        row = flatten(trainer.train_packs[pack])
        each.append((tokens, float(model(**row, use_cache=False).aux_loss.detach())))
    due = sum(tokens * aux for tokens, aux in each) / sum(tokens for tokens, _ in each)

    apart(fork_ranks, 2, share_rows_of_experts, tmp_path, folder=tmp_path)

    assert loss - plain == pytest.approx(0.5 * due, rel=1e-3)
    assert [loss] * 2 == pytest.approx([float((tmp_path / f"loss{rank}").read_text()) for rank in range(2)], rel=1e-5)


def test_an_epoch_that_is_stopped_early_is_followed_by_the_next(tmp_path):
    """Whose packs are served from the first."""
    trainer, stop = follow_plan(tmp_path, num_train_epochs=2), TrainerCallback()
    stop.on_step_end = lambda _, state, control, **__: setattr(control, "should_epoch_stop", state.global_step == 1)
    trainer.add_callback(stop)

    trainer.train()

    assert 1 + trainer.schedule.steps_per_epoch == trainer.state.global_step


def count_learned(trainer):
    """Return the supervised tokens of an epoch of a trainer."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in trainer.get_train_dataloader())


def collate_last_tokens(rows):
    """Collate padded rows that learn their last token alone."""
    width = 8 * -(-max(len(row["input_ids"]) for row in rows) // 8)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[place < len(row["input_ids"]) for place in range(width)] for row in rows]).long()
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~last | (mask == 0), -100)}


def test_the_collator_says_what_is_learned(tmp_path):
    """One's own, and TRL's, which is told not to use a mask of completions."""
    trainer = trainer_with(tmp_path)
    trainer.data_collator = collate_last_tokens
    use_plan(trainer, PLAN)
    assert sum(PLAN.lengths > 1) == count_learned(trainer)

    rows = [row | {"labels": row["input_ids"], "completion_mask": [0] * len(row["input_ids"])} for row in ROWS]
    trainer = trainer_with(tmp_path, rows, "trl", completion_only_loss=False, pad_to_multiple_of=8)
    alone = count_learned(trainer)
    use_plan(trainer, PLAN)
    assert alone == count_learned(trainer) > 0


@pytest.mark.parametrize("divides", [True, False])
def test_an_evaluation_without_a_plan_is_the_trainer_s_own(divides, tmp_path):
    """Also of a row without labels, and of a model that takes no divisor."""
    rows = [*ROWS[:3], {**ROWS[3], "labels": [-100] * len(ROWS[3]["labels"])}]
    losses = []
    for plans in (False, True):
        trainer = trainer_with(tmp_path, eval_dataset=rows, per_device_eval_batch_size=1)
        trainer.model_accepts_loss_kwargs = divides
        if plans:
            use_plan(trainer, PLAN)
        losses.append(trainer.evaluate()["eval_loss"])

    assert losses[0] == pytest.approx(losses[1], nan_ok=True)


def test_an_evaluation_without_anything_to_learn_has_no_loss(tmp_path):
    untaught = [row | {"labels": [-100] * len(row["input_ids"])} for row in ROWS]

    found = follow_plan(tmp_path, eval_dataset=untaught, eval_plan=PLAN).evaluate()

    assert {"eval_runtime"} == {"eval_loss", "eval_runtime"} & found.keys()


def test_the_page_has_the_methods_of_trainers_that_are_replaced():
    """By class: what a new version of a host may change."""
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \| (`.*`) \|$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    classes = vars(following) | vars(telemetry) | vars(training)
    if find_spec("swift"):
        classes |= vars(import_module("packplan.adapters.swift.training"))
    for name, methods in table:
        if name in classes:
            own = {one for one in vars(classes[name]) if hasattr(Trainer, one) and not one.startswith("__")}
            assert own == set(re.findall(r"`(\w+)`", methods)), name
    assert 9 == len(table)
