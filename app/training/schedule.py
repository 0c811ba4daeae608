"""Configuration -> what an optimizer step is made of, and what training consumes when."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.app.training.works import meeting_of
from packplan.core.align import AlignedPlan
from packplan.core.batch import Accumulation, resolve_accumulation
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError
from packplan.core.schedule import EpochSchedule

log = logging.getLogger(__name__)


@attrs.frozen
class BatchSizes:
    """What one optimizer step is made of."""

    size: int
    """Batch of one rank: packs, or samples if not packing."""

    accumulation: Accumulation


def require_static(config: RunConfig) -> None:
    """Refuse a run that has no static plan."""
    if config.custom.trainer_variant != "sft":
        reason = "is rollout, whose packs come as samples come: there is no plan; set it to sft for what needs one"
        raise ConfigError.of("custom.trainer_variant", reason)


def warn_of_ignored(config: RunConfig) -> None:
    """Warn of a setting that another one makes meaningless."""
    if config.training.eval_packing and not config.training.packing:
        log.warning("training.eval_packing is true, but training.packing is false, so evaluation is not packed either")


def batch_of(config: RunConfig, *, world_size: int) -> BatchSizes:
    """Return the batch of a run; BatchSizeError if the ranks cannot realise it."""
    training = config.training
    size = 1 if training.packing else training.per_device_train_batch_size
    accumulation = resolve_accumulation(
        effective_batch_size=training.effective_batch_size,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        world_size=world_size,
        forced_batch_size=size,
    )
    return BatchSizes(size, accumulation)


def forced_batches(config: RunConfig) -> Iterator[str]:
    """Yield what packing changes of the batch sizes that the run asks for."""
    training = config.training
    if training.packing and training.per_device_train_batch_size != 1:
        yield (
            f"packing forces training.per_device_train_batch_size from {training.per_device_train_batch_size:,} to 1; "
            "accumulation keeps the effective batch"
        )
    if config.eval_packing and training.per_device_eval_batch_size != 1:
        yield f"packing forces training.per_device_eval_batch_size from {training.per_device_eval_batch_size:,} to 1"


def schedule_of(
    config: RunConfig, batch: BatchSizes, aligned: AlignedPlan, works: NDArray[np.number] | None
) -> EpochSchedule:
    """
    Return the schedule of a run from its beginning.

    Args:
        config: The run.
        batch: What an optimizer step is made of.
        aligned: The plan of its training data.
        works: Work of each pack of the raw plan, shape (num_raw_packs,), to assign the packs of a
            step by; None where that is of no interest.
    """
    training, meeting = config.training, meeting_of(config)
    return EpochSchedule.from_plan(
        aligned,
        gradient_accumulation_steps=batch.accumulation.gradient_accumulation_steps,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
        seed=training.trainer.get("data_seed", training.seed),
        shuffle=training.trainer.get("train_dataloader_shuffle", True),
        works=None if meeting is None else works,
        meeting=meeting or "step",
        group_by_work=training.packing_group_by_work if meeting is not None and works is not None else 0,
    )


def evaluation_schedule_of(aligned: AlignedPlan) -> EpochSchedule:
    """
    Return an evaluation as the schedule of one epoch, whose steps are the forward passes of each
    rank.
    """
    return EpochSchedule.from_plan(aligned, gradient_accumulation_steps=1, num_train_epochs=1, shuffle=False)
