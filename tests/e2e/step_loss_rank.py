"""One rank of trainers and loops whose steps are asked about, sound or faulty."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import nn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from packplan.core.errors import PackplanError
from packplan.testing import assert_step_loss

LENGTHS = (20, 3, 9, 31, 12, 5, 26, 14)

PACKS = [[0, 5, 7], [1], [2, 3], [4, 6]]
"""Packs of the step; each rank of two has two."""

WORDS = 50


def rows() -> list[dict[str, list[int]]]:
    """Return samples whose first two tokens are not learned."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for length in LENGTHS:
        ids = torch.randint(1, WORDS, (length,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return found


def llama() -> Any:
    """Return a tiny model that attends within samples, by positions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.3, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
    return model


class Loop:
    """A loop of torch: packs are batches, and gradients are averaged over the ranks."""

    def __init__(self, *, rank: int, ranks: int) -> None:
        self.model, self.ranks = llama(), ranks
        collator = DataCollatorWithFlattening(return_tensors="pt")
        self.batches = [dict(collator([rows()[index] for index in pack])) for pack in PACKS[rank::ranks]]
        self.own = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in self.batches)
        """Supervised tokens of this rank."""

    def step(self, divide: Callable[[torch.Tensor, int], torch.Tensor], *, reduced: bool = True) -> float:
        """Run a step; *divide* makes a batch's loss of its sum and its supervised tokens."""
        reported = torch.zeros(())
        for batch in self.batches:
            logits, labels = self.model(**batch).logits[0, :-1], batch["labels"][0, 1:]
            loss = divide(F.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum()))
            loss.backward()
            reported += loss.detach()
        dist.all_reduce(reported)
        for weight in self.model.parameters() if reduced else ():
            dist.all_reduce(weight.grad)
            weight.grad /= self.ranks
        return float(reported) / self.ranks


def loop_cases(rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return loops that divide the loss in some way."""
    loop, learned = Loop(rank=rank, ranks=ranks), sum(LENGTHS) - 2 * len(LENGTHS)

    def of(divide: Callable[[torch.Tensor, int], torch.Tensor], **options: Any) -> Callable[[], Any]:
        return lambda: assert_step_loss(lambda: loop.step(divide, **options), model=loop.model)

    def stepping() -> float:
        with torch.no_grad():
            next(loop.model.parameters()).add_(0.0)
        return 0.0

    def unlabelled() -> float:
        return float(loop.model(input_ids=loop.batches[0]["input_ids"]).logits.sum())

    return {
        "sound": of(lambda total, _: total * ranks / learned),
        "accumulation is not divided by": of(lambda total, count: total / count),
        "world size twice": of(lambda total, _: total / learned),
        "ranks of unequal token counts": of(lambda total, _: total / loop.own),
        "gradients stay apart": of(lambda total, _: total * ranks / learned, reduced=False),
        "no update belongs in it": lambda: assert_step_loss(stepping, model=loop.model),
        "nothing is computed": lambda: assert_step_loss(lambda: 1.0, model=loop.model),
        "nothing is labelled": lambda: assert_step_loss(unlabelled, model=loop.model),
    }


class NotDivided(Trainer):
    """The sum over the batches of their means, as before the fix of gradient accumulation."""

    def _get_num_items_in_batch(self, *_: Any, **__: Any) -> None:
        return None

    loss_is_scaled_for_ga = True


def trainer_of(kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    """Return a trainer of transformers, whose first step has all rows."""
    args = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=2, report_to=[], use_cpu=True, max_steps=2, disable_tqdm=True,
        gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]), save_strategy="no", logging_steps=1,
        learning_rate=1e-2, **settings,
    )  # fmt: skip
    args.max_epochs = None  # ms-swift's callbacks, which it gives all trainers, ask for it
    return kind(llama(), args, train_dataset=rows(), data_collator=DataCollatorWithFlattening())


TRAINERS: dict[str, dict[str, Any]] = {
    "trainer": {},
    "trainer in bfloat16": {"bf16": True},
    "trainer not divided": {"kind": NotDivided},
    "trainer with ranks of unequal token counts": {"average_tokens_across_devices": False},
    "trainer smooths labels": {"label_smoothing_factor": 0.1},
}
"""Trainers of transformers, sound and with a fault."""


def trained(*, asked: bool) -> list[float]:
    """Return the losses and weights of a trainer with dropout that perhaps was asked before."""
    trainer = trainer_of()
    if asked:
        assert_step_loss(trainer)
        assert trainer.optimizer is None
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, *(float(one.double().sum()) for one in trainer.model.parameters())]


def outcome(run: Callable[[], Any]) -> str:
    """Return what an assertion returns or raises."""
    try:
        return str(run())
    except PackplanError as error:
        return f"{type(error).__name__}: {error}"


def main(out: str) -> None:
    """Be one rank, and write the outcome of each case."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    cases = loop_cases(rank, ranks) | {
        name: lambda options=options: assert_step_loss(trainer_of(**options)) for name, options in TRAINERS.items()
    }
    found = {name: outcome(run) for name, run in cases.items()}
    found["trainer trains on"] = json.dumps([trained(asked=asked) for asked in (True, False)])
    Path(out, f"found{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
