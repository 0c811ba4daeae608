"""Steps of TRL's trainers on made batches, for tests of `balance`."""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from packplan.adapters.hf.refusals import is_old_trl
from packplan.hf import balance
from tests.e2e.unpad_rank import shard, whole
from tests.hosts.law import CONFIGS, fork_ranks, tokenizer

ROWS, PROMPT, ANSWER = 4, 6, 20
PAIRED = ("DPOTrainer", "RewardTrainer")

NEAR = {"Trainer": 1e-6, "SFTTrainer": 1e-6, "RewardTrainer": 1e-12}
NEAR |= dict.fromkeys(("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer"), 1e-12 if is_old_trl() else 1e-6)
"""Relative differences of float64; transformers' loss and the head of newer TRL take float32."""

MEANS_OF_RANKS = ("entropy", "kl", "clip_ratio")
"""Beginnings of values of which older TRL logs a mean or extreme of the ranks' means."""


def model_of(*, rewards: bool = False, dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    """Return a tiny model whose weights are large enough to tell rows apart."""
    torch.manual_seed(0)
    size = (
        CONFIGS["qwen2"] | {"vocab_size": 60, "initializer_range": 0.3, "pad_token_id": 0, "use_cache": False} | sizes
    )
    config = AutoConfig.for_model("qwen2", **size, **({"num_labels": 1} if rewards else {}))
    kind = AutoModelForSequenceClassification if rewards else AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="sdpa").to(dtype)


def trainer_of(host: str, out: Any, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a trainer as its users make it."""
    adapters = settings.pop("peft_config", None)
    common = {
        "output_dir": str(out), "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2, "bf16": False,
        "report_to": [], "use_cpu": True, "seed": 1, "disable_tqdm": True, "save_strategy": "no", "max_steps": 2,
        "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0.0, "optim": "sgd",
        ("gradient_checkpointing" if is_old_trl() else "activation_checkpointing"): False,
    } | settings  # fmt: skip
    model = model_of(rewards=host == "RewardTrainer", dtype=dtype)
    ids = [list(range(2, 4 + number % 3)) for number in range(64)]
    data: dict[str, Any] = {"prompt_ids": ids, "chosen_ids": ids, "rejected_ids": ids, "input_ids": ids, "labels": ids}
    if host == "Trainer":
        return Trainer(model, TrainingArguments(**common), train_dataset=Dataset.from_dict(data))
    if host in ("GRPOTrainer", "RLOOTrainer"):
        data = {"prompt": ["<end>"] * 64}
        common |= {"num_generations": 2, "max_completion_length": ANSWER, "beta": 0.0}
    config = getattr(trl, host.replace("Trainer", "Config"))
    given: dict[str, Any] = {"processing_class": tokenizer(), "peft_config": adapters}
    given["train_dataset"] = Dataset.from_dict(data)
    if host in ("GRPOTrainer", "RLOOTrainer"):
        given["reward_funcs"] = lambda completions, **_: [float(number % 3) for number in range(len(completions))]
    if host == "SFTTrainer":
        common |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
    if host in ("DPOTrainer", "KTOTrainer"):
        given["ref_model"] = model_of(dtype=dtype, initializer_range=0.2) if adapters is None else None
        common |= {"max_length": 18}  # older TRL truncates in the loss
    if host in ("DPOTrainer", "RewardTrainer", "KTOTrainer"):
        data = {"prompt": ["<end>"] * 64, "chosen": ["<end>"] * 64, "rejected": ["<pad>"] * 64}
        if host == "KTOTrainer":
            data = {"prompt": ["<end>"] * 64, "completion": ["<end>"] * 64, "label": [True, False] * 32}
        given["train_dataset"] = Dataset.from_dict(data)
    return getattr(trl, host)(model, args=config(**common), **given)


def batch_of(host: str, draw: torch.Generator, rows: int = ROWS, longest: float = 1.0) -> dict[str, Any]:
    """Return a batch as the host's collator, or its generation, makes it; perhaps of short rows."""

    def drawn(low: int, high: int, num: int = rows) -> torch.Tensor:
        return torch.randint(low, high, (num,), generator=draw)

    if host in ("GRPOTrainer", "RLOOTrainer"):
        prompt_mask = padded(drawn(1, PROMPT + 1), PROMPT).flip(1)
        mask = padded(drawn(1, int(ANSWER * longest) + 1), ANSWER)
        logps = -torch.rand(2, *mask.shape, generator=draw, dtype=torch.float64) * 4 * mask
        return {
            "prompt_ids": ids_of(prompt_mask, draw), "prompt_mask": prompt_mask, "completion_ids": ids_of(mask, draw),
            "completion_mask": mask, "advantages": torch.randn(rows, generator=draw, dtype=torch.float64),
            "old_per_token_logps": logps[0], "ref_per_token_logps": logps[1], "old_logps": -5.5 * mask.sum(1).double(),
            "num_items_in_batch": torch.tensor(97),
        }  # fmt: skip
    both = rows * (2 if host in ("DPOTrainer", "RewardTrainer") else 1)
    mask = padded(drawn(4, int((PROMPT + ANSWER) * longest), both), PROMPT + ANSWER)
    batch = {"input_ids": ids_of(mask, draw), "attention_mask": mask}
    if host == "RewardTrainer":
        return batch | {"margin": torch.rand(rows, generator=draw)}
    learned = mask * (torch.arange(mask.shape[1]) >= drawn(1, 4, both)[:, None])
    if host in ("SFTTrainer", "Trainer"):
        return batch | {"labels": batch["input_ids"].masked_fill(learned == 0, -100)}
    if host == "KTOTrainer":
        batch["label"] = drawn(0, 2) == 1
    return batch | {"completion_mask": learned}


def padded(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return masks of rows of these lengths."""
    return (torch.arange(width) < lengths[:, None]).long()


def ids_of(mask: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return tokens of rows, padded with 0."""
    return torch.randint(2, 60, mask.shape, generator=draw) * mask


def joined(host: str, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one batch of all rows."""
    batch = {}
    for key, first in batches[0].items():
        if not first.dim():
            batch[key] = first
            continue
        halves = [one[key].chunk(2) if host in PAIRED and len(one[key]) > ROWS else [one[key]] for one in batches]
        batch[key] = torch.cat([one for part in zip(*halves, strict=True) for one in part])
    return batch


def step_of(trainer: Any, batches: list[dict[str, Any]], model: Any = None) -> dict[str, Any]:
    """Return loss, gradients and logged values of a step, as the trainer's loop makes it."""
    model = model or trainer.model
    if hasattr(trainer, "_buffered_inputs"):
        trainer._buffered_inputs, trainer._step, trainer.num_iterations = batches, len(batches), 10**9
        trainer.args.steps_per_generation = len(batches)
    model.zero_grad()
    given, num_items = trainer.get_batch_samples(iter([dict(batch) for batch in batches]), len(batches), "cpu")
    trainer.current_gradient_accumulation_steps = len(batches)
    loss: Any = 0.0
    for number, batch in enumerate(given, 1):
        with trainer.accelerator.no_sync(model) if number < len(given) else nullcontext():
            loss = loss + trainer.training_step(model, batch, num_items)
    logged = getattr(trainer, "_metrics", {"train": {}})["train"]
    found = {
        "loss": loss,
        "gradients": {
            name: whole(one.grad).clone() for name, one in trainer.model.named_parameters() if one.requires_grad
        },
        "logged": {name: sum(values) / len(values) for name, values in logged.items() if name != "step_time"},
    }
    logged.clear()
    trainer._total_train_tokens = 0
    return found


def nearness(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of the losses and of the gradients of two steps."""
    size = sum(value.square().sum() for value in one["gradients"].values()).sqrt()
    apart = sum((value - other["gradients"][name]).square().sum() for name, value in one["gradients"].items()).sqrt()
    return max(float(abs(one["loss"] / other["loss"] - 1)), float(apart / size))


def be_rank() -> None:
    """Hold steps of two ranks against the trainers' own; an error fails the rank."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for host, loss, share in (
        ("DPOTrainer", "sigmoid", None), ("DPOTrainer", "sigmoid", shard), ("SFTTrainer", "nll", None),
        ("GRPOTrainer", "dapo", None), ("GRPOTrainer", "bnpo", None),
    ):  # fmt: skip
        trainer = trainer_of(host, "out", loss_type=loss, ddp_find_unused_parameters=False)
        model = (share or trainer.accelerator.prepare)(trainer.model)
        batches = [
            batch_of(host, torch.Generator().manual_seed(10 * rank + number), longest=1 / (1 + rank))
            for number in (0, 1)
        ]
        own, once = step_of(trainer, batches, model), step_of(trainer, [joined(host, batches)], model)
        counts = balance(trainer, max_tokens=70)
        new = step_of(trainer, batches, model)
        # The mean over ranks is what a trainer logs; DDP has the mean of the gradients.
        for found in (own, new):
            found["loss"] = trainer.accelerator.reduce(found["loss"], reduction="mean")
        held = trainer.accelerator.gather(torch.tensor([[counts.microbatches, counts.tokens, counts.moved]])).tolist()
        assert nearness(own, new) < NEAR[host], (host, loss, nearness(own, new))
        assert held[0][0] == held[1][0] > 1
        assert (loss == "bnpo") == (held[0][2] == held[1][2] == 0)
        if loss != "bnpo":
            assert abs(held[0][1] - held[1][1]) < 0.2 * held[0][1]  # the ranks' own rows: half as many
        for name, value in once["logged"].items():
            if not (is_old_trl() and name.startswith(MEANS_OF_RANKS)):
                assert new["logged"][name] == pytest.approx(value, rel=1e-6, abs=1e-7), (host, name)


def main() -> int:
    """Return 0 if two ranks hold."""
    return int(not fork_ranks(2, lambda _: be_rank()))
