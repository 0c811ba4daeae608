"""TRL's trainers compute the same without padding: loss, gradients, and what they log."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

# isort: split
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from packplan.adapters.hf.packed_calls import TextStack
from packplan.core.errors import ArgumentError, ProofError
from packplan.hf import unpad
from packplan.testing import assert_unpadded_equal
from tests.hosts.law import CONFIGS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The `KTO:FutureWarning")]

_WORDS = ["red", "blue " * 3, "a circle of many words " * 4, "bars " * 9]

_TEXTS = {"chosen": _WORDS * 4, "rejected": _WORDS[::-1] * 4}

_ROWS = {
    "DPOTrainer": {
        "prompt": _WORDS * 4,
        "chosen": _WORDS * 4,
        "rejected": [f"red {word}" for word in _WORDS[1:] + _WORDS[:1]] * 4,
    },
    "KTOTrainer": {"prompt": _WORDS * 4, "completion": _WORDS[::-1] * 4, "label": [True, False] * 8},
    "RewardTrainer": _TEXTS,
    "SFTTrainer": {"text": _WORDS * 4},
    "GRPOTrainer": {"prompt": _WORDS * 4},
    "RLOOTrainer": {"prompt": _WORDS * 4},
    "Trainer": {"input_ids": [[7 + number % 3] * (1 + 5 * number % 17) for number in range(16)]},
}

_VOCABULARY = ["<pad>", "<end>", *sorted({word for text in _WORDS for word in text.split()})]

_NEAR = {"rel": 2e-5, "abs": 2e-6}


def tokenizer():
    """Return a tokenizer of the texts' words."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(_VOCABULARY)}, unk_token="<pad>"))  # noqa: S106  # no password
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")  # noqa: S106


def model_of(kind=AutoModelForCausalLM, **keys):
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **CONFIGS["qwen2"], pad_token_id=0, eos_token_id=1, **keys)
    return kind.from_config(config, attn_implementation="sdpa")


def trainer_of(host, folder):
    """Return a trainer as its users make it."""
    common = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 2, "use_cpu": True, "report_to": [],
        "logging_steps": 1, "learning_rate": 1e-2, "seed": 1, "bf16": False, "disable_tqdm": True,
        "save_strategy": "no", "gradient_checkpointing": False,
    }  # fmt: skip
    rows = Dataset.from_dict(_ROWS[host])
    if host == "Trainer":

        def collate(batch):
            found = tokenizer().pad([{"input_ids": row["input_ids"]} for row in batch], return_tensors="pt")
            return {**found, "labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)}

        return Trainer(model_of(), TrainingArguments(**common), train_dataset=rows, data_collator=collate)
    given = {"train_dataset": rows, "processing_class": tokenizer()}
    if host in ("GRPOTrainer", "RLOOTrainer"):
        common |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
        given["reward_funcs"] = lambda completions, **_: [float(number % 3) for number in range(len(completions))]
    if host in ("DPOTrainer", "KTOTrainer"):
        given["ref_model"] = model_of()
    model = model_of(AutoModelForSequenceClassification, num_labels=1) if host == "RewardTrainer" else model_of()
    return getattr(trl, host)(model, args=getattr(trl, host.replace("Trainer", "Config"))(**common), **given)


def logged(trainer):
    """Train, and return the numbers of each step."""
    trainer.args.max_epochs = None  # which ms-swift, once imported, lets callbacks ask for
    trainer.train()
    ignored = (
        "time",
        "per_second",
        "runtime",
        "flos",
        "entropy",
        "accuracy",
        "logits",
    )  # the last three are means over padding
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in ignored)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("host", _ROWS)
def test_a_trainer_computes_the_same(host, tmp_path):
    """A batch's loss and gradients; then two steps, with all that the trainer logs."""
    expected = logged(trainer_of(host, tmp_path))
    trainer = trainer_of(host, tmp_path)

    found = assert_unpadded_equal(trainer)
    hooks = [unpad(one) for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]

    assert 0 < found.real < found.padded
    for mine, due in zip(logged(trainer), expected, strict=True):
        assert mine == pytest.approx(due, **_NEAR)
    assert all(one.counts.real < one.counts.padded for one in hooks)


def test_a_fault_is_an_error_with_both_losses(tmp_path, monkeypatch):
    """Results at other places than their tokens' are found by a trainer's own loss."""
    trainer = trainer_of("SFTTrainer", tmp_path)
    unpad(trainer.model)

    def shift(_, output, tokens, **__):
        output["last_hidden_state"] = tokens.put_back(output["last_hidden_state"].roll(1, 1))
        return output

    monkeypatch.setattr(TextStack, "put_back", shift)

    with pytest.raises(ProofError, match="is due"):
        assert_unpadded_equal(trainer)


def test_a_batch_without_padding_proves_nothing(tmp_path):
    """It is refused, or the assertion could not fail."""
    trainer = trainer_of("SFTTrainer", tmp_path)
    trainer.get_train_dataloader = lambda: [
        {
            "input_ids": torch.ones(2, 3).long(),
            "attention_mask": torch.ones(2, 3).long(),
            "labels": torch.ones(2, 3).long(),
        }
    ]

    with pytest.raises(ArgumentError, match="no padding"):
        assert_unpadded_equal(trainer)
