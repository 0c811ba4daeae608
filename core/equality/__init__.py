"""
Whether packed samples train as they do alone: the check's verdict, and the attentions it is
established for.
"""

from __future__ import annotations

from core.equality.equality import (
    CHECKS,
    PROBE_FACTOR,
    Finding,
    Precision,
    Verdict,
    choose_packs,
    judge,
    kind,
    loss_difference,
)
from core.equality.isolation import BACKENDS, NATIVE, SHARED_ROWS, VARLEN, Attention, check_isolation, choose_attention

__all__ = [
    "BACKENDS",
    "CHECKS",
    "NATIVE",
    "PROBE_FACTOR",
    "SHARED_ROWS",
    "VARLEN",
    "Attention",
    "Finding",
    "Precision",
    "Verdict",
    "check_isolation",
    "choose_attention",
    "choose_packs",
    "judge",
    "kind",
    "loss_difference",
]
