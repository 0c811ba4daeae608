"""
Compare steps of trainers on padded batches with and without `packplan.hf.unpad`.

The trainers are those of TRL, transformers' `Trainer` with its own loss, and those of ms-swift.

Each way trains the same model on the same rows in a process of its own. A few rows are much longer
than the others. For GRPO, the benchmark draws the answers at random, the same for all ways, and no
model generates them. The first step is not timed. On a CPU, times are processor times. On a GPU,
steps compute in bfloat16, and times are wall-clock times. The peak counts the bytes of all
tensors that exist at the same time.
"""

import argparse
import inspect
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from benchmarks.child import NotMeasuredError, run_in_child
from benchmarks.table import show
from packplan.adapters.progress import progress

HOSTS = ("grpo", "kto", "dpo", "sft", "reward", "trainer")

WAYS = ("padded", "packed", "balanced", "row")

SWIFT = ("swift-kto", "swift-rm")
"""Types of `swift rlhf`."""

_LIMIT_S = 3600.0

_WORDS = ("red", "blue", "circle")


@attrs.frozen
class UnpadRow:
    """Steps of one trainer on padded batches, compared with the same steps without padding."""

    host: str

    real: int
    """Number of positions that all models compute in the timed steps without padding."""

    padded: int
    """Number of positions in the padded batches of the same steps."""

    padded_s: float
    """Seconds of the timed steps on padded batches."""

    packed_s: float

    balanced_s: float | None
    """Seconds of the timed steps with `balance` and `unpad`; None if the trainer is refused."""

    peak: float
    """Peak memory of tensors without padding, divided by the peak with padding."""

    balanced_peak: float | None
    """Peak memory of tensors with `balance` and `unpad`, divided by the peak with padding."""

    row_s: float | None
    """Seconds of the timed steps if the collator joins a batch into one row; only for `Trainer`."""

    row_peak: float | None
    """Peak memory of tensors with joined rows, divided by the peak with padding."""

    losses: float
    """Largest relative difference of a step's loss, without and with padding."""

    norms: float
    """Largest relative difference of a step's gradient norm, without and with padding."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options."""
    parser.add_argument(
        "--hosts", nargs="+", default=HOSTS, choices=(*HOSTS, *SWIFT), help="trainers (default: all but ms-swift's)"
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default: 3)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch (default: 16)")
    parser.add_argument("--width", type=int, default=512, help="hidden size of the model (default: 512)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="max_tokens of balance (default: 2,048)")
    parser.add_argument("--longest", type=int, default=500, help="tokens of the longest text (default: 500)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: 4)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")


def run(options: argparse.Namespace) -> None:
    """Train each way, and print the table."""
    rows = [_compare(host, options) for host in progress(options.hosts, desc="training", unit=" trainers")]
    columns = {
        "trainer": lambda row: row.host,
        "real": lambda row: f"{row.real:,}",
        "padded": lambda row: f"{row.padded:,}",
        "padded s": lambda row: f"{row.padded_s:.2f}",
        "packed s": lambda row: f"{row.packed_s:.2f}",
        "times faster": lambda row: f"{row.padded_s / row.packed_s:.1f}",
        "peak of tensors": lambda row: f"{row.peak:.2f}",
        "balanced s": lambda row: "" if row.balanced_s is None else f"{row.balanced_s:.2f}",
        "its peak": lambda row: "" if row.balanced_peak is None else f"{row.balanced_peak:.2f}",
        "row s": lambda row: "" if row.row_s is None else f"{row.row_s:.2f}",
        "row's peak": lambda row: "" if row.row_peak is None else f"{row.row_peak:.2f}",
        "losses differ": lambda row: f"{row.losses:.0e}",
        "norms differ": lambda row: f"{row.norms:.0e}",
    }
    show(rows, columns, left={"trainer"}, as_json=options.json, packages=("torch", "transformers", "trl"))


def _compare(host: str, options: argparse.Namespace) -> UnpadRow:
    padded, packed, balanced, row = (
        run_in_child(partial(_train, host, way=way, options=options), limit_s=_LIMIT_S) for way in WAYS
    )
    return UnpadRow(
        host, packed["real"], packed["padded"], padded["seconds"], packed["seconds"],
        balanced and balanced["seconds"], packed["peak"] / padded["peak"],
        balanced and balanced["peak"] / padded["peak"], row and row["seconds"], row and row["peak"] / padded["peak"],
        losses=_apart(packed["losses"], padded["losses"]), norms=_apart(packed["norms"], padded["norms"]),
    )  # fmt: skip


def _apart(found: list[float], expected: list[float]) -> float:
    return max(abs(one - due) / abs(due) for one, due in zip(found, expected, strict=True))


def _train(host: str, *, way: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """
    Train some steps; return losses, gradient norms and seconds, and the peak memory of one more.

    None if `balance` refuses the trainer, or if *way* is `row` and the trainer is not `Trainer`.
    """
    if way == "row" and host != "trainer":
        return None
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    from transformers import DataCollatorWithFlattening

    from packplan.core.errors import ArgumentError
    from packplan.hf import balance, separate_samples, unpad

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(host, folder, options)
        models = [one for one in (trainer.model, getattr(trainer, "ref_model", None)) if one is not None]
        if way == "row":
            separate_samples(trainer.model, named="packplan")
            trainer.data_collator = DataCollatorWithFlattening()
        hooks = [unpad(one, logits=host != "trainer") for one in models] if way in ("packed", "balanced") else []
        try:
            if way == "balanced":
                balance(trainer, max_tokens=options.max_tokens)
        except ArgumentError:
            return None
        steps = _Steps(trainer, options.steps, hooks, on_gpu=options.device == "cuda")
        trainer.train()
    if len(steps.losses) != options.steps + 1 or not steps.peak or (hooks and not steps.real):
        raise NotMeasuredError(f"{host}, {way}: {len(steps.losses)} steps, {steps.real} positions without padding")
    return {
        "real": steps.real, "padded": steps.padded, "peak": steps.peak,
        "losses": steps.losses, "norms": steps.norms, "seconds": steps.seconds,
    }  # fmt: skip


class _Steps:
    """
    Observer of a trainer's steps. The first step warms up, the next steps are timed, and the
    tensors of the last step are counted.
    """

    def __init__(self, trainer: Any, timed: int, hooks: list[Any], *, on_gpu: bool) -> None:
        self.seconds, self.peak, self._hooks, self._on_gpu = 0.0, 0, hooks, on_gpu
        self.real = self.padded = 0
        """Numbers of computed positions, and of positions in padded batches, in the timed steps."""

        self.losses: list[float] = []
        self.norms: list[float] = []
        self._model, self._step, self._timed = trainer.model, trainer.training_step, timed
        trainer.training_step = self.run

    def run(self, *arguments: Any) -> Any:
        """Run a step of the trainer, and record its results."""
        if len(self.losses) > self._timed:
            from benchmarks.peak import PeakOfTensors

            with PeakOfTensors(self._model) as mode:
                loss = self._step(*arguments)
            self.peak = mode.peak
            return loss
        before, start = self._positions(), self._now()
        loss = self._step(*arguments)
        if self.losses:
            self.seconds += self._now() - start
            real, padded = self._positions()
            self.real, self.padded = self.real + real - before[0], self.padded + padded - before[1]
        self.losses.append(float(loss))
        squares = (one.grad.double().square().sum() for one in self._model.parameters() if one.grad is not None)
        self.norms.append(float(sum(squares)) ** 0.5)
        return loss

    def _positions(self) -> tuple[int, int]:
        """Return how many positions all hooked models have computed so far, and were given."""
        return sum(one.counts.real for one in self._hooks), sum(one.counts.padded for one in self._hooks)

    def _now(self) -> float:
        if not self._on_gpu:
            return time.process_time()
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()


def _lengths(draw: random.Random, longest: int) -> Iterator[int]:
    """Yield lengths of texts, a few of which are much longer than the others."""
    while True:
        yield min(longest, int(draw.paretovariate(0.8) * 15))


def _trainer(host: str, folder: str, options: argparse.Namespace) -> Any:  # noqa: PLR0911  # one for each host
    """Return a trainer of TRL, transformers or ms-swift, for generated rows."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    from tools.demo.tiny_models import learn_tokenizer

    # ms-swift reads it from the folder, as that of its family.
    tokenizer = learn_tokenizer([f"{' '.join(_WORDS)} " * 9]) if host in SWIFT else _tokenizer()
    draw = random.Random(3)  # noqa: S311  # no secret
    lengths = _lengths(draw, options.longest)

    def text(share: int = 1) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(next(lengths) // share + 1))

    config = AutoConfig.for_model(
        "qwen2", vocab_size=2048, hidden_size=options.width, intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip

    def model(kind: Any = AutoModelForCausalLM) -> Any:
        torch.manual_seed(0)
        made = kind.from_config(config, attn_implementation="sdpa")
        made.save_pretrained(f"{folder}/model")  # GRPO loads its reference from there
        return kind.from_pretrained(f"{folder}/model", attn_implementation="sdpa")

    num = options.rows * (options.steps + 2)
    if host in SWIFT:
        model()
        tokenizer.save_pretrained(f"{folder}/model")
        chats = [_chat(text(4), text(), text(), number) for number in range(num)]
        return _swift(host.removeprefix("swift-"), folder, chats, options)
    common = {
        "output_dir": folder, "per_device_train_batch_size": options.rows, "max_steps": options.steps + 2,
        "use_cpu": options.device == "cpu", "report_to": [], "logging_steps": 1, "learning_rate": 1e-3, "seed": 1,
        "bf16": options.device == "cuda", "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    given: dict[str, Any] = {"processing_class": tokenizer}
    if host == "dpo":
        rows = {"prompt": [text(4) for _ in range(num)]} | {
            name: [text() for _ in range(num)] for name in ("chosen", "rejected")
        }
        return trl.DPOTrainer(
            model(),
            ref_model=model(),
            args=trl.DPOConfig(max_length=None, **common),
            train_dataset=Dataset.from_dict(rows),
            **given,
        )
    if host == "kto":
        rows = {"prompt": [text(4) for _ in range(num)], "completion": [text() for _ in range(num)]}
        labelled = Dataset.from_dict({**rows, "label": [bool(number % 2) for number in range(num)]})
        return trl.KTOTrainer(
            model(), ref_model=model(), args=trl.KTOConfig(max_length=1024, **common), train_dataset=labelled, **given
        )
    if host == "reward":
        config.num_labels = 1
        rows = {name: [text() for _ in range(num)] for name in ("chosen", "rejected")}
        return trl.RewardTrainer(
            model(AutoModelForSequenceClassification), args=trl.RewardConfig(max_length=1024, **common),
            train_dataset=Dataset.from_dict(rows), **given,
        )  # fmt: skip
    if host == "trainer":
        ids = [tokenizer(text())["input_ids"] for _ in range(num)]
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        collate = DataCollatorForTokenClassification(tokenizer)
        return Trainer(model(), TrainingArguments(**common), collate, train_dataset=data)
    if host == "sft":
        args = trl.SFTConfig(max_length=1024, **common)
        return trl.SFTTrainer(
            model(), args=args, train_dataset=Dataset.from_dict({"text": [text() for _ in range(num)]}), **given
        )
    return _grpo(model(), common, lengths, options, **given)


def _chat(question: str, answer: str, rejected: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "rejected_response": rejected, "label": bool(number % 2)}


def _swift(kind: str, folder: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> Any:
    """Return the trainer that ms-swift builds for a command of `swift rlhf`."""
    from swift.pipelines.train.rlhf import SwiftRLHF

    class Built(SwiftRLHF):  # type: ignore[misc]  # has no types
        def train(self, trainer: Any) -> Any:
            return trainer

    Path(folder, "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (
        f"--rlhf_type {kind} --model {folder}/model --model_type qwen2 --template chatml --attn_impl sdpa "
        f"--dataset {folder}/rows.jsonl --max_length 4096 --tuner_type full --torch_dtype float32 --use_cpu true "
        f"--output_dir {folder} --max_steps {options.steps + 2} --per_device_train_batch_size {options.rows} "
        "--gradient_accumulation_steps 1 --split_dataset_ratio 0 --save_strategy no --report_to none --logging_steps 1 "
        "--gradient_checkpointing false --check_model false --dataset_num_proc 1 --dataloader_num_workers 0"
    )
    return Built(words.split()).main()


def _grpo(model: Any, common: dict[str, Any], lengths: Iterator[int], options: argparse.Namespace, **given: Any) -> Any:
    """Return a GRPOTrainer whose answers this function draws at random."""
    import trl
    from datasets import Dataset

    draw = random.Random(1)  # noqa: S311  # no secret
    prompts = Dataset.from_dict({"prompt": ["red " * draw.randint(1, 30) for _ in range(64)]})
    args = trl.GRPOConfig(
        num_generations=4, steps_per_generation=1, gradient_accumulation_steps=1, loss_type="dapo", beta=0.04,
        max_completion_length=options.longest, **common,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model,
        args=args,
        train_dataset=prompts,
        reward_funcs=lambda completions, **_: [float(len(one) % 7) for one in completions],
        **given,
    )
    newer = "num_generations" in inspect.signature(trainer._generate_single_turn).parameters  # noqa: SLF001  # no public way

    def answer(prompt_ids: list[Any], *_: Any, **__: Any) -> Any:
        answers = [[draw.randint(5, 2000) for _ in range(next(lengths))] for _ in prompt_ids]
        return (answers, None) if newer else (answers, None, {})

    trainer._generate_single_turn = answer  # noqa: SLF001
    return trainer


def _tokenizer() -> Any:
    """Return a tokenizer that knows three words, and the numbers below 2,043."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<end>", *_WORDS, *map(str, range(2048 - 5))]
    words = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))  # noqa: S106  # no password
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")  # noqa: S106
