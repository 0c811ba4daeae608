"""Inspection of plans: figures, invariants, and the steps of a sample."""

from packplan.core.inspection.invariants import Place, place_of, plan_faults, scheduled_steps
from packplan.core.inspection.summary import (
    LowFill,
    PlanSummary,
    ScheduleSummary,
    SourceSummary,
    longest_pack,
    low_fill,
    summarise,
    summarise_schedule,
    summarise_sources,
)
