"""Trains a tiny model in LLaMA-Factory from an exported folder, by its command's function."""

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import packplan.adapters  # noqa: F401  # makes torchvision importable

# isort: split
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback


def store_model(folder: Path) -> None:
    """Store a tiny model with random weights, and a tokenizer of two words."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))  # noqa: S106  # no password
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)  # noqa: S106


def without_sound() -> None:
    """Stand in for torchaudio, whose published build does not load beside a CPU-only torch."""
    stand_in = types.ModuleType("torchaudio")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = stand_in


class Watch(TrainerCallback):
    """Keeps the tokens and positions that reach the model, and the losses that are logged."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.losses: list[float] = []

    def on_train_begin(self, args, state, control, *, model, **_):
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, _: Any, given: dict[str, Any]) -> None:
        self.batches.append([given[name].flatten().tolist() for name in ("input_ids", "position_ids")])

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def main(folder: Path) -> None:
    """Train, and write what was found."""
    without_sound()
    from llamafactory.train.tuner import run_exp

    store_model(folder / "model")
    given = json.loads((folder / "rows.json").read_text())
    watch = Watch()
    arguments = {
        "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "template": "empty", "dataset": "none", "tokenized_path": str(folder / "packs"), "neat_packing": True,
        "disable_shuffling": True, "flash_attn": "sdpa", "output_dir": str(folder / "out"), "report_to": "none",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 0.0, "logging_steps": 1,
        "num_train_epochs": 1, "save_strategy": "no", "use_cpu": True, "seed": 5, "disable_tqdm": True,
    }  # fmt: skip
    run_exp(arguments, callbacks=[watch])
    rows = given["rows"]
    wanted = [
        [
            [token for sample in pack for token in rows[sample]["input_ids"]],
            [place for sample in pack for place in range(len(rows[sample]["input_ids"]))],
        ]
        for pack in given["packs"]
    ]
    found = {
        "batches": [
            [values[: len(whole[0])] for values in batch] == whole
            for batch, whole in zip(watch.batches, wanted, strict=True)
        ],
        "losses": watch.losses,
        "alone": [alone(folder / "model", [rows[sample] for sample in pack]) for pack in given["packs"]],
    }
    (folder / "found.json").write_text(json.dumps(found))


def alone(model: Path, rows: list[dict[str, Any]]) -> float:
    """Return the mean loss over the learned tokens of rows, each in a batch by itself."""
    kept = AutoModelForCausalLM.from_pretrained(model)
    total, tokens = 0.0, 0
    for row in rows:
        learned = sum(label != -100 for label in row["labels"][1:])
        with torch.no_grad():
            loss = kept(**{name: torch.tensor([values]) for name, values in row.items()}).loss
        total += float(loss) * learned if learned else 0.0
        tokens += learned
    return total / tokens


if __name__ == "__main__":
    main(Path(sys.argv[1]))
