"""
Runs TRL's own example scripts, as installed and with two lines of `packplan.hf`, on tiny models.

`python -m tests.hosts.trl_scripts FOLDER SCRIPT…` forks a process for each rank, after the
libraries were imported once: each script on one rank, and the first one on two. Each rank writes
the losses that it logged and the positions that its layers computed.
"""

import faulthandler
import json
import os
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import packplan.hf  # noqa: F401  # before torchvision
from tests.hosts.law import fork_ranks, model_of
from tools.demo.tiny_models import learned_tokenizer

# isort: split
import torch
import trl
from datasets import Dataset
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

WAYS = ("padded", "packed")

_DEADLINE_S = 200
"""Seconds of a rank, which then says where it stands."""

ADDED = (
    "from packplan.hf import unpad\n",
    "    [unpad(one) for one in (trainer.model, getattr(trainer, 'ref_model', None)) if one is not None]\n",
)

_COMMON = (
    "--per_device_train_batch_size 4 --max_steps 3 --logging_steps 1 --learning_rate 1e-2 --seed 1 --use_cpu true "
    "--bf16 false --report_to none --save_strategy no --gradient_checkpointing false --disable_tqdm true "
    "--dtype float32"
)

OPTIONS = {
    "dpo": "",
    "grpo": "--reward_funcs tests.hosts.trl_scripts.reward --num_generations 2 --max_completion_length 12 --beta 0.04",
    "sft": "--max_length 512",
}
"""Script -> its options."""

_WORDS = ("red", "a circle " * 2, "blue " * 24, "a red circle " * 4)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ between answers."""
    return [float(sum(one) % 5) for one in completion_ids]


def make(folder: Path) -> None:
    """Write a model and rows for each script; with images for `sft` where they can be read."""
    for script in OPTIONS:
        (folder / script).mkdir(parents=True)
    texts = [f"{number % 3 * 'red '}{text}" for number in range(6) for text in _WORDS]
    rows = {"prompt": texts, "chosen": texts[::-1], "rejected": texts[5:] + texts[:5]}
    Dataset.from_dict(rows).to_json(folder / "dpo" / "train.jsonl")
    Dataset.from_dict({"prompt": texts}).to_json(folder / "grpo" / "train.jsonl")
    model_of("qwen2", "sdpa").save_pretrained(folder / "model")
    learned_tokenizer(texts, vocabulary=270).save_pretrained(folder / "model")
    if not find_spec("PIL"):
        Dataset.from_dict({"text": texts}).to_json(folder / "sft" / "train.jsonl")
        return
    from PIL import Image

    from tests.made.vision_models import write_vision_model

    write_vision_model(folder / "seeing", "qwen2_5_vl", texts, seed=0)
    token = "<|vision_start|><|image_pad|><|vision_end|>"  # noqa: S105  # no password
    pictures = [Image.new("RGB", (28 + 28 * (number % 3), 56), (9 * number, 100, 50)) for number in range(len(texts))]
    seen = {"images": [[one] for one in pictures], "prompt": [token] * len(texts), "completion": texts}
    Dataset.from_dict(seen).to_parquet(folder / "sft" / "train.parquet")


class Watch(TrainerCallback):
    """Keeps the losses of a run and the positions that layers with gradients computed."""

    losses: list[float] = []  # noqa: RUF012  # one run for each process
    positions = 0

    @classmethod
    def count(cls, module: Any, inputs: Any) -> None:
        if type(module).__name__ == "Qwen2MLP" and torch.is_grad_enabled():
            cls.positions += inputs[0].shape[:-1].numel()

    def on_train_begin(self, args, state, control, **_):
        Watch.positions = 0  # the probe of `unpad` has gradients too
        # Gloo's group, where DDP holds it last, joins its thread under the GIL, which that thread
        # may wait for: pytorch/pytorch#190489. Held here, it ends with the process.
        Watch.group = torch.distributed.is_initialized() and torch.distributed.group.WORLD

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def run(rank: int, ranks: int, script: str, way: str, folder: Path) -> None:
    """Run a script as its user would, as one of some ranks."""
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
    path = Path(trl.__file__).parent / "scripts" / f"{script}.py"
    text = path.read_text(encoding="utf-8")
    if way == "packed":
        before, found, after = text.partition("    # Train the model\n")
        assert found, "the script has changed"
        text = f"{ADDED[0]}{before}{ADDED[1]}{found}{after}"
    model = folder / ("seeing" if script == "sft" and find_spec("PIL") else "model")
    out = folder / f"{script} {way} {ranks}"
    DEFAULT_CALLBACKS.append(Watch)
    register_module_forward_pre_hook(Watch.count)
    words = f"--model_name_or_path {model} --dataset_name {folder / script} {_COMMON} {OPTIONS[script]}"
    sys.argv = [str(path), *words.split(), "--output_dir", str(out)]
    exec(compile(text, path, "exec"), {"__name__": "__main__", "__file__": str(path)})  # noqa: S102  # TRL's script
    found = {"losses": Watch.losses, "positions": Watch.positions}
    (folder / f"{out.name} {rank}.json").write_text(json.dumps(found))


def main(folder: str, *scripts: str) -> None:
    """Run scripts both ways, on one rank, and the first on two."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=f"{folder}/cache")
    make(Path(folder))
    runs = [*product([1], scripts, WAYS), *product([2], scripts[:1], WAYS)]
    sys.exit(not all(fork_ranks(one[0], run, *one, Path(folder)) for one in runs))
