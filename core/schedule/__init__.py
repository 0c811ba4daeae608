"""Epoch schedules, which assign packs to ranks and steps, and statistics of an epoch."""

from __future__ import annotations

from packplan.core.schedule.schedule import (
    DAMAGED,
    ORDER_VERSION,
    EpochSchedule,
    EpochSegment,
    Progress,
    ResumeState,
    Step,
    require_start,
    resumed,
)
from packplan.core.schedule.telemetry import EpochStats, PackStats, heaviest_packs

__all__ = [
    "DAMAGED",
    "ORDER_VERSION",
    "EpochSchedule",
    "EpochSegment",
    "EpochStats",
    "PackStats",
    "Progress",
    "ResumeState",
    "Step",
    "heaviest_packs",
    "require_start",
    "resumed",
]
