"""
Mixes of several data sets: which samples each source gives to an epoch, by samples or by tokens.
"""

from __future__ import annotations

from packplan.core.mixes.draw import Schedule, schedule, select
from packplan.core.mixes.faults import drawn_faults, mixes_faults, stream_faults
from packplan.core.mixes.mixes import Mix, Mixes, Source
from packplan.core.mixes.quotas import quotas
from packplan.core.mixes.shares import SourceShare, told_shares

__all__ = [
    "Mix",
    "Mixes",
    "Schedule",
    "Source",
    "SourceShare",
    "drawn_faults",
    "mixes_faults",
    "quotas",
    "schedule",
    "select",
    "stream_faults",
    "told_shares",
]
