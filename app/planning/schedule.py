"""
Makes the epoch schedule of an aligned plan: microbatches of an optimizer step, and the order of
packs.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.config.trainer_keys import read_nested_settings
from packplan.core.align import AlignedPlan
from packplan.core.batch import Accumulation, partial_window, resolve_accumulation
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, counted
from packplan.core.schedule import EpochSchedule
from packplan.core.work.assignment import SyncPoint

REDUCES_EACH_BACKWARD = 2
"""
Lowest ZeRO stage at which ranks wait for each other in each microbatch. Gradients are sharded from
stage 2 on, weights from stage 3 on.
"""


def refuse_stream(config: RunConfig) -> None:
    """Raise ConfigError for a run that packs a stream during training, since it has no plan."""
    if config.custom.trainer_variant != "sft":
        reason = "is rollout, which packs during training, so there is no plan: set it to sft for a plan"
        raise ConfigError.for_key("custom.trainer_variant", reason)


def accumulation_of(config: RunConfig, *, world_size: int) -> Accumulation:
    """
    Return the gradient accumulation of a run; ArgumentError if the number of ranks does not allow
    it.
    """
    training = config.training
    return resolve_accumulation(
        effective_batch_size=training.effective_batch_size,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        world_size=world_size,
        forced_batch_size=config.batch_size,
    )


def forced_batch_lines(config: RunConfig) -> Iterator[str]:
    """Yield a log line for each batch setting that packing changes, or that has no effect."""
    training = config.training
    if config.batch_size != training.per_device_train_batch_size:
        yield (
            f"packing forces training.per_device_train_batch_size from {training.per_device_train_batch_size:,} to 1; "
            "accumulation keeps the effective batch"
        )
    if config.eval_packing and training.per_device_eval_batch_size != 1:
        yield f"packing forces training.per_device_eval_batch_size from {training.per_device_eval_batch_size:,} to 1"
    if training.eval_packing and not training.packing:
        yield "training.eval_packing is true, but training.packing is false, so evaluation is not packed either"


def balanced_sync_point(config: RunConfig) -> SyncPoint | None:
    """
    Return the point at which a run's ranks wait for each other: `step` or `microbatch`. None if
    packs are not assigned by work.

    `training.packing_balance: auto` means `microbatch` under FSDP and under DeepSpeed from stage 2
    on, else `step`. On a single rank, assignment by work has no effect.
    """
    asked = config.training.packing_balance
    if asked == "none" or not config.training.packing:
        return None
    return sync_point_of(config) if asked == "auto" else asked


def sync_point_of(config: RunConfig) -> SyncPoint:
    """
    Return the point at which a run's ranks wait for each other under its FSDP or DeepSpeed
    settings.
    """
    training = config.training
    stage = zero_stage(training.trainer.get("deepspeed"))
    return "microbatch" if training.trainer.get("fsdp") or stage >= REDUCES_EACH_BACKWARD else "step"


def zero_stage(deepspeed: Any) -> int:
    """
    Return the ZeRO stage in `training.deepspeed`, given as settings or as a file; 0 without ZeRO.
    """
    zero = read_nested_settings(deepspeed).get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if isinstance(stage, int) else 0


def schedule_of_split(
    config: RunConfig, split: str, aligned: AlignedPlan, works: NDArray[np.number] | None = None
) -> EpochSchedule:
    """
    Return the schedule of a split from its beginning.

    ArgumentError if the number of ranks does not allow the batch size. `accumulation_of` decides
    the batches of a step here, as in the trainer's arguments.

    An evaluation is one epoch, in which each forward pass of a rank counts as a step.

    Args:
        config: The run.
        split: `train` or `eval`.
        aligned: Aligned plan of the split.
        works: Work of each pack of the raw plan, by which the packs of a step are assigned to
            ranks; shape (num_raw_packs,). None assigns packs in the schedule's order.
    """
    if split == "eval":
        return EpochSchedule.from_plan(aligned, gradient_accumulation_steps=1, num_train_epochs=1, shuffle=False)
    training, sync_at = config.training, balanced_sync_point(config)
    accumulation = accumulation_of(config, world_size=aligned.world_size)
    return EpochSchedule.from_plan(
        aligned,
        gradient_accumulation_steps=accumulation.gradient_accumulation_steps,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
        seed=training.trainer.get("data_seed", training.seed),
        shuffle=training.trainer.get("train_dataloader_shuffle", True),
        works=None if sync_at is None else works,
        sync_at=sync_at or sync_point_of(config),
    )


def partial_window_line(config: RunConfig, schedule: EpochSchedule) -> tuple[int, str] | None:
    """
    Return a log line and its level if an epoch's last step has fewer microbatches than other steps,
    else None.

    The level is a warning if another batch size gives even steps, else info. The warning names
    `training.gradient_accumulation_steps` if only that key decides the accumulation.
    """
    if not isinstance(schedule.num_packs, int):
        window, epochs = schedule.gradient_accumulation_steps, len(schedule.num_packs)
        ragged = sum(schedule.num_epoch_batches(epoch) % window > 0 for epoch in range(epochs))
        start = f"the last optimizer step of {ragged:,} of {counted(epochs, 'epoch')} has fewer than {window:,} "
        return (logging.INFO, f"{start}batches per rank") if ragged else None
    partial = partial_window(
        per_rank_batches=schedule.batches_per_epoch, gradient_accumulation_steps=schedule.gradient_accumulation_steps
    )
    if partial is None:
        return None
    if (even := partial.even_accumulation) is None:
        return logging.INFO, str(partial)
    training, key = config.training, f"gradient_accumulation_steps: {even:,}"
    if training.effective_batch_size is not None or config.batch_size != training.per_device_train_batch_size:
        key = f"effective_batch_size: {schedule.world_size * schedule.batch_size * even:,}"
    return logging.WARNING, f"{partial}; training.{key} gives even steps"
