"""Trains from a plan in real trainers, each cell of a file in processes of its own."""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import packplan as pp
from packplan.hf import use_plan
from packplan.testing import assert_step_loss

# isort: split
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

PACKING_LENGTH, EPOCHS = 64, 2

IMAGE, FIRST, LAST = 290, 20, 280
"""Id of the token of an image, and the range of ids of text."""

_TEXT = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip

_TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32, "patch_size": 14,
}  # fmt: skip

_SEES = {
    "image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293,
}  # fmt: skip

_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": _TEXT,
    "qwen2_5_vl": {
        "text_config": _TEXT | {"rope_parameters": _MROPE},
        "vision_config": _TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
        **_SEES,
    },
    "qwen3_vl": {
        "text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
        "vision_config": _TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        **_SEES,
    },
}


def model_of(name: str, attention: str) -> Any:
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **CONFIGS[name])
    kind = AutoModelForCausalLM if name == "qwen2" else AutoModelForImageTextToText
    return kind.from_config(config, attn_implementation=attention)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return samples of 1 to 60 tokens, whose first tokens are not learned; some with an image."""
    draw = np.random.default_rng(1)
    rows = []
    for length in [1, 2, *draw.integers(3, 60, 25).tolist()]:
        ids = draw.integers(FIRST, LAST, length).tolist()
        row: dict[str, Any] = {}
        if name != "qwen2" and length > 20:
            high, wide = 2 * int(draw.integers(1, 3)), 4
            ids[2 : 2 + high * wide // 4] = [IMAGE] * (high * wide // 4)
            ids[1] = _SEES["vision_start_token_id"]
            row["image_grid_thw"] = torch.tensor([[1, high, wide]])
            row["pixel_values"] = torch.tensor(draw.normal(size=(high * wide, 3 * 2 * 14 * 14)), dtype=torch.float32)
        if name != "qwen2":
            row["mm_token_type_ids"] = [int(one == IMAGE) for one in ids]
        learned = int(draw.integers(0, length + 1))
        row |= {"input_ids": ids, "labels": [-100] * learned + ids[learned:]}
        rows.append(row)
    return rows


class Watch(TrainerCallback):
    """Keeps what reached the model, and the weights and gradients of each step."""

    def __init__(self, model: Any, kill_after: int | None) -> None:
        self.batches: list[list[int]] = []
        self.steps: list[dict[str, Any]] = []
        self._kill_after = kill_after
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, _: Any, given: dict[str, Any]) -> None:
        if model.training:
            self.batches.append(given["input_ids"][given["attention_mask"] != 0].tolist())

    def on_step_begin(self, args, state, control, *, model, **_):
        self.weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}

    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        self.steps.append({"number": state.global_step + 1, "weights": self.weights, "gradients": gradients})

    def on_step_end(self, args, state, control, **_):
        control.should_save = self._kill_after is not None

    def on_save(self, args, state, control, **_):
        if state.global_step == self._kill_after:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def cell_of(trainer: str, model: str, ranks: int = 1, accumulation: int = 1, workers: int = 0) -> dict[str, Any]:
    """Return a cell of the matrix."""
    return {"trainer": trainer, "model": model, "ranks": ranks, "accumulation": accumulation, "workers": workers}


def trainer_of(
    cell: dict[str, Any], model: Any, rows: Any, out: Path, eval_dataset: Any = None, **settings: Any
) -> Trainer:
    """Return the trainer of a cell, as its users make it."""
    common = {
        "output_dir": str(out), "per_device_train_batch_size": 1, "gradient_accumulation_steps": cell["accumulation"],
        "num_train_epochs": EPOCHS, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "seed": 5, "disable_tqdm": True, "max_grad_norm": 0.0, "optim": "sgd", "bf16": False,
        "dataloader_num_workers": cell["workers"], "ddp_find_unused_parameters": cell["model"] != "qwen2",
    } | settings  # fmt: skip
    if cell["trainer"] == "transformers":
        return Trainer(model, TrainingArguments(**common), train_dataset=rows, eval_dataset=eval_dataset or rows)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**common, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
    data = Dataset.from_list(rows)
    return SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer())


def tokenizer(*texts: str) -> Any:
    """Return a tokenizer of some texts' words, and of four more."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict.fromkeys(["<pad>", "<end>", "red", "blue", "a", "circle", *" ".join(texts).split()])
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<pad>"))  # noqa: S106  # no password
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")  # noqa: S106


def train(cell: dict[str, Any], rank: int) -> None:
    """Train a cell on this rank, and write what was found."""
    out, rows = Path(cell["out"]), rows_of(cell["model"])
    model = model_of(cell["model"], "packplan")
    plan = pp.plan([len(row["input_ids"]) for row in rows], PACKING_LENGTH)
    trainer = trainer_of(cell, model, rows, out / "run")
    row_ranks = cell.get("row_ranks", 1)
    use_plan(trainer, plan, eval_plan=plan, sequence_parallel_size=row_ranks)
    asked = assert_step_loss(trainer)
    watch = Watch(model, cell.get("kill_after"))
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=True if cell.get("resume") else None)
    schedule = trainer.schedule  # where it began
    first = schedule.start.step
    steps = list(schedule.steps(rank=rank // row_ranks))
    wanted = [tokens_of(rows, plan, pack) for step in steps for (pack,) in step.batches]
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    found = {
        "batches": watch.batches == wanted,
        "packs": [[step.epoch, pack] for step in steps for (pack,) in step.batches],
        "consumed": schedule.consumed_packs(schedule.start.epoch).tolist(),
        "order": schedule.order(schedule.start.epoch).tolist(),
        "epoch": schedule.start.epoch,
        "logged": [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry],
        "steps": [len(watch.steps), schedule.total_steps - first, trainer.state.global_step],
        "asked": [asked.loss, asked.due, losses[min(losses)]],
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    if rank == 0:
        ranks = [list(schedule.steps(rank=other)) for other in range(schedule.world_size)]
        found |= differences(cell, plan, watch.steps, ranks, losses)
        found["alone"] = evaluated_alone(cell, rows, trainer.model.state_dict())
        found["num_packs"] = len(plan.packs)
    (out / f"found{rank}.json").write_text(json.dumps(found))


def tokens_of(rows: list[dict[str, Any]], plan: pp.Plan, pack: int) -> list[int]:
    """Return the token ids of a pack."""
    return [token for sample in plan.packs[pack] for token in rows[sample]["input_ids"]]


def differences(
    cell: dict[str, Any], plan: pp.Plan, taken: list[Any], ranks: list[Any], losses: Any
) -> dict[str, float]:
    """Return the largest relative differences of the steps from their samples alone."""
    model, rows = model_of(cell["model"], "sdpa"), rows_of(cell["model"])
    worst = {"loss": 0.0, "gradients": 0.0}
    for number, step in enumerate(taken):
        model.load_state_dict(step["weights"])
        model.zero_grad()
        packs = [pack for rank in ranks for (pack,) in rank[number].batches]
        samples = [rows[sample] for pack in packs for sample in plan.packs[pack]]
        tokens = sum(supervised_tokens(row) for row in samples)
        loss = sum(loss_alone(model, row) for row in samples if supervised_tokens(row)) / tokens
        loss.backward()
        mine = dict(model.named_parameters())
        apart = sum((step["gradients"][name] - mine[name].grad).square().sum() for name in step["gradients"])
        size = sum(mine[name].grad.square().sum() for name in step["gradients"])
        assert {name for name, one in mine.items() if one.grad is not None} <= set(step["gradients"])
        worst["gradients"] = max(worst["gradients"], float((apart / size).sqrt()))
        worst["loss"] = max(worst["loss"], abs(losses[step["number"]] / float(loss.detach()) - 1))
    return worst


def supervised_tokens(row: dict[str, Any]) -> int:
    """Return the number of tokens of a row that are learned."""
    return sum(label != -100 for label in row["labels"][1:])


def loss_alone(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Return the sum of a sample's losses, alone in a batch."""
    given = {key: torch.tensor([value]) for key, value in row.items() if isinstance(value, list)}
    given |= {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
    return model(**given).loss * supervised_tokens(row)


def evaluated_alone(cell: dict[str, Any], rows: list[dict[str, Any]], weights: Any) -> float:
    """Return the mean loss over all supervised tokens, each sample by itself."""
    model = model_of(cell["model"], "sdpa")
    model.load_state_dict(weights)
    with torch.no_grad():
        total = sum(float(loss_alone(model, row)) for row in rows if supervised_tokens(row))
    return total / sum(map(supervised_tokens, rows))


def be_rank(rank: int, cell: dict[str, Any]) -> None:
    """Run a cell as one of its ranks."""
    sys.stderr = (Path(cell["out"]) / f"errors{rank}.txt").open("w", buffering=1)
    train(cell, rank)


def fork_ranks(num: int, run: Any, *given: Any) -> bool:
    """
    Call *run* with the rank and what is given, on ranks as torchrun starts them; return whether all
    ended well.

    Their store is kept here, so that no other process can take its port first.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> None:
        torch.set_num_threads(1)
        if num > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num), LOCAL_WORLD_SIZE=str(num),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
        run(rank, *given)
        if torch.distributed.is_initialized():  # one that is gone may not have sent what another one waits for
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    ranks = [multiprocessing.get_context("fork").Process(target=start, args=(rank,)) for rank in range(num)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return not any(one.exitcode for one in ranks)


def make(folder: str) -> None:
    """Write a tiny `model` and tokenized `rows`, as a page's reader has them."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from tools.demo.tiny_models import learned_tokenizer

    model, text = Path(folder) / "model", "red blue a circle"
    model_of("qwen2", "sdpa").save_pretrained(model)
    words = learned_tokenizer([text], vocabulary=270)
    words.save_pretrained(model)
    # A tokenizer of another kind would be read as Qwen's, and its words as nothing.
    assert words(text)["input_ids"] == AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    rows = [row for row in rows_of("qwen2") for _ in range(12)]  # a killed run is far from its end
    Dataset.from_list(rows).save_to_disk(Path(folder) / "rows")


def main(path: str) -> None:
    """Run the cells of a file, each in processes of its own."""
    for cell in json.loads(Path(path).read_text()):
        Path(cell["out"]).mkdir(parents=True, exist_ok=True)
        fork_ranks(cell["ranks"], be_rank, cell)
