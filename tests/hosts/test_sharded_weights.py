"""Trainers train the same without padding and by plans where ranks share the model's weights."""

import os
import re
import runpy
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import ZipFile

import pytest

pytest.importorskip("deepspeed")

# isort: split
import torch
import torch.distributed as dist
import trl
from accelerate.commands import launch as accelerate_launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

import packplan as pp
from packplan.adapters.models import find_sharded_weight
from packplan.core.errors import ArgumentError
from packplan.hf import row_lengths, unpad, use_plan
from tests.e2e import unpad_rank
from tests.e2e.alone import step_alone
from tests.e2e.plugin_run import change_a_byte
from tests.e2e.rank_main import forget_deepspeed, kill_within_the_third_step
from tests.hosts.law import IMAGE, arguments, model_of, rows_of, tokenizer
from tests.hosts.pages import own_callbacks
from tests.nearness import norm
from tests.processes import ROOT, finished

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

_WORDS = ["red", "blue " * 3, "a circle of many words " * 4, "bars " * 9]

_PAIRS = {"prompt": _WORDS * 4, "chosen": _WORDS * 4, "rejected": _WORDS[::-1] * 4}

_KTO = {"prompt": _WORDS * 4, "completion": _WORDS[::-1] * 4, "label": [True, True, False, True] * 4}

_ROWS = {name: [[7 + one % 3] * (1 + 5 * one % 17) for one in range(16)] for name in ("input_ids", "labels")}

_SEEN = [row for row in rows_of("qwen2_5_vl") if "pixel_values" in row][:8]


def blind(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with words in the place of its image."""
    ids, labels = ([7 if one == IMAGE else one for one in row[name]] for name in ("input_ids", "labels"))
    return {"input_ids": ids, "labels": labels, "mm_token_type_ids": [0] * len(ids)}


_SEEN[::2] = map(blind, _SEEN[::2])

build = partial(model_of, "qwen2", pad_token_id=0, eos_token_id=1)

BUILDS = {
    "RewardTrainer": partial(build, kind=AutoModelForSequenceClassification, num_labels=1),
    "Trainer, images": partial(model_of, "qwen2_5_vl"),
}
"""Host -> its model, if it is not a causal language model."""


def settings_of(stage: int) -> dict[str, Any] | None:
    """Return settings of DeepSpeed, under which the smallest weight is shared too."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero} | dict.fromkeys(auto, "auto") if stage else None


def stage_of(case: str) -> int:
    return int(case[len("ZeRO ")]) if "ZeRO" in case else 0


def trainer_of(host: str, case: str, folder: Path, **more: Any) -> Any:
    """Return a trainer as its users make it, whose model is made before or after its arguments."""
    adapters = "adapters" in case
    forget_deepspeed()  # of the case before
    keys = {"per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "disable_tqdm": True}
    keys |= {"deepspeed": settings_of(stage_of(case)), "gradient_checkpointing": adapters, **more}
    if "images" in host:
        keys["optim"] = "sgd"  # Adam makes steps of noise where gradients are zero, as those of biases of keys
    make = BUILDS.get(host, build)
    models = [make(), make()] if "built first" in case else []
    if host == "KTOTrainer":
        keys |= {"loss_type": "apo_zero_unpaired", "remove_unused_columns": False}
    config = getattr(trl, host.replace("Trainer", "Config"), TrainingArguments)
    args = arguments(config, folder, **keys)
    model, reference = models or (make(), make())
    if host == "DPOTrainer":
        given = {"peft_config": LoraConfig(init_lora_weights=False)} if adapters else {"ref_model": reference}
        rows = Dataset.from_dict(_PAIRS)
        return trl.DPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer(*_WORDS), **given)
    if host == "KTOTrainer":
        rows = Dataset.from_dict(_KTO)
        return trl.KTOTrainer(model, reference, args=args, train_dataset=rows, processing_class=tokenizer(*_WORDS))
    if host == "RewardTrainer":
        pairs = Dataset.from_dict({name: _PAIRS[name] for name in ("chosen", "rejected")})
        return trl.RewardTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer(*_WORDS))
    if "images" in host:
        trainer = Trainer(model, args, train_dataset=_SEEN)
        if case == "FSDP 2":  # accelerate shares weights on GPUs alone
            unpad_rank.shard_seen(model)
            trainer.accelerator.prepare_model = lambda model, **_: model
        return trainer
    collate = DataCollatorForTokenClassification(tokenizer(*_WORDS))
    return Trainer(model, args, collate, train_dataset=Dataset.from_dict(_ROWS))


def numbers_of(trainer: Any, **options: Any) -> list[float]:
    """Train, and return loss and gradient norm of each step."""
    trainer.train(**options)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [float(step[name]) for step in steps for name in ("loss", "grad_norm")]


def compare(folder: str, host: str, case: str) -> None:
    """Train with and without padding: losses and gradient norms are the same."""
    make = partial(trainer_of, host, case, Path(folder))
    with own_callbacks():
        due, trainer = numbers_of(make()), make()
        models = [one for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]
        hooks = [unpad(one) for one in models]
        found = numbers_of(trainer)
    assert due == pytest.approx(found, rel=1e-6)
    assert len(due) == 6
    assert (stage_of(case) == 3) == (find_sharded_weight(trainer.model) is not None)
    assert all(0 < one.counts.real < one.counts.padded for one in hooks)


def follow(folder: str, host: str) -> None:
    """Train a plan at each stage: losses and gradient norms are the same, with images as alone."""
    found = {}
    with own_callbacks():
        for case in PLANNED[host]:
            trainer = trainer_of(host, case, Path(folder))
            lengths = row_lengths(trainer)
            schedule = use_plan(trainer, pp.plan(lengths, max(20, max(lengths) + 9)))
            assert bool(stage_of(case)) == trainer.is_deepspeed_enabled
            found[case] = numbers_of(trainer)
    assert len(found["ZeRO 0"]) == 6
    if "images" in host:
        steps = [next(iter(schedule.steps(rank=rank))) for rank in range(2)]
        packs = [[trainer.train_packs.packs[pack] for (pack,) in step.batches] for step in steps]
        sees = [[any("pixel_values" in _SEEN[one] for one in pack) for pack in own] for own in packs]
        assert sees[0] != sees[1], "one rank's batch has an image, and the other's none"
        due = step_alone(BUILDS[host](), [_SEEN[one] for own in packs for pack in own for one in pack])
        assert found["ZeRO 0"][:2] == pytest.approx([due.loss, norm(due.gradients)], rel=1e-6)
    for case, numbers in found.items():
        assert found["ZeRO 0"] == pytest.approx(numbers, rel=1e-6, abs=1e-7), (host, case)


def saving(case: str, folder: Path) -> Any:
    """Return a trainer that follows a plan, and saves after each step of two batches."""
    keys = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = trainer_of("Trainer", case, folder, **keys, restore_callback_states_from_checkpoint=True)
    use_plan(trainer, 40)
    return trainer


def be_killed(folder: str, case: str) -> None:
    """Follow a plan, and end within the third step."""
    torch.use_deterministic_algorithms(mode=False)
    with own_callbacks():
        kill_within_the_third_step(trainer := saving(case, Path(folder, "killed")))
        trainer.train()


def go_on(folder: str, case: str) -> None:
    """Resume as if nothing had been, from a checkpoint without a changed byte alone."""
    torch.use_deterministic_algorithms(mode=False)
    at, resume = Path(folder, "killed"), {"resume_from_checkpoint": True}
    with own_callbacks():
        due = numbers_of(saving(case, Path(folder, "whole")))
        trainer = saving(case, at)
        found = numbers_of(trainer, **resume)
        assert trainer.schedule.start.step == 2
        assert due == found
        dist.barrier()  # all have written their parts
        assert parts_of(Path(folder, "whole")) == parts_of(at)
        (last,) = at.glob("checkpoint-4/*/*zero_pp_rank_1_*optim_states.pt")
        dist.barrier()  # all have read them
        if dist.get_rank():
            change_a_byte(last)
        dist.barrier()
        with pytest.raises(
            ArgumentError, match=f"checkpoint-4 cannot be resumed from: its global_step4/{last.name} is"
        ):
            saving(case, at).train(**resume)
    dist.destroy_process_group()


def parts_of(folder: Path) -> dict[str, list[int]]:
    """Return the checksum of each tensor that DeepSpeed has saved after the last step, by file."""
    files = {path.name: ZipFile(path).infolist() for path in folder.glob("checkpoint-4/global_step4/*.pt")}
    assert len(files) > 2
    return {name: [one.CRC for one in entries if "/data/" in one.filename] for name, entries in files.items()}


PLANNED = {
    "Trainer": ["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3, built first"],
    "Trainer, images": ["ZeRO 0", "ZeRO 2", "ZeRO 3, built first", "FSDP 2"],
    **{host: ["ZeRO 0", "ZeRO 2", "ZeRO 3, built first"] for host in ("DPOTrainer", "RewardTrainer", "KTOTrainer")},
}
"""Trainer -> cases of a plan: FSDP, or stage of ZeRO, 0 for DDP; if the model is built first."""

CASES = {
    "Trainer": ["ZeRO 1", "ZeRO 2, built first", "ZeRO 3, built first", "ZeRO 3"],
    "DPOTrainer": ["ZeRO 1, built first", "ZeRO 2", "ZeRO 3, built first", "ZeRO 3", "ZeRO 3, adapters"],
}
"""Trainer -> cases without padding."""


def main(folder: str, host: str) -> int:
    """Run the cases of a host in one process group."""
    torch.use_deterministic_algorithms(mode=False)
    for case in CASES.get(host, []):
        compare(folder, host, case)
    if host not in CASES:
        for planned in PLANNED:
            follow(folder, planned)
    dist.destroy_process_group()
    return 0


def test_a_loop_computes_the_same_where_ranks_share_weights(server, tmp_path):
    """Further ways to share weights, families and orders of the calls, on two ranks."""
    assert [0, 0] == finished(server.ranks(2, unpad_rank.main, *unpad_rank.MORE, folder=tmp_path))


@pytest.mark.parametrize("host", [*CASES, "plans"])
def test_a_trainer_computes_the_same_where_ranks_share_weights(host, server, tmp_path):
    """TRL's DPO with its reference, Trainer, and plans, pairs and images too, on two ranks."""
    assert [0, 0] == finished(server.ranks(2, main, str(tmp_path), host, folder=tmp_path))


@pytest.mark.parametrize("case", ["ZeRO 2", "ZeRO 3, built first"])
def test_a_killed_run_goes_on_where_ranks_share_weights(case, server, tmp_path):
    """Bit for bit, and parts of the optimizer too; a changed byte of one ends all ranks."""
    killed = server.ranks(2, be_killed, str(tmp_path), case, folder=tmp_path)
    assert [-signal.SIGKILL] * 2 == finished(killed)
    assert [0, 0] == finished(server.ranks(2, go_on, str(tmp_path), case, folder=tmp_path))


def launch(folder: str, *words: str) -> int:
    """Run a file of the page as a rank of `accelerate launch`, whose variables are set."""
    os.chdir(folder)
    sys.argv = [*words]
    with own_callbacks():
        runpy.run_path(words[0], run_name="__main__")
    return 0


def test_the_command_of_the_page_trains_under_zero_3(server, reader):
    """Pairs and a reference model on two ranks, by the page's own settings of accelerate."""
    at = reader("transformers")
    shutil.copy(ROOT / "docs" / "examples" / "zero3.yaml", at.folder)
    _, _, *words = next(words for words in at.commands if "zero3.yaml" in words)
    words[1] = str(at.folder / words[1])
    with mock.patch.object(accelerate_launch, "deepspeed_launcher") as launched:
        accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(words))
    (given,) = launched.call_args.args
    _, told = prepare_deepspeed_cmd_env(given)
    told = {name: value for name, value in told.items() if name not in os.environ}

    script = [given.training_script, *given.training_script_args]
    ranks = server.ranks(2, launch, str(at.folder), *script, folder=at.folder, env=told)

    assert [0, 0] == finished(ranks)
    real, padded = map(int, re.search(r"real=(\d+), padded=(\d+)", ranks[0].said).groups())
    assert 0 < real < padded
    assert "3" == told["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
