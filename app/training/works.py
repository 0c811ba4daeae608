"""What the samples of a run cost, and where its ranks wait for each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from packplan.app.wiring import stores
from packplan.core.config import RunConfig, plan_policy
from packplan.core.errors import ConfigError
from packplan.core.packers import ALGORITHMS
from packplan.core.policy import PlanPolicy
from packplan.core.samples import Table, column
from packplan.core.work import Meeting, SampleWorks, WorkModel

REDUCES_EACH_BACKWARD = 2
"""
The stage from which on DeepSpeed's ranks meet in each microbatch: gradients are sharded from 2 on,
weights from 3 on.
"""


@attrs.frozen(eq=False)
class Work:
    """What the samples of a split cost."""

    samples: SampleWorks

    unit: str
    """What is counted, for people to read."""

    estimated: str | None
    """Why sizes of the model are not what is counted; None where they are."""


def work_of(config: RunConfig, table: Table) -> Work:
    """
    Return what samples cost to train, by the sizes of the run's model, or by tokens and squares.

    Args:
        config: The run.
        table: Measurements of the records; shape (num_records, num_columns).
    """
    model, estimated = trained_work(config)
    works = SampleWorks.from_lengths(
        model,
        column(table, "length"),
        **{name: column(table, name) for name in ("images", "patches", "frames", "video_patches")},
    )
    counted = "FLOPs of an ordinary model" if estimated else "FLOPs of the model"
    return Work(works, f"{counted}, forward and backward", estimated)


def trained_work(config: RunConfig) -> tuple[WorkModel, str | None]:
    """
    Return the work of a run's model, forward and backward, and why it is only estimated, if it is.
    """
    model, estimated = _model_of(config)
    training = config.training
    adapters = training.tuner_type == "lora"
    trained = model.trained(
        text=not adapters and not training.freeze_llm,
        vision=not adapters and not training.freeze_vit,
        vision_gradients=not training.freeze_vit,
    )
    return trained, estimated


def _model_of(config: RunConfig) -> tuple[WorkModel, str | None]:
    """Return the model's work, and why it is only estimated, if it is."""
    try:
        sizes = stores.sizes_of(config)
    except ConfigError as error:
        return WorkModel.estimated({}), error.faults[0].reason
    try:
        return WorkModel.from_config(sizes), None
    except ConfigError as error:
        return WorkModel.estimated(sizes), error.faults[0].reason


def policy_of(config: RunConfig, split: str) -> PlanPolicy:
    """
    Return how a run plans its split `train` or `eval`, with what its model's samples cost if its
    packs depend on that.
    """
    weighs = config.training.packing and ALGORITHMS[config.training.packing_algorithm].weighs
    return plan_policy(config, split, work=trained_work(config)[0] if weighs else None)


def meeting_of(config: RunConfig) -> Meeting | None:
    """
    Return where the ranks of a run wait for each other; None if its packs are not to be assigned by
    work.

    `training.packing_balance: auto` takes `microbatch` under FSDP and under DeepSpeed from stage 2
    on, else `step`.
    """
    training = config.training
    asked = training.packing_balance
    if asked == "none" or not training.packing:
        return None
    if asked != "auto":
        return asked
    stage = _stage(training.trainer.get("deepspeed"))
    return "microbatch" if training.trainer.get("fsdp") or stage >= REDUCES_EACH_BACKWARD else "step"


def _stage(deepspeed: Any) -> int:
    """Return the ZeRO stage of what `training.deepspeed` says; 0 where it names none."""
    if isinstance(deepspeed, (str, Path)):
        try:
            deepspeed = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0  # the trainer refuses it, and says why
    zero = deepspeed.get("zero_optimization") if isinstance(deepspeed, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if isinstance(stage, int) else 0
