"""
Forecasts of a run, computed with its own trainer and packs.

The memory of a step is traced without weights. The time of the run is predicted from a few timed
steps.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from packplan.adapters.files import make_folder
from packplan.adapters.forecast.calibration import measure_steps
from packplan.adapters.forecast.memory import StepTracer, TracedTrainer, using_fake_ranks
from packplan.adapters.models import plain_model
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.video_reading import has_separate_video_pass
from packplan.adapters.trainer.arguments import make_training_arguments
from packplan.adapters.trainer.model import open_model
from packplan.adapters.trainer.trainer import PlanTrainer
from packplan.adapters.trainer.vision import dummy_image
from packplan.app.planning.schedule import schedule_of_split, sync_point_of
from packplan.app.planning.split import PlannedSplit
from packplan.core.batch import pack_degrees
from packplan.core.config.run import RunConfig
from packplan.core.equality import AttentionChoice
from packplan.core.forecast import (
    REPEATS,
    Calibration,
    ModelSharding,
    RunForecast,
    StepFlops,
    calibration_packs,
    forecast_run,
)
from packplan.core.packs import Packs
from packplan.core.ports import RankGroup
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats

_NOT_TRACED = (
    "deepspeed", "fsdp", "fsdp_config", "fp16", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "use_liger_kernel", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor",
)  # fmt: skip
"""
Settings that a trace leaves out: they need a GPU, the tracer accounts for them, or no step uses
them.
"""


_MAX_EVAL_PACKS = 8
"""Maximum number of batches that each rank evaluates to time an evaluation."""


def config_to_trace(config: RunConfig) -> RunConfig:
    """Return a run with settings that allow tracing its step on this machine's CPU."""
    settings: Mapping[str, Any] = config.training.trainer
    kept = {name: value for name, value in settings.items() if name not in _NOT_TRACED}
    # bfloat16 and float16 have the same size.
    kept |= {"bf16": bool(settings.get("bf16") or settings.get("fp16")), "use_cpu": True, "report_to": []}
    # Varlen attention keeps the same tensors as flash attention.
    model = attrs.evolve(config.model, quant_method=None)
    if "flash" in model.attn_impl:
        model = attrs.evolve(model, attn_impl="auto")
    return attrs.evolve(config, model=model, training=attrs.evolve(config.training, trainer=kept))


@contextmanager
def open_step_tracer(
    config: RunConfig,
    encoder: SwiftEncoder,
    *,
    attention: AttentionChoice,
    sharding: ModelSharding,
    world_size: int,
    accumulates: bool,
) -> Iterator[StepTracer]:
    """
    Yield a tracer of one rank's steps, with the model that a run trains.

    The model is on the device `meta`, with the run's frozen weights and adapters.

    Args:
        config: The run.
        encoder: Encoder of the split `train`.
        attention: Attention that was chosen for `config_to_trace(config)`.
        sharding: Sharding of the model over the ranks.
        world_size: Number of ranks.
        accumulates: Whether a step has several microbatches.

    Raises:
        ModelError: The model cannot be traced.
    """
    on_gpu, config = not config.training.trainer.get("use_cpu"), config_to_trace(config)
    model = open_model(config.model, config.training, attention=attention, device=torch.device("cpu"), outline=True)
    template = encoder.template
    template.model = plain_model(model)
    arguments = make_training_arguments(config, gradient_accumulation_steps=1)
    if encoder.takes_images and (world_size > 1 or config.training.freeze_llm):
        separately = sharding == "fsdp2" and has_separate_video_pass(template)
        dummy_image(model, template).ensure_tower_runs(passes=1 + separately)
    trainer = TracedTrainer(
        group=OneRank(), attention=attention, eval_dataset=None, reduction=config.training.loss_reduction, model=model,
        args=arguments, template=template, packed=config.training.packing, train_dataset=None,
    )  # fmt: skip
    with using_fake_ranks(world_size) if sharding == "fsdp2" else nullcontext():
        yield StepTracer(trainer, sharding, world_size, accumulates, on_gpu)


def config_to_time(config: RunConfig) -> RunConfig:
    """
    Return a run that starts from the beginning, and evaluates and saves only at its last step.

    The returned run logs every step if *config* does, else no step, since logging takes time.
    """
    training, end = config.training, 10**9
    evaluates = bool(config.custom.val_jsonl) and training.trainer.get("eval_strategy") != "no"
    trainer = {
        **training.trainer,
        "eval_strategy": "steps" if evaluates else "no", "eval_steps": end,
        "save_strategy": "no" if training.trainer.get("save_strategy") == "no" else "steps", "save_steps": end,
        "logging_steps": 1 if training.trainer.get("logging_steps") == 1 else end,
        "load_best_model_at_end": False, "eval_on_start": False, "push_to_hub": False, "report_to": [],
    }  # fmt: skip
    for name in ("early_stop_interval", "eval_delay", "metric_for_best_model"):
        trainer.pop(name, None)
    fields: dict[str, Any] = {"resume_from_checkpoint": None, "trainer": trainer}
    return attrs.evolve(config, training=attrs.evolve(training, **fields))


def forecast_time(
    config: RunConfig, trainer: PlanTrainer, splits: Mapping[str, PlannedSplit], group: RankGroup
) -> RunForecast:
    """
    Time some steps of a run, and return the forecast of the whole run.

    Every rank has to call this function. The trainer cannot be used afterwards.

    Args:
        config: The run.
        trainer: Trainer of `config_to_time(config)`, ready to train.
        splits: Planned splits by name.
        group: All ranks.
    """
    train, schedule = splits["train"], trainer.schedule
    evaluated = evaluation_flops(config, splits["eval"]) if trainer.eval_dataset is not None else None
    trained = EpochStats.from_schedule(trainer.pack_stats(0), schedule, 0)
    stats = train.stats_of(train.raw)
    slots = attrs.evolve(schedule, works=None).order(0)
    order = slots[np.diff(slots, prepend=-1) != 0]  # a pack once, not for each of its ranks
    chosen = calibration_packs(
        stats.packs, stats.work, stats.packs.sums(train.works.scaled(0, 0, 1).flops), order,
        world_size=schedule.world_size, batches=schedule.gradient_accumulation_steps, batch_size=schedule.batch_size,
    )  # fmt: skip
    return forecast_run(
        time_packs(config, trainer, splits, group, chosen).fit_timing(), trained, schedule, train.works,
        evaluated=evaluated, every=_steps_between_pauses(config, schedule),
        evaluates_first=bool(config.training.trainer.get("eval_on_start")),
    )  # fmt: skip


def evaluation_flops(config: RunConfig, planned: PlannedSplit) -> StepFlops:
    """
    Return the FLOPs of an evaluation as if it were a single step. In an evaluation, ranks wait for
    each other only at its end.

    Args:
        config: The run.
        planned: Planned split that is evaluated.
    """
    schedule = schedule_of_split(config, "eval", planned.aligned)
    whole = attrs.evolve(schedule, gradient_accumulation_steps=schedule.batches_per_epoch)
    return StepFlops.from_epoch(
        EpochStats.from_schedule(planned.pack_stats(0), whole, 0), planned.works, sync_at="step"
    )


def time_packs(
    config: RunConfig,
    trainer: PlanTrainer,
    splits: Mapping[str, PlannedSplit],
    group: RankGroup,
    packs: Sequence[Sequence[int]],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """
    Train packs `REPEATS` times in order; return the seconds of each step, the evaluation and the
    checkpoint.

    Args:
        config: The run.
        trainer: Trainer of the run.
        splits: Planned splits by name.
        group: All ranks.
        packs: Sample indices of each pack, in the order of training: step by step, and in each step
            by microbatch and rank.
        clock: Function that returns the current time in seconds.
    """
    train, before = splits["train"], trainer.schedule
    stats = train.stats_of(attrs.evolve(train.raw, packs=Packs.from_lists(packs)))
    schedule = EpochSchedule(
        degrees=None if before.degrees is None else pack_degrees(stats.tokens, stats.packing_length),
        max_degree=before.max_degree,
        num_packs=len(packs), world_size=before.world_size, dataloader_drop_last=False,
        gradient_accumulation_steps=before.gradient_accumulation_steps, num_train_epochs=REPEATS,
        batch_size=before.batch_size, shuffle=False, sync_at=sync_point_of(config),
    )  # fmt: skip
    evaluated = _with_first_packs(splits["eval"], before.world_size) if trainer.eval_dataset is not None else None
    _replace_packs(trainer, stats, schedule, evaluated)
    terms = StepFlops.from_epoch(EpochStats.from_schedule(stats, schedule, 0), train.works, sync_at=schedule.sync_at)
    forward = None if evaluated is None else evaluation_flops(config, evaluated)
    with _using_temporary_output(trainer, group):
        return measure_steps(trainer, terms, evaluation_terms=forward, clock=clock)


def _replace_packs(
    trainer: PlanTrainer, stats: PackStats, schedule: EpochSchedule, evaluated: PlannedSplit | None
) -> None:
    """Make a trainer train and evaluate other packs, in the order of *schedule*."""
    trainer.pack_batches.reschedule(schedule)
    trainer.pack_stats = lambda _: stats
    trainer.train_dataset.packs_of = lambda _: stats.packs
    if evaluated is not None:
        trainer.eval_dataset.packs = evaluated.raw.packs


def _with_first_packs(planned: PlannedSplit, world_size: int) -> PlannedSplit:
    """Return a split with only the first packs of its evaluation plan."""
    count = min(len(planned.raw.packs), _MAX_EVAL_PACKS * world_size * planned.aligned.batch_size)
    raw = attrs.evolve(planned.raw, packs=planned.raw.packs[:count])
    return planned.planned(planned.key, raw, world_size=world_size)


def _steps_between_pauses(config: RunConfig, schedule: EpochSchedule) -> tuple[int, int]:
    """
    Return the number of steps between evaluations, and between checkpoints; 0 if there are none.
    """
    settings = make_training_arguments(config, gradient_accumulation_steps=schedule.gradient_accumulation_steps)

    def steps_between(strategy: str, steps: float) -> int:
        if strategy == "epoch":
            return schedule.steps_per_epoch
        return 0 if strategy == "no" else int(steps) if steps >= 1 else math.ceil(steps * schedule.total_steps)

    evaluation = steps_between(settings.eval_strategy, settings.eval_steps or 0)
    saves = settings.save_strategy
    return evaluation, evaluation if saves == "best" else steps_between(saves, settings.save_steps)


@contextmanager
def _using_temporary_output(trainer: PlanTrainer, group: RankGroup) -> Iterator[None]:
    """
    Make all ranks write into a temporary folder in the trainer's output folder, and remove it at
    the end.
    """
    folder = Path(trainer.args.output_dir) / "calibrating"
    make_folder(folder)
    trainer.args.output_dir = str(folder)
    try:
        yield
        group.wait_for_all()  # all ranks have written before the folder goes
    finally:
        shutil.rmtree(folder, ignore_errors=True)
