"""
Inspection of plans: figures, invariants, differences, alternatives, and the steps of a sample.
"""

from packplan.core.inspection.comparison import (
    Alternative,
    Meetings,
    PlanDifference,
    best_of,
    meetings,
    plan_difference,
    what_if,
)
from packplan.core.inspection.invariants import Place, place_of, plan_faults, scheduled_steps
from packplan.core.inspection.summary import (
    MIN_PACKS,
    LowFill,
    PlanSummary,
    ScheduleSummary,
    SourceSummary,
    fills,
    longest_pack,
    low_fill,
    summarise,
    summarise_schedule,
    summarise_sources,
)
