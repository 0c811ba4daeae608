"""
What training costs, by way: the cases of `python -m app.bench train`, which load the whole stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packplan.adapters.progress import progress

from packplan.adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import attrs
import torch
from transformers import TrainerCallback

from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.stores.verdicts import DiskVerdictStore
from packplan.app.bench.process import Turns
from packplan.app.bench.training.data import write_model_of, write_records
from packplan.app.bench.training.like_lengths import LikeLengths
from packplan.app.bench.training.ways import WAYS, Row, Setting, Way, compared
from packplan.app.bench.turns import Turned, run_alone, take_turns
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.split import Planner
from packplan.app.training.prepare import Prepared, prepare
from packplan.app.wiring.gather import gather
from packplan.app.wiring.stores import verdict_key
from packplan.app.wiring.training import keep_verdict, verdict_of
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.plan import RawPlan
from packplan.core.samples import Table
from packplan.core.schedule import EpochStats
from packplan.core.work import WorkModel

LIMIT_S = 3600.0
"""Seconds for a preparation or an epoch."""


@attrs.frozen
class Case:
    """One kind of samples at one budget, to be trained in one way."""

    kind: str
    budget: int
    way: str

    def __str__(self) -> str:
        return f"{self.kind} in packs of {self.budget}, {self.way}"


@attrs.frozen
class Device:
    """What computes."""

    name: str | None
    """Name of the GPU; None if torch sees none, or none was asked for."""

    threads: int
    """Threads of one operation on the CPU."""


def find_device(kind: str) -> Device:
    """Ask torch about a device, `cpu` or `cuda`; DataSetError if it does not answer."""

    def ask() -> dict[str, Any]:
        found = kind == "cuda" and torch.cuda.is_available()
        return {"name": torch.cuda.get_device_name() if found else None, "threads": torch.get_num_threads()}

    return Device(**run_alone("the device", ask, limit_s=LIMIT_S))


def measure_training(
    setting: Setting, *, kinds: Sequence[str], budgets: Sequence[int], ways: Sequence[str], together: bool
) -> list[Row]:
    """
    Measure each kind of samples at each budget in each way, epoch by epoch in turn.

    Args:
        setting: What all cases share.

        kinds: `text`, `images` or both.

        budgets: Tokens of a pack.

        ways: Names in `WAYS`.

        together: Budgets take turns too, and are compared with each other; else each has rounds of
        its own.

    Raises:
        DataSetError: A case failed.
    """
    groups = [
        [Case(kind, budget, way) for budget, way in product(some, ways)]
        for kind in kinds
        for some in ([budgets] if together else [[budget] for budget in budgets])
    ]
    turns = sum(map(len, groups)) * (setting.repeat + 1)
    with TemporaryDirectory() as name, progress(total=turns, desc="training", leave=False) as bar:
        folder = Path(name)
        run_alone("the model", partial(write_model_of, folder / "model", setting.shape), limit_s=LIMIT_S)
        rows: list[Row] = []
        for cases in groups:
            turned = take_turns(
                {str(case): partial(_training, setting, folder, case) for case in cases},
                limit_s=LIMIT_S,
                on_turn=bar.update,
            )
            rows += compared([_row(case, turned[str(case)]) for case in cases])
    return rows


def _row(case: Case, turned: Turned) -> Row:
    gpu_peak = turned.result.pop("gpu_peak_bytes")
    return Row(**attrs.asdict(case), peak_mb=(gpu_peak or turned.peak_bytes) / 1e6, **turned.result)


def _training(setting: Setting, folder: Path, case: Case) -> Callable[[Turns], dict[str, Any]]:
    """
    Prepare a case; return the call that trains its epochs, one in each turn, and returns what its
    row says.
    """
    way = WAYS[case.way]
    config = run_config(setting, folder, case.kind, case.budget, attn_impl=way.attn_impl, epochs=setting.repeat + 1)
    _ask_once(config, folder / "verdicts" / way.attn_impl)
    if way.rows != "packs":
        config = _unpacked(config, one_by_one=way.rows == "alone")
    prepared, encoded = encoded_run(config)
    if way.rows == "sorted":
        lengths = prepared.trainer.pack_stats.tokens
        fields = attrs.asdict(prepared.schedule, recurse=False, filter=lambda field, _: field.init)
        prepared.trainer.schedule = LikeLengths(**fields, lengths=lengths)
    return lambda turns: _epochs(prepared, encoded, way, turns, on_gpu=setting.device == "cuda")


def _ask_once(config: RunConfig, folder: Path) -> None:
    """
    Ask the model whether it may pack, unless another case has; keep the answer for those to come.

    Args:
        config: The run, which reads the answer beside its plans.

        folder: Where the answer under the run's attention is kept, for data and packs of all kinds.
    """
    kept, key = DiskVerdictStore(folder), verdict_key(config)
    verdict = kept.load(key)
    if verdict is None:
        verdict = verdict_of(config)
        kept.save(key, verdict)
    keep_verdict(config, verdict)


def _unpacked(config: RunConfig, *, one_by_one: bool) -> RunConfig:
    """
    Return the run without packing: as many samples a step as a pack holds on average, in one
    forward pass or one by one.
    """
    planned = _planned(config)
    size = max(1, round(planned.planned_samples / len(planned.packs)))
    batch = 1 if one_by_one else size
    training = attrs.evolve(
        config.training, packing=False, per_device_train_batch_size=batch, effective_batch_size=size
    )
    return attrs.evolve(config, training=training)


def _planned(config: RunConfig) -> RawPlan:
    """Plan a run without building its trainer, which would hold a second model."""
    planner, train = Planner(OneRank(), Deadline(LIMIT_S)), gather(config).splits["train"]
    planner.require_writable([train])
    return planner.plan(train).raw


class Encoded:
    """Samples that were encoded before; each fetch is compared with the plan, as always."""

    def __init__(self, samples: SwiftEncoder) -> None:
        self._samples = samples
        start = time.process_time()
        self._encoded = [samples.encode(index) for index in range(len(samples))]
        self.seconds = time.process_time() - start

    def __len__(self) -> int:
        return len(self._encoded)

    @property
    def grids(self) -> list[list[int]]:
        """Grids of patches of all images, one after the other: frames, rows, columns."""
        grids = (sample.get("image_grid_thw") for sample in self._encoded)
        return [grid for some in grids if some is not None for grid in some.tolist()]

    def encode(self, index: int) -> dict[str, Any]:
        """Return sample *index*, encoded."""
        # The collator adds to what it is given.
        return dict(self._encoded[index])

    def fetch(self, index: int, planned: Table) -> dict[str, Any]:
        """Return sample *index*, encoded; ContractError if it is not the one that was planned."""
        return self._samples.checked(index, self.encode(index), planned)


def encoded_run(config: RunConfig) -> tuple[Prepared, Encoded]:
    """Return a run that is ready to train from samples that were encoded before, and these."""
    prepared = prepare(config, OneRank())
    encoded = Encoded(prepared.samples["train"])
    prepared.trainer.train_dataset.samples = encoded
    return prepared, encoded


class _EpochByEpoch(TrainerCallback):
    """Trains an epoch in each turn, and notes how long it took."""

    def __init__(self, turns: Turns, *, on_gpu: bool) -> None:
        self._turns, self._on_gpu, self._start, self.seconds = turns, on_gpu, 0.0, list[float]()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._turns.wait()
        self._start = time.perf_counter()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        if self._on_gpu:
            # The other ways' turns come next, on the same GPU.
            torch.cuda.empty_cache()


def _epochs(prepared: Prepared, encoded: Encoded, way: Way, turns: Turns, *, on_gpu: bool) -> dict[str, Any]:
    """Train the epochs, of which the first warms up; return what a row says of the others."""
    trainer, callback = prepared.trainer, _EpochByEpoch(turns, on_gpu=on_gpu)
    trainer.add_callback(callback)
    trainer.train()
    # Ways attend to other pairs of tokens than the work counts, so squares of lengths are needed.
    schedule, pack_stats = trainer.schedule, trainer.pack_stats.of_squares()
    num_steps = schedule.num_steps(0)
    epochs = [EpochStats.of(pack_stats, schedule, epoch) for epoch in range(1, schedule.num_epochs)]
    tokens = [epoch.tokens(0, num_steps) for epoch in epochs]
    work = WorkModel.from_config(trainer.model.config.to_dict())
    pairs = [way.pairs(epoch, num_steps) for epoch in epochs]
    images = float(work.of_images(encoded.grids).sum())
    useful, positions = sum(one.useful for one in tokens), sum(one.total for one in tokens)
    return {
        "attention": trainer.attention.name,
        "batch_size": schedule.batch_size,
        "num_steps": num_steps,
        "padding_share": 1 - useful / positions,
        "flops": float(work.of_positions(positions, sum(pairs))) + len(epochs) * images,
        "speeds": [one.useful / seconds for one, seconds in zip(tokens, callback.seconds[1:], strict=True)],
        "encode_ms": 1000 * encoded.seconds / len(encoded),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def run_config(
    setting: Setting, folder: Path, kind: str, budget: int, *, attn_impl: str, epochs: int, packs_per_step: int = 1
) -> RunConfig:
    """
    Return a run that packs.

    Args:
        setting: What all cases share.

        folder: Of the model, the samples and the plans.

        kind: `text` or `images`.

        budget: Tokens of a pack.

        attn_impl: `model.attn_impl`.

        epochs: To train.

        packs_per_step: Packs of an optimizer step.
    """
    return RunConfig(
        model=ModelConfig(
            model=str(folder / "model"),
            attn_impl=attn_impl,
            torch_dtype="bfloat16" if setting.shape == "3b" else None,
        ),
        template=TemplateConfig(max_length=budget),
        custom=CustomConfig(train_jsonl=(str(write_records(folder, kind, setting.num_samples, setting.shape)),)),
        training=TrainingConfig(
            output_dir=str(folder / f"{kind}-{budget}"),
            packing_drop_last=False,
            effective_batch_size=packs_per_step,
            num_train_epochs=epochs,
            trainer={
                "use_cpu": setting.device == "cpu",
                "gradient_checkpointing": setting.shape == "3b",
                "save_strategy": "no",
                "report_to": [],
                "dataloader_num_workers": 0,
                "disable_tqdm": True,
                "logging_steps": 1000,
            },
        ),
    )
