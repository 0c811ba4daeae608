"""
Work of samples and packs in FLOPs of the model's layers, and assignment of packs to ranks by work.
"""

from packplan.core.work.assignment import (
    UNITS,
    Meeting,
    assign_steps,
    bounds_of_steps,
    group_steps,
    in_units,
)
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.text import DELTA_CHUNK, LocalAttention
from packplan.core.work.vision import FLOPs, VisionWork
