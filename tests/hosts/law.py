"""Trains a plan in real trainers beside its samples alone, each cell in processes of its own."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import packplan as pp
from packplan.hf import use_plan
from packplan.testing import assert_step_loss
from tests.e2e.alone import Gradients, step_alone, token_losses
from tests.hosts.pages import HOSTED
from tests.nearness import FLOAT32, apart
from tests.verdicts import keep_verdicts

# isort: split
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Trainer, TrainingArguments

keep_verdicts()

PACKING_LENGTH, EPOCHS = 64, 2

DEADLINE_S = 600

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
    "qwen2_5_vl": _SEES | {
        "text_config": _TEXT | {"rope_parameters": _MROPE},
        "vision_config": _TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
    },
    "qwen3_vl": _SEES | {
        "text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
        "vision_config": _TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    },
}  # fmt: skip

Cell = dict[str, Any]


def cell_of(trainer: str, model: str, ranks: int = 1, accumulation: int = 1, workers: int = 0, **others: Any) -> Cell:
    """Return a run; `kill_after` is a step, `killed_ranks` those of the run it goes on with."""
    own = {"trainer": trainer, "model": model, "ranks": ranks, "accumulation": accumulation, "workers": workers}
    return own | others


_TEXTS = [("transformers", "qwen2", *rest) for rest in ((1, 1, 2), (1, 3, 0), (2, 1, 0), (2, 3, 2))]
_TEXTS += [("trl", "qwen2", *rest) for rest in ((1, 1, 0), (1, 3, 2), (2, 1, 2), (2, 3, 0))]
"""Every two settings in each trainer, and every three in one: TRL's inherits from transformers'."""

_SEEING = [("transformers", model, *rest) for model in ("qwen2_5_vl", "qwen3_vl") for rest in ((1, 3, 0), (2, 1, 2))]

_SMOKE = [("transformers", "qwen2_5_vl", 2, 3, 2), ("trl", "qwen2", 1, 3, 0)]

_RESUMED = [("transformers", 2, 1)]
"""Trainer, and ranks before and after a kill."""
if HOSTED:
    _RESUMED = [*(("transformers", *ranks) for ranks in ((1, 1), (1, 2), (2, 1), (2, 2))), ("trl", 1, 2), ("trl", 2, 1)]

CELLS = {"-".join(map(str, given)): [cell_of(*given)] for given in (_TEXTS + _SEEING if HOSTED else _SMOKE)}
CELLS |= {
    f"{trainer}, {before} killed, {after} go on": [
        cell_of(trainer, "qwen2", before, 2, kill_after=2), cell_of(trainer, "qwen2", after, 2, killed_ranks=before)
    ]
    for trainer, before, after in _RESUMED
}  # fmt: skip
if HOSTED:
    CELLS["both ranks compute each row"] = [cell_of("transformers", "qwen2_5_vl", 2, 3, row_ranks=2)]
    for trainer, model in (("transformers", "qwen2"), ("trl", "qwen2"), ("transformers", "qwen2_5_vl")):
        CELLS[f"{trainer}, {model}, both ranks compute long rows"] = [
            cell_of(trainer, model, 2, 3, row_ranks="auto", packing_length=32)
        ]
"""Name -> runs after one another in one folder."""


def model_of(name: str, attention: str = "sdpa", kind: Any = None, **keys: Any) -> Any:
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    kind = kind or (AutoModelForCausalLM if name == "qwen2" else AutoModelForImageTextToText)
    return kind.from_config(AutoConfig.for_model(name, **CONFIGS[name] | keys), attn_implementation=attention)


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
        rows.append(row | {"input_ids": ids, "labels": [-100] * learned + ids[learned:]})
    return rows


class Watch(Gradients):
    """Callback that keeps each step's weights and gradients, and kills the process after one."""

    def __init__(self, kill_after: int | None) -> None:
        super().__init__()
        self.weights: list[dict[str, torch.Tensor]] = []
        self._kill_after = kill_after

    def on_step_begin(self, args, state, control, *, model, **_):
        self.weights.append({name: weight.detach().clone() for name, weight in model.state_dict().items()})

    def on_step_end(self, args, state, control, **_):
        control.should_save = self._kill_after is not None

    def on_save(self, args, state, control, **_):
        if state.global_step == self._kill_after:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


class WatchBatches(Watch):
    """Keeps what reaches the model, too."""

    def __init__(self, trainer: Any, kill_after: int | None) -> None:
        super().__init__(kill_after)
        self.batches: list[list[int]] = []
        self._trainer = trainer
        trainer.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, _: Any, given: dict[str, Any]) -> None:
        if model.training and not (self._trainer._checks_first_pack or self._trainer.unpadding.is_trial):
            self.batches.append(given["input_ids"][given["attention_mask"] != 0].tolist())


def arguments(kind: Any, out: Path, **settings: Any) -> Any:
    """Return arguments of a trainer on a CPU, which saves and shows nothing."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    common = {"use_cpu": True, "bf16": False, "seed": 1, "per_device_train_batch_size": 1, "num_train_epochs": 1}
    return kind(str(out), **quiet | common | settings)


PLAIN_STEPS = {"max_grad_norm": 0.0, "optim": "sgd"}


def trainer_of(cell: Cell, model: Any, rows: Any, out: Path, eval_dataset: Any = None, **settings: Any) -> Trainer:
    """Return the trainer of a cell, as its users make it."""
    common = {
        "gradient_accumulation_steps": cell["accumulation"], "num_train_epochs": EPOCHS, "learning_rate": 1e-2,
        "dataloader_num_workers": cell["workers"], "ddp_find_unused_parameters": cell["model"] != "qwen2",
        "restore_callback_states_from_checkpoint": True, "include_num_input_tokens_seen": "non_padding",
    } | PLAIN_STEPS | settings  # fmt: skip
    if cell["trainer"] == "transformers":
        args = arguments(TrainingArguments, out, **common)
        return Trainer(model, args, train_dataset=rows, eval_dataset=eval_dataset or rows)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = arguments(SFTConfig, out, **common, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
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


def train(rank: int, cell: Cell, out: Path) -> None:
    """Train a cell on this rank; assert that it trains the schedule, as its samples alone."""
    sys.stderr = (out / f"errors{rank}.txt").open("w", buffering=1)
    rows, model, alone = rows_of(cell["model"]), model_of(cell["model"], "packplan"), model_of(cell["model"])
    plan = pp.plan([len(row["input_ids"]) for row in rows], cell.get("packing_length", PACKING_LENGTH))
    assert cell.get("row_ranks") == "auto" or len(plan.packs) % 2, "two ranks repeat a pack"
    trainer, row_ranks = trainer_of(cell, model, rows, out / "run"), cell.get("row_ranks", 1)
    use_plan(trainer, plan.raw.packing_length, eval_plan=plan, sequence_parallel_size=row_ranks)  # the same plan
    asked = assert_step_loss(trainer)
    watch = WatchBatches(trainer, cell.get("kill_after"))
    trainer.add_callback(watch)
    killed_ranks = cell.get("killed_ranks", 0)
    trainer.train(resume_from_checkpoint=bool(killed_ranks))

    schedule = trainer.schedule
    start, ranks = schedule.start, [list(schedule.steps(rank=one)) for one in range(schedule.world_size)]
    assert 2 * 2 * killed_ranks == len(schedule.consumed_packs(start.epoch)), "two steps of two batches were done"
    packs = [pack for step in ranks[rank // (1 if row_ranks == "auto" else row_ranks)] for (pack,) in step.batches]
    wanted = [[token for sample in plan.packs[pack] for token in rows[sample]["input_ids"]] for pack in packs]
    assert wanted == watch.batches != []
    assert schedule.total_steps == trainer.state.global_step == start.step + len(watch.steps)
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    epochs = [entry["epoch"] for entry in logged.values()]
    assert epochs == sorted(epochs)
    assert EPOCHS == epochs[-1], "the last epoch is whole"
    assert killed_ranks or [asked.loss, asked.due] == pytest.approx([logged[1]["loss"]] * 2, rel=FLOAT32)
    seen = 0
    for number, steps in enumerate(zip(*ranks, strict=True) if rank == 0 else ()):
        alone.load_state_dict(watch.weights[number])
        shared = [pack for one, step in enumerate(steps) for place, (pack,) in enumerate(step.batches)
                  if not step.ranks or step.ranks[place][0] == one]  # fmt: skip
        samples = [rows[index] for pack in shared for index in plan.packs[pack]]
        seen += sum(len(sample["input_ids"]) for sample in samples)
        due = step_alone(alone, samples)
        if not killed_ranks:
            told = logged[steps[0].number]
            assert told["num_input_tokens_seen"] == told.get("num_tokens", seen) == seen, "a shared row counts once"
        assert logged[steps[0].number]["loss"] == pytest.approx(due.loss, rel=FLOAT32)
        assert apart(watch.steps[number], due.gradients) < FLOAT32
    alone.load_state_dict(trainer.model.state_dict())
    with torch.no_grad():
        mean = torch.cat([token_losses(alone, row) for row in rows]).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(mean), rel=FLOAT32)
    (out / f"held{rank}").touch()


def fork_ranks(num: int, run: Any, *given: Any) -> bool:
    """
    Call *run* with the rank and what is given, on ranks as torchrun starts them; return whether all
    ended well, and in time.

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
    deadline = time.monotonic() + DEADLINE_S
    for one in ranks:
        one.join(max(deadline - time.monotonic(), 0))
        one.kill()
        one.join()
    return not any(one.exitcode for one in ranks)


def make(folder: str) -> None:
    """Write a tiny `model` and tokenized `rows`, as a page's reader has them."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from tools.demo.tiny_models import learn_tokenizer

    model, text = Path(folder) / "model", "red blue a circle"
    model_of("qwen2").save_pretrained(model)
    words = learn_tokenizer([text], vocabulary=270)
    words.save_pretrained(model)
    # A tokenizer of another kind would be read as Qwen's, and its words as nothing.
    assert words(text)["input_ids"] == AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    rows = [row for row in rows_of("qwen2") for _ in range(12)]  # a killed run is far from its end
    Dataset.from_list(rows).save_to_disk(Path(folder) / "rows")


def main(folder: str) -> None:
    """Run all cells, each in processes and in a folder of its own."""
    for name, cells in CELLS.items():
        (out := Path(folder, name)).mkdir()
        for cell in cells:
            fork_ranks(cell["ranks"], train, cell, out)
