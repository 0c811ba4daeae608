"""Epochs with plans of their own: the samples of each epoch, its plan, and a record of it."""

from __future__ import annotations

from packplan.core.epochs.epochs import (
    MOST_EPOCHS,
    EpochPlan,
    EpochRecipe,
    EpochRecord,
    EpochSamples,
    drawable,
    plan_epoch,
    plan_key,
    record_of,
    select_epoch,
    with_epochs,
)

__all__ = [
    "MOST_EPOCHS",
    "EpochPlan",
    "EpochRecipe",
    "EpochRecord",
    "EpochSamples",
    "drawable",
    "plan_epoch",
    "plan_key",
    "record_of",
    "select_epoch",
    "with_epochs",
]
