"""
Memory of a training step on one rank, in bytes: kinds of it, its peak over a traced step, parts of
ranks, estimates from sizes alone, and the longest packing length that fits.
"""

from __future__ import annotations

from packplan.core.memory.longest import (
    MARGIN,
    Longest,
    longest_fitting,
    other_length,
    peak_of_full,
    with_margin,
)
from packplan.core.memory.quantity import parse_bytes, written_bytes
from packplan.core.memory.sharding import (
    SHARDINGS,
    UNMEASURED,
    RankParts,
    Sharding,
    estimated_activations,
    optimizer_bytes,
    rank_parts,
)
from packplan.core.memory.step import KINDS, Kind, PeakMemory, StepTrace, candidate_packs

__all__ = [
    "KINDS",
    "MARGIN",
    "SHARDINGS",
    "UNMEASURED",
    "Kind",
    "Longest",
    "PeakMemory",
    "RankParts",
    "Sharding",
    "StepTrace",
    "candidate_packs",
    "estimated_activations",
    "longest_fitting",
    "optimizer_bytes",
    "other_length",
    "parse_bytes",
    "peak_of_full",
    "rank_parts",
    "with_margin",
    "written_bytes",
]
