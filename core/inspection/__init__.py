"""Inspection of plans: figures, and the place and the steps of a sample."""

from packplan.core.inspection.places import Place, place_of, scheduled_steps
from packplan.core.inspection.summary import (
    PlanSummary,
    ScheduleSummary,
    SourceSummary,
    summarise,
    summarise_schedule,
    summarise_sources,
)
