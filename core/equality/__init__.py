"""
Equality of packed samples with the samples alone: verdicts of `packplan check` and of the probe,
and choice of attention.
"""

from __future__ import annotations

from packplan.core.equality.choice import AttentionChoice, choose_attention
from packplan.core.equality.equality import (
    CHECKS,
    SENSITIVITY_FACTOR,
    Deviation,
    Precision,
    Verdict,
    choose_packs,
    judge,
    kind,
    loss_difference,
)
from packplan.core.equality.names import AUTO, BACKENDS, FLEX, MASKED, NATIVE, VARLEN
from packplan.core.equality.verdict import (
    EQUAL,
    PROBE_VERSION,
    PackingVerdict,
    ProbeResult,
    Trial,
    loaded_limit,
    trials,
)

__all__ = [
    "AUTO",
    "BACKENDS",
    "CHECKS",
    "EQUAL",
    "FLEX",
    "MASKED",
    "NATIVE",
    "PROBE_VERSION",
    "SENSITIVITY_FACTOR",
    "VARLEN",
    "AttentionChoice",
    "Deviation",
    "PackingVerdict",
    "Precision",
    "ProbeResult",
    "Trial",
    "Verdict",
    "choose_attention",
    "choose_packs",
    "judge",
    "kind",
    "loaded_limit",
    "loss_difference",
    "trials",
]
