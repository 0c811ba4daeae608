"""Processes that load data, and what a run says last: lines for people, and no traceback."""

import _thread
import multiprocessing
import os
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from packplan.adapters.loaders.packs import PackLoader
from packplan.adapters.processes import wrap_process_errors
from packplan.adapters.ranks.heartbeat import Heartbeat
from packplan.adapters.trainer.loader import PackedDataset
from packplan.adapters.trainer.trainer import PlanTrainer
from packplan.app import sft
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_splits
from packplan.core.errors import RunError

pytestmark = pytest.mark.slow

TEXT = {"max_steps": 1, "packing_drop_last": False}


def kill_itself(*_) -> None:
    """End a process as the kernel does where memory runs out; never that of the tests."""
    assert multiprocessing.parent_process() is not None
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_ends_the_run_with_a_line(write_run, monkeypatch, capfd):
    """What happened, and the keys that need less memory; exit status 2."""
    monkeypatch.setattr(PackedDataset, "__getitem__", kill_itself)

    status = sft.main([str(write_run("qwen2", training={**TEXT, "dataloader_num_workers": 1}))])

    said = capfd.readouterr().err
    assert 2 == status
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "loading data failed: DataLoader worker (pid" in line
    assert "lower training.dataloader_num_workers (now 1; 0 loads in the training process)" in line
    assert said.endswith(f"{line}\n")
    assert "Traceback" not in said


def test_processes_measure_as_one_does_and_one_that_is_killed_is_named_with_its_key(write_run):
    """What was measured before it was handed over; no pool is left."""
    source = open_splits(read_config(write_run()))["train"].source
    source._workers, source.pool_start_s = 2, 0.0
    alone = source.measure_batch(range(40), in_full=True)
    assert alone == list(source.measure_many(range(40), in_full=False))

    batch = source.measure_batch
    source.measure_batch = lambda *a, **k: kill_itself() if multiprocessing.parent_process() else batch(*a, **k)
    outcomes = source.measure_many(range(40), in_full=True)

    assert alone[:16] == [next(outcomes) for _ in range(16)]
    said = r"^measuring samples failed: .*terminated.*packing_length_precompute_workers \(now 2; 1 measures"
    with pytest.raises(RunError, match=said):
        next(outcomes)
    assert [] == multiprocessing.active_children()


@pytest.mark.parametrize(
    ("said", "error", "advice"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", RunError, "lower it, or give the machine"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", RunError, "lower it, or give the machine"),
        ("Too many open files. Communication with the workers is no longer possible.", RunError, "ulimit -n"),
        ("DataLoader timed out after 600.0 seconds", RunError, "with the sample's media"),
        ("CUDA error: out of memory", RuntimeError, ""),
    ],
)
def test_what_torch_says_of_lost_workers_is_named(said, error, advice):
    """With what to do about it; memory of a GPU is not that of a process that loads."""
    with pytest.raises(error) as raised, wrap_process_errors("loading data", "lower it"):
        raise RuntimeError(said)

    assert error is raised.type
    assert said.strip().rstrip(".") in str(raised.value)
    assert advice in str(raised.value)


def test_a_run_says_last_where_its_checkpoint_is_and_what_loads_it(server, write_run):
    """A command that loads the folder, run as the console command with ms-swift's defaults."""
    defaults = {"gradient_checkpointing": True, "dataloader_num_workers": 1}
    run = server.packplan("sft", write_run("qwen2", training={**TEXT, **defaults, "save_strategy": "epoch"}))

    done, *rows = re.sub(r"( \\)?\n {4,}", " ", run.said).splitlines()[-4:]
    checkpoint, numbers, command = (row.strip().partition("  ")[2].strip() for row in rows)
    assert "packplan: 1 optimizer step is done:" == done
    shown = r"packplan: step 1/1  loss [\d.]+  lr [\de.+-]+  fill [\d.]+ +[\d,]+ tokens/s  0s left\n"
    assert 1 == len(re.findall(shown, run.said))
    assert "packplan: step 1/1  saved checkpoint-1\n" in run.said
    assert Path(numbers).is_file()
    assert (Path(checkpoint) / "model.safetensors").is_file()
    kinds = ["--model_type", "qwen2", "--template", "qwen2_5"]
    assert ["swift", "infer", "--model", checkpoint, *kinds] == shlex.split(command)
    assert "  plan " in run.said
    assert " an epoch, 1 in all on 1 rank" in run.said
    assert "Traceback" not in run.said


PRESSED: list[bool] = []

os.register_at_fork(before=lambda: PRESSED and PRESSED.pop() and _thread.interrupt_main())


ARGUMENTS = SimpleNamespace(
    device=None, dataloader_num_workers=1, dataloader_pin_memory=False, dataloader_persistent_workers=False,
    dataloader_prefetch_factor=None,
)  # fmt: skip


@pytest.mark.parametrize(
    "start", [lambda: list(PackLoader([1], ARGUMENTS)), lambda: Heartbeat(HashStore())], ids=["loader", "heartbeat"]
)
def test_ctrl_c_while_processes_start_is_not_lost(start):
    """Noticed in a callback of their fork, where errors are swallowed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in its background
    PRESSED.append(True)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert not PRESSED
    assert signal.default_int_handler is signal.getsignal(signal.SIGINT)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def whole_lines(text: str) -> list[str]:
    """Return the lines of a log, each in one part."""
    return text.replace("\n  ", " ").splitlines()


def test_ctrl_c_says_which_checkpoint_has_how_much(write_run, monkeypatch, capfd):
    """The folder that goes on, and the step it was at; and the way to go on, last."""
    path = write_run("qwen2", training={**TEXT, "save_strategy": "steps", "save_steps": 1, "max_steps": 3})
    plain = PlanTrainer.training_step

    def interrupted(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            raise KeyboardInterrupt
        return plain(trainer, *args, **kwargs)

    monkeypatch.setattr(PlanTrainer, "training_step", interrupted)
    assert 130 == sft.main([str(path)])

    *_, said, last = whole_lines(capfd.readouterr().err)
    steps, _, checkpoint = said.partition("; the last checkpoint is ")
    assert "packplan: warning: interrupted after 2 optimizer steps" == steps
    assert (Path(checkpoint) / "model.safetensors").is_file()
    assert checkpoint.endswith("checkpoint-2")
    assert last.startswith("interrupted: ")

    keys = {**TEXT, "save_strategy": "no", "max_steps": 3, "resume_from_checkpoint": "last"}
    assert 130 == sft.main([str(write_run("qwen2", training=keys))])
    assert said == whole_lines(capfd.readouterr().err)[-2]


@pytest.mark.parametrize(("steps", "status"), [(2, 143), (1, 0)])
def test_sigterm_before_the_last_step_is_told_by_the_exit_status(write_run, monkeypatch, capfd, steps, status):
    """So `packplan sft run.yaml && evaluate` stops; a run whose last step is done has succeeded."""
    plain = PlanTrainer.training_step
    sent = lambda *args, **kwargs: (os.kill(os.getpid(), signal.SIGTERM), plain(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(PlanTrainer, "training_step", sent)

    assert status == sft.main([str(write_run("qwen2", training={**TEXT, "max_steps": steps}))])
    assert (status == 143) == ("SIGTERM: a checkpoint is saved" in capfd.readouterr().err)
