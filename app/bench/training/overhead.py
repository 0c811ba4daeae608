"""
What this project's parts add to a step of ms-swift's own trainer, on the same packs under the same
attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packplan.adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import attrs
import torch
from swift.trainers import Seq2SeqTrainer

from packplan.adapters.trainer.packed_dataset import PackedDataset
from packplan.adapters.trainer.static import PackTrainer
from packplan.app.bench.training.cost import LIMIT_S, Encoded, encoded_run, run_config
from packplan.app.bench.training.data import write_model_of
from packplan.app.bench.training.ways import WAYS, Setting
from packplan.app.bench.turns import run_alone
from packplan.app.training.prepare import Prepared

PACKS_PER_STEP = 4


@attrs.frozen
class Overhead:
    """What our parts add to a step."""

    attention: str
    """The backend that the model of both trainers attends by."""

    ratios: list[float]
    """CPU time of an epoch, ours over that of ms-swift's own trainer, pair by pair."""

    step_s: float
    """CPU seconds of a step of ours, median."""

    encode_s_per_step: float
    """CPU seconds to encode what a step consumes; left out of both."""

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)


def measure_overhead(setting: Setting, *, packing_length: int) -> Overhead:
    """
    Measure epochs of our trainer and of ms-swift's own in turn, on the same packs; DataSetError if
    that fails.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        run_alone("the model", partial(write_model_of, folder / "model", setting.shape), limit_s=LIMIT_S)
        config = run_config(
            setting, folder, "images", packing_length,
            attn_impl=WAYS["packed"].attn_impl, epochs=1, packs_per_step=PACKS_PER_STEP,
        )  # fmt: skip
        # Every step is logged, so that what the log costs is seen.
        training = attrs.evolve(config.training, trainer={**config.training.trainer, "logging_steps": 1})
        config = attrs.evolve(config, training=training)

        def measured() -> dict[str, Any]:
            prepared, encoded = encoded_run(config)
            return _pairs(prepared, encoded, setting.repeat)

        return Overhead(**run_alone("the overhead", measured, limit_s=LIMIT_S))


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


def _pairs(prepared: Prepared, encoded: Encoded, repeat: int) -> dict[str, Any]:
    """Train an epoch by ours and by the plain trainer, in turn; return what `Overhead` says."""
    ours: PackTrainer = prepared.trainer
    # One model for both, so that attention is the same.
    plain = _PlainTrainer(
        model=ours.model, args=ours.args, template=ours.template,
        train_dataset=_EncodedPacks(ours.train_dataset, encoded.encode),
    )  # fmt: skip
    num_steps = prepared.schedule.steps_per_epoch
    # The first pair warms up.
    pairs = [(_cpu_seconds(ours), _cpu_seconds(plain)) for _ in range(repeat + 1)][1:]
    return {
        "attention": ours.attention.name,
        "ratios": [mine / other for mine, other in pairs],
        "step_s": statistics.median(mine for mine, _ in pairs) / num_steps,
        "encode_s_per_step": encoded.seconds / num_steps,
    }


def _cpu_seconds(trainer: Any) -> float:
    start = time.process_time()
    trainer.train()
    return time.process_time() - start
