"""No setting of a trainer is silently another training: it is equal, or refused by name."""

import contextlib
from itertools import product

import pytest

pytest.importorskip("trl")

# isort: split
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

import packplan as pp
from packplan.core.errors import ArgumentError, MismatchError
from packplan.hf import row_lengths, unpad, use_plan
from packplan.testing import assert_step_loss, assert_unpadded_equal
from tests.hosts.law import arguments, model_of, tokenizer
from tests.hosts.pages import HOSTED

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

_WORDS = ["red", "blue " * 3, "a circle of many words " * 4, "bars " * 9]

_IDS = [[7 + one % 3] * (1 + 5 * one % 17) for one in range(16)]

_TEXTS = {"chosen": _WORDS * 2, "rejected": _WORDS[::-1] * 2}

ROWS = {
    "Trainer": {"input_ids": _IDS, "labels": _IDS},
    "SFTTrainer": {"prompt": _WORDS * 2, "completion": _WORDS[::-1] * 2},
    "DPOTrainer": {"prompt": _WORDS * 2} | _TEXTS,
    "KTOTrainer": {"prompt": _WORDS * 2, "completion": _WORDS[::-1] * 2, "label": [True, False] * 4},
    "RewardTrainer": _TEXTS,
    "GRPOTrainer": {"prompt": _WORDS * 2},
}
"""Trainer -> columns of its data set."""

SETTINGS = {
    "plain": {}, "pad is eos": {}, "padded left": {}, "dropout": {}, "LoRA": {}, "bf16": {"bf16": True},
    "NEFTune": {"neftune_noise_alpha": 5.0}, "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointed layers": {"gradient_checkpointing": True},
}  # fmt: skip
"""Setting -> arguments of the trainer that make it."""

_PAIRS = ("DPOTrainer", "RewardTrainer")

_SMOOTHED = (ArgumentError, "label_smoothing_factor")

REFUSED = {
    ("use_plan", "Trainer", "label smoothing"): _SMOOTHED,
    ("use_plan", "SFTTrainer", "label smoothing"): _SMOOTHED,
    **{("use_plan", host, "label smoothing"): _SMOOTHED for host in _PAIRS},
    # Its first tokens have labels, which padding predicts in the padded pass: the log says so too.
    ("unpad", "Trainer", "padded left"): (MismatchError, "without padding the loss is"),
}
"""Cell that is refused -> class of the error, and words of its message; all others are equal."""

CELLS = [("unpad", *cell) for cell in product(ROWS, SETTINGS)]
CELLS += [("use_plan", *cell) for cell in product(("Trainer", "SFTTrainer", *_PAIRS), SETTINGS)]
if not HOSTED:  # a diagonal: each trainer and each setting, with the older TRL
    CELLS = [cell for number, cell in enumerate(CELLS) if number % 6 == 0]


def trainer_of(host, setting, folder):
    """Return a trainer of a host as its users make it."""
    words = tokenizer(*_WORDS)
    words.padding_side = "left" if setting == "padded left" else "right"
    words.pad_token = words.eos_token if setting == "pad is eos" else words.pad_token
    pads = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    drops = {"attention_dropout": 0.2} if setting == "dropout" else {}
    own = {"kind": AutoModelForSequenceClassification, "num_labels": 1} if host == "RewardTrainer" else {}
    model, adapters = model_of("qwen2", **pads, **drops, **own), LoraConfig(target_modules=["q_proj", "v_proj"])
    keys = {"per_device_train_batch_size": 4, "max_steps": 1, "gradient_checkpointing": False, **SETTINGS[setting]}
    rows = Dataset.from_dict(ROWS[host])
    if host == "Trainer":
        model = get_peft_model(model, adapters) if setting == "LoRA" else model
        collate = DataCollatorForTokenClassification(words)
        return Trainer(model, arguments(TrainingArguments, folder, **keys), collate, train_dataset=rows)
    given = {"train_dataset": rows, "processing_class": words, "peft_config": adapters if setting == "LoRA" else None}
    if host in {"DPOTrainer", "KTOTrainer"} and setting != "LoRA":
        given["ref_model"] = model_of("qwen2", **pads)
    if host == "GRPOTrainer":
        keys |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
        given["reward_funcs"] = lambda completions, **_: [float(number % 3) for number in range(len(completions))]
    args = arguments(getattr(trl, host.replace("Trainer", "Config")), folder, **keys)
    return getattr(trl, host)(model, args=args, **given)


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_a_cell_is_equal_or_refused(cell, tmp_path):
    """
    Beside the padded pass of the trainer's own loss, or for a plan its samples alone: loss and
    gradients of a batch. Then a step is trained, whose first calls are compared by default.
    """
    way, host, setting = cell
    trainer = trainer_of(host, setting, tmp_path)
    error, words = REFUSED.get(cell, (None, ""))
    with pytest.raises(error, match=words) if error else contextlib.nullcontext():
        if way == "unpad":
            found = assert_unpadded_equal(trainer)
            assert 0 < found.real < found.padded
            for one in (trainer.model, getattr(trainer, "ref_model", None)):
                if one is not None:
                    unpad(one)
        else:
            use_plan(trainer, pp.plan(row_lengths(trainer), 64 if host not in _PAIRS else 128))
            if host not in _PAIRS:  # whose first pack is compared with its pairs alone
                assert_step_loss(trainer)
        trainer.train()
        assert all(torch.isfinite(one).all() for one in trainer.model.parameters())
