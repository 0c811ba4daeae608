"""Which packs each rank trains in which step of an epoch, and what an epoch has trained so far."""

from __future__ import annotations

from packplan.core.schedule.schedule import ORDER_VERSION, EpochSchedule, EpochSegment, Progress, ResumeState
from packplan.core.schedule.telemetry import EpochStats, PackStats

__all__ = ["ORDER_VERSION", "EpochSchedule", "EpochSegment", "EpochStats", "PackStats", "Progress", "ResumeState"]
