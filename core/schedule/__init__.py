"""Which packs each rank trains in which step of an epoch, and what an epoch has trained so far."""

from __future__ import annotations

from core.schedule.schedule import ORDER_VERSION, Bookmark, Course, Progress
from core.schedule.telemetry import EpochLedger, PackFacts

__all__ = ["ORDER_VERSION", "Bookmark", "Course", "EpochLedger", "PackFacts", "Progress"]
