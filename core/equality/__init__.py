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
from packplan.core.equality.names import AUTO, BACKENDS, FLASH_BACKENDS, FLEX, MASKED, NATIVE, SHARED_ROWS, VARLEN
from packplan.core.equality.verdict import (
    EQUAL,
    PROBE_VERSION,
    STRATEGIES,
    PackingVerdict,
    ProbeResult,
    Strategy,
    Trial,
    loaded_limit,
    trials,
)

__all__ = [
    "AUTO",
    "BACKENDS",
    "CHECKS",
    "EQUAL",
    "FLASH_BACKENDS",
    "FLEX",
    "MASKED",
    "NATIVE",
    "PROBE_VERSION",
    "SENSITIVITY_FACTOR",
    "SHARED_ROWS",
    "STRATEGIES",
    "VARLEN",
    "AttentionChoice",
    "Deviation",
    "PackingVerdict",
    "Precision",
    "ProbeResult",
    "Strategy",
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
