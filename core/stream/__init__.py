"""
Packing during training: a mix of data sets drawn again each epoch, and the buffer that packs it.
"""

from __future__ import annotations

from packplan.core.stream.carry import Carry, CarryOptions, Emitted, advance, finish
from packplan.core.stream.fusion import Mix, Order, Schedule, Source, mix_faults, quotas, schedule, share_faults

__all__ = [
    "Carry",
    "CarryOptions",
    "Emitted",
    "Mix",
    "Order",
    "Schedule",
    "Source",
    "advance",
    "finish",
    "mix_faults",
    "quotas",
    "schedule",
    "share_faults",
]
