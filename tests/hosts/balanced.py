"""Steps of TRL's trainers of answers on made batches, for tests of `balance`."""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from packplan.adapters.hf.refusals import is_old_trl
from packplan.hf import balance
from tests.e2e.unpad_rank import shard, whole
from tests.hosts.law import CONFIGS, fork_ranks, tokenizer

ROWS, PROMPT, ANSWER = 4, 6, 20

NEAR = {"GRPOTrainer": 1e-12 if is_old_trl() else 1e-6, "RLOOTrainer": 1e-12 if is_old_trl() else 1e-6}
"""Relative differences of float64; the head of newer TRL takes float32."""

MEANS_OF_RANKS = ("entropy", "kl", "clip_ratio")
"""Beginnings of values of which older TRL logs a mean or extreme of the ranks' means."""


def trainer_of(host: str, out: Any, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a trainer as its users make it, of a model whose weights tell rows apart."""
    adapters = settings.pop("peft_config", None)
    common = {
        "output_dir": str(out), "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2, "bf16": False,
        "report_to": [], "use_cpu": True, "seed": 1, "disable_tqdm": True, "save_strategy": "no", "max_steps": 2,
        "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0.0, "optim": "sgd", "num_generations": 2,
        "max_completion_length": ANSWER, "beta": 0.0,
        ("gradient_checkpointing" if is_old_trl() else "activation_checkpointing"): False,
    } | settings  # fmt: skip
    torch.manual_seed(0)
    sizes = CONFIGS["qwen2"] | {"vocab_size": 60, "initializer_range": 0.3, "pad_token_id": 0, "use_cache": False}
    config = AutoConfig.for_model("qwen2", **sizes)
    return getattr(trl, host)(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype),
        args=getattr(trl, host.replace("Trainer", "Config"))(**common),
        reward_funcs=lambda completions, **_: [float(number % 3) for number in range(len(completions))],
        train_dataset=Dataset.from_dict({"prompt": ["<end>"] * 64}),
        processing_class=tokenizer(),
        peft_config=adapters,
    )


def batch_of(seed: int, longest: float = 1.0) -> dict[str, Any]:
    """Return a batch as generation makes it; perhaps of short answers."""
    draw = torch.Generator().manual_seed(seed)
    prompt_mask = padded(torch.randint(1, PROMPT + 1, (ROWS,), generator=draw), PROMPT).flip(1)
    mask = padded(torch.randint(1, int(ANSWER * longest) + 1, (ROWS,), generator=draw), ANSWER)
    logps = -torch.rand(2, *mask.shape, generator=draw, dtype=torch.float64) * 4 * mask
    return {
        "prompt_ids": ids_of(prompt_mask, draw), "prompt_mask": prompt_mask, "completion_ids": ids_of(mask, draw),
        "completion_mask": mask, "advantages": torch.randn(ROWS, generator=draw, dtype=torch.float64),
        "old_per_token_logps": logps[0], "ref_per_token_logps": logps[1], "old_logps": -5.5 * mask.sum(1).double(),
        "num_items_in_batch": torch.tensor(97),
    }  # fmt: skip


def padded(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return masks of rows of these lengths."""
    return (torch.arange(width) < lengths[:, None]).long()


def ids_of(mask: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return tokens of rows, padded with 0."""
    return torch.randint(2, 60, mask.shape, generator=draw) * mask


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one batch of all rows."""
    return {
        key: torch.cat([one[key] for one in batches]) if first.dim() else first for key, first in batches[0].items()
    }


def step_of(trainer: Any, batches: list[dict[str, Any]], model: Any = None) -> dict[str, Any]:
    """Return loss, gradients and logged values of a step, as the trainer's loop makes it."""
    model = model or trainer.model
    trainer._buffered_inputs, trainer._step, trainer.num_iterations = batches, len(batches), 10**9
    trainer.args.steps_per_generation = len(batches)
    model.zero_grad()
    given, num_items = trainer.get_batch_samples(iter([dict(batch) for batch in batches]), len(batches), "cpu")
    trainer.current_gradient_accumulation_steps = len(batches)
    loss: Any = 0.0
    for number, batch in enumerate(given, 1):
        with trainer.accelerator.no_sync(model) if number < len(given) else nullcontext():
            loss = loss + trainer.training_step(model, batch, num_items)
    logged = trainer._metrics["train"]
    found = {
        "loss": loss,
        "gradients": {
            name: whole(one.grad).clone() for name, one in trainer.model.named_parameters() if one.requires_grad
        },
        "logged": {name: sum(values) / len(values) for name, values in logged.items() if name != "step_time"},
    }
    logged.clear()
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
    for loss, share in (("dapo", None), ("dr_grpo", shard), ("bnpo", None)):
        trainer = trainer_of("GRPOTrainer", "out", loss_type=loss, ddp_find_unused_parameters=False)
        model = (share or trainer.accelerator.prepare)(trainer.model)
        batches = [batch_of(10 * rank + number, longest=1 / (1 + rank)) for number in (0, 1)]
        own, once = step_of(trainer, batches, model), step_of(trainer, [joined(batches)], model)
        counts = balance(trainer, max_tokens=70)
        new = step_of(trainer, batches, model)
        # The mean over ranks is what a trainer logs; DDP has the mean of the gradients.
        for found in (own, new):
            found["loss"] = trainer.accelerator.reduce(found["loss"], reduction="mean")
        held = trainer.accelerator.gather(torch.tensor([[counts.microbatches, counts.tokens, counts.moved]])).tolist()
        assert nearness(own, new) < NEAR["GRPOTrainer"], (loss, nearness(own, new))
        assert held[0][0] == held[1][0] > 1
        assert (loss == "bnpo") == (held[0][2] == held[1][2] == 0)
        if loss != "bnpo":
            assert abs(held[0][1] - held[1][1]) < 0.2 * held[0][1]  # the ranks' own rows: half as many
        for name, value in once["logged"].items():
            if not (is_old_trl() and name.startswith(MEANS_OF_RANKS)):
                assert new["logged"][name] == pytest.approx(value, rel=1e-6, abs=1e-7), (loss, name)


def main() -> int:
    """Return 0 if two ranks hold."""
    return int(not fork_ranks(2, lambda _: be_rank()))
