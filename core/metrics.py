"""Utilisation, waste, balance and efficiency of packs."""

from __future__ import annotations

import attrs

from core.lengths import Lengths, as_lengths, positive
from core.packs import Packs


@attrs.frozen
class PackingMetrics:
    """How well packs use their capacity; every figure is a share of 1."""

    utilisation: float
    """Tokens over what the packs may hold: the fill ratio."""

    waste_ratio: float
    """`1 - utilisation`."""

    balance: float
    """`1 - stdev(load / capacity) / utilisation`, over the population of packs; 1 when all are equally full."""

    efficiency: float
    """`ceil(tokens / capacity)` over the number of packs."""


def packing_metrics(lengths: Lengths, packs: Packs, *, capacity: int) -> PackingMetrics:
    """
    Measure *packs*, at least one, against their capacity in tokens.

    >>> packing_metrics([60, 20, 50], Packs.from_lists([[0, 1], [2]]), capacity=80).efficiency
    1.0
    """
    capacity = positive("capacity", capacity)
    loads = packs.loads(as_lengths(lengths)) / capacity
    utilisation = float(loads.mean())
    minimum = -(-int(packs.loads(as_lengths(lengths)).sum()) // capacity)
    return PackingMetrics(
        utilisation=utilisation,
        waste_ratio=1 - utilisation,
        balance=1 - float(loads.std()) / utilisation,
        efficiency=minimum / len(packs),
    )
