"""
Inspection of plans: figures, invariants, differences, alternatives, and the steps of a sample.
"""

from __future__ import annotations

from packplan.core.inspection.diff import PlanDifference, plan_difference
from packplan.core.inspection.invariants import plan_faults
from packplan.core.inspection.lookup import Place, place_of, scheduled_steps
from packplan.core.inspection.meetings import Meetings, meetings
from packplan.core.inspection.review import MIN_PACKS, LowFill, longest_pack, low_fill
from packplan.core.inspection.sources import SourceSummary, summarise_sources
from packplan.core.inspection.summary import (
    PlanSummary,
    ScheduleSummary,
    fills,
    summarise,
    summarise_schedule,
)
from packplan.core.inspection.whatif import Alternative, best_of, what_if

__all__ = [
    "MIN_PACKS",
    "Alternative",
    "LowFill",
    "Meetings",
    "Place",
    "PlanDifference",
    "PlanSummary",
    "ScheduleSummary",
    "SourceSummary",
    "best_of",
    "fills",
    "longest_pack",
    "low_fill",
    "meetings",
    "place_of",
    "plan_difference",
    "plan_faults",
    "scheduled_steps",
    "summarise",
    "summarise_schedule",
    "summarise_sources",
    "what_if",
]
