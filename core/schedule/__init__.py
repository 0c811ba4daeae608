"""Epoch schedules, which assign packs to ranks and steps, and statistics of their epochs."""

from packplan.core.schedule.schedule import (
    DAMAGED_STATE_REMEDY,
    ORDER_VERSION,
    EpochSchedule,
    EpochSegment,
    Progress,
    ResumeState,
    Step,
)
from packplan.core.schedule.telemetry import EpochStats, PackStats
