"""
What packs cost to train, in FLOPs of the model's own layers, and which rank of a step computes
which.
"""

from __future__ import annotations

from core.work.assignment import UNITS, Meeting, assign_steps, bounds_of_steps, checked_works, group_steps, in_units
from core.work.imbalance import expected_imbalance, floor_of
from core.work.model import SampleWorks, VisionWork, WorkModel, causal_pairs

__all__ = [
    "UNITS",
    "Meeting",
    "SampleWorks",
    "VisionWork",
    "WorkModel",
    "assign_steps",
    "bounds_of_steps",
    "causal_pairs",
    "checked_works",
    "expected_imbalance",
    "floor_of",
    "group_steps",
    "in_units",
]
