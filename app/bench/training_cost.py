"""What training costs, packed and padded: the cases of `python -m app.bench train`, which load the whole stack."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from math import isqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import attrs
import numpy as np
import torch
from PIL import Image
from swift.trainers import Seq2SeqTrainer
from tqdm import tqdm
from transformers import TrainerCallback

from adapters.packed_dataset import PackedDataset
from adapters.swift_samples import SwiftSamples
from adapters.swift_trainer import PackTrainer
from adapters.torch_group import OneRank
from app.bench.distributions import trace
from app.bench.measure import Measured, measure
from app.demo.tiny_models import write_model
from app.preparing import Prepared, prepare
from core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from core.errors import DataSetError
from core.samples import Table
from core.telemetry import EpochLedger

MODEL_TYPE = "qwen2_5_vl"

IMAGE_TOKENS = (256, 576, 1024, 1280, 2560)
"""Of an image, as in the VLM-like lengths of the planner's benchmark; a tiny model gets a sixteenth."""

IMAGE_SHARES = (0.2, 0.3, 0.25, 0.15, 0.1)

WARM_UP = 2
"""Steps before the clock starts."""


@attrs.frozen
class Setting:
    """What is measured."""

    device: str
    shape: str
    attn_impl: str
    num_samples: int
    repeat: int

    @property
    def has_gpu(self) -> bool:
        """Whether torch sees one."""
        return torch.cuda.is_available()

    @property
    def device_name(self) -> str:
        """What it is called."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"


@attrs.frozen
class Row:
    """One kind of samples at one budget, trained in one way."""

    kind: str
    budget: int
    way: str
    """`packed` or `padded`."""

    batch_size: int
    """Samples of a padded batch, packs of a packed one."""

    num_steps: int
    """Of an epoch."""

    padding_share: float
    """Of the positions that the forward passes compute; packs that are not full are shorter, not padded."""

    useful_tokens_per_s: float
    step_s: float
    """Medians over the epochs."""

    peak_bytes: int
    """Memory that training takes beyond the loaded model and the encoded samples; of the GPU, all that it takes."""

    encode_ms: float
    """CPU time to encode a sample, which is left out of the others."""


@attrs.frozen
class Overhead:
    """What our parts add to a step."""

    ratios: list[float]
    """Of the CPU time of an epoch, ours over ms-swift's own trainer, pair by pair."""

    step_s: float
    """CPU seconds of a step of ours, median."""

    encode_s_per_step: float
    """CPU seconds to encode what a step consumes; left out of both."""

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)


def measure_training(setting: Setting, *, kinds: list[str], budgets: list[int]) -> list[Row]:
    """Measure each kind of samples at each budget, packed and padded; DataSetError if a case fails."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model_of(folder / "model", setting.shape)
        cases = [(kind, budget, way) for kind in kinds for budget in budgets for way in ("packed", "padded")]
        return [
            _measure(setting, folder, kind, budget, way)
            for kind, budget, way in tqdm(cases, desc="training", leave=False, disable=None)
        ]


def measure_overhead(setting: Setting, *, packing_length: int) -> Overhead:
    """Measure epochs of our trainer and of ms-swift's own in turn, on the same packs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model_of(folder / "model", setting.shape)
        config = _config(setting, folder, "images", packing_length, {"logging_steps": 1}, effective_batch_size=4)

        def pairs() -> Callable[[], dict[str, Any]]:
            prepared, encode_s = _prepared(config)
            return lambda: _pairs(prepared, encode_s, setting.repeat)

        outcome = measure(pairs, lambda result: result, repeat=1, limit_s=3600)
    return Overhead(**_result(outcome, "the overhead"))


def _measure(setting: Setting, folder: Path, kind: str, budget: int, way: str) -> Row:
    def train() -> Callable[[], dict[str, Any]]:
        config = _config(setting, folder, kind, budget, {"logging_steps": 1000}, effective_batch_size=1)
        if way == "padded":
            config = _padded(config)
        prepared, encode_s = _prepared(config)
        return lambda: _epochs(prepared, encode_s, setting)

    outcome = measure(train, lambda result: result, repeat=1, limit_s=3600)
    result = _result(outcome, f"{kind} in packs of {budget}, {way}")
    peak = result.pop("gpu_peak_bytes") or outcome.peak_bytes  # type: ignore[union-attr]  # `_result` has looked
    return Row(kind=kind, budget=budget, way=way, peak_bytes=peak, **result)


def _result(outcome: Any, what: str) -> dict[str, Any]:
    if not isinstance(outcome, Measured):
        message = f"{what} could not be measured: {outcome.reason}"
        raise DataSetError(message)
    result: dict[str, Any] = outcome.result
    return result


def _padded(config: RunConfig) -> RunConfig:
    """Return the run without packing, whose batches hold as many samples as a pack does on average."""
    planned = prepare(config, OneRank()).planned["train"].raw
    size = max(1, round(planned.planned_samples / len(planned.packs)))
    training = attrs.evolve(config.training, packing=False, per_device_train_batch_size=size, effective_batch_size=size)
    return attrs.evolve(config, training=training)


class _Encoded:
    """Samples that were encoded before; each fetch is compared with the plan, as always."""

    def __init__(self, samples: SwiftSamples) -> None:
        self._samples = samples
        start = time.process_time()
        self._encoded = [samples.encode(index) for index in range(len(samples))]
        self.seconds = time.process_time() - start

    def encode(self, index: int) -> dict[str, Any]:
        # The collator adds to what it is given.
        return dict(self._encoded[index])

    def fetch(self, index: int, planned: Table) -> dict[str, Any]:
        return self._samples.checked(index, self.encode(index), planned)


def _prepared(config: RunConfig) -> tuple[Prepared, float]:
    """Return a run that is ready to train from encoded samples, and the CPU seconds that encoding took."""
    prepared = prepare(config, OneRank())
    encoded = _Encoded(prepared.samples["train"])
    prepared.trainer.train_dataset.samples = encoded
    return prepared, encoded.seconds


class _Clock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def _epochs(prepared: Prepared, encode_s: float, setting: Setting) -> dict[str, Any]:
    """Train some epochs; return what a row says."""
    trainer, course, clock = prepared.trainer, prepared.course, _Clock()
    trainer.add_callback(clock)
    trainer.train()
    per_epoch = course.num_steps(0)
    rates, steps = [], []
    for epoch in range(setting.repeat):
        ledger = EpochLedger.of(trainer.facts, course, epoch)
        first = WARM_UP if epoch == 0 else 1  # the first of an epoch waits for its loader
        ends = clock.ends[epoch * per_epoch : (epoch + 1) * per_epoch]
        seconds = ends[-1] - ends[first - 1]
        rates.append(ledger.tokens(first, per_epoch).useful / seconds)
        steps.append(seconds / (per_epoch - first))
    tokens = EpochLedger.of(trainer.facts, course, 0).tokens(0, per_epoch)
    return {
        "batch_size": course.batch_size,
        "num_steps": per_epoch,
        "padding_share": 1 - tokens.useful / tokens.total,
        "useful_tokens_per_s": statistics.median(rates),
        "step_s": statistics.median(steps),
        "encode_ms": 1000 * encode_s / len(prepared.planned["train"].table),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0,
    }


class _PlainTrainer(Seq2SeqTrainer):
    """ms-swift's own trainer, with nothing but the position row that keeps samples apart."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        prepared["position_ids"] = torch.cat([prepared["text_position_ids"][None], prepared["position_ids"]])
        return prepared


class _EncodedPacks(torch.utils.data.Dataset[list[dict[str, Any]]]):
    """Packs encoded before, as they are."""

    def __init__(self, dataset: PackedDataset, encode: Callable[[int], dict[str, Any]]) -> None:
        self._packs = [[encode(index) for index in pack] for pack in dataset.packs]

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, position: int) -> list[dict[str, Any]]:
        return [dict(sample) for sample in self._packs[position]]


def _pairs(prepared: Prepared, encode_s: float, repeat: int) -> dict[str, Any]:
    """Train an epoch by ours and by the plain trainer, in turn; return what `Overhead` says."""
    ours: PackTrainer = prepared.trainer
    plain = _PlainTrainer(
        model=ours.model, args=ours.args, template=ours.template,
        train_dataset=_EncodedPacks(ours.train_dataset, ours.train_dataset.samples.encode),
    )  # fmt: skip
    num_steps = prepared.course.steps_per_epoch
    # The first pair warms up.
    pairs = [(_cpu_seconds(ours), _cpu_seconds(plain)) for _ in range(repeat + 1)][1:]
    return {
        "ratios": [mine / other for mine, other in pairs],
        "step_s": statistics.median(mine for mine, _ in pairs) / num_steps,
        "encode_s_per_step": encode_s / num_steps,
    }


def _cpu_seconds(trainer: Any) -> float:
    start = time.process_time()
    trainer.train()
    return time.process_time() - start


def _config(
    setting: Setting, folder: Path, kind: str, budget: int, settings: dict[str, Any], *, effective_batch_size: int
) -> RunConfig:
    data = _write_records(folder, kind, setting)
    epochs = 1 if settings["logging_steps"] == 1 else setting.repeat
    return RunConfig(
        model=ModelConfig(
            model=str(folder / "model"),
            attn_impl=setting.attn_impl,
            torch_dtype="bfloat16" if setting.shape == "3b" else None,
        ),
        template=TemplateConfig(max_length=budget),
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(
            output_dir=str(folder / f"{kind}-{budget}"),
            packing_drop_last=False,
            effective_batch_size=effective_batch_size,
            num_train_epochs=epochs,
            trainer={
                "use_cpu": setting.device == "cpu",
                "gradient_checkpointing": setting.shape == "3b",
                "save_strategy": "no",
                "report_to": [],
                "dataloader_num_workers": 0,
                "disable_tqdm": True,
                **settings,
            },
        ),
    )


def write_model_of(folder: Path, shape: str) -> None:
    """Write a model of random weights: `tiny`, or of the layout of Qwen2.5-VL-3B (`3b`)."""
    write_model(folder, MODEL_TYPE, ["the sea, seen from a hill " * 3] * 9, seed=0, shape=shape)


def _write_records(folder: Path, kind: str, setting: Setting) -> Path:
    """Write the samples of a kind, of lengths that their distribution gives; return the data file."""
    path = folder / f"{kind}.jsonl"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    records = list(_texts(rng, setting) if kind == "text" else _images(rng, setting, folder))
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def _texts(rng: np.random.Generator, setting: Setting) -> Iterator[dict[str, Any]]:
    recorded = trace("sft")
    for tokens in rng.choice(recorded[recorded < 400], setting.num_samples).tolist():
        yield _record("What is it?", tokens)


def _images(rng: np.random.Generator, setting: Setting, folder: Path) -> Iterator[dict[str, Any]]:
    scale = 16 if setting.shape == "tiny" else 1
    for number in range(setting.num_samples):
        images = []
        for part in range(int(rng.choice([1, 1, 1, 2, 3]))):
            tokens = int(rng.choice(IMAGE_TOKENS, p=IMAGE_SHARES)) // scale
            images.append(f"{number}-{part}.png")
            high = isqrt(tokens)
            while tokens % high:
                high -= 1
            colour = tuple(rng.integers(0, 256, 3).tolist())
            Image.new("RGB", (28 * tokens // high, 28 * high), colour).save(folder / images[-1])
        text = int(rng.lognormal(5.5, 0.8)) // scale
        yield {**_record("<image>" * len(images) + "What is it?", text), "images": images}


def _record(question: str, tokens: int) -> dict[str, Any]:
    answer = " sea" * max(1, tokens)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
