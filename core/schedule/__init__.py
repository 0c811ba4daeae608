"""Epoch schedules, which assign packs to ranks and steps, and statistics of an epoch."""

from __future__ import annotations

from packplan.core.schedule.schedule import ORDER_VERSION, EpochSchedule, EpochSegment, Progress, ResumeState, Step
from packplan.core.schedule.telemetry import EpochStats, PackStats

__all__ = [
    "ORDER_VERSION",
    "EpochSchedule",
    "EpochSegment",
    "EpochStats",
    "PackStats",
    "Progress",
    "ResumeState",
    "Step",
]
