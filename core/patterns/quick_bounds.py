"""Lower bounds that take a few passes over the distinct lengths."""

from __future__ import annotations

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.runs import Runs

MAX_PARTS = 100
"""Parts of the capacity that dual-feasible functions round lengths to, at most."""


def quick_bound(runs: Runs, *, capacity: int) -> int:
    """
    Return the better of the L2 bound and the bound of dual-feasible functions.

    L2 (Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem",
    1990): take a threshold K up to half the capacity. Samples above `capacity - K` need a pack
    each. Samples above half the capacity need one each and leave room. If the samples from K up to
    half exceed this room, they need further packs. The functions u(k) of Fekete and Schepers ("New
    classes of fast lower bounds for bin packing problems", 2001) round lengths to k-ths of the
    capacity such that no pack holds more than k of them.
    """
    if not runs.sizes:
        return 0
    sizes = np.array(runs.sizes[::-1], dtype=np.int64)
    counts = np.array(runs.counts[::-1], dtype=np.int64)
    # Products reach number of samples * capacity * parts. Beyond 64 bits, Python's own integers
    # take over.
    if sum(runs.counts) * capacity * (MAX_PARTS + 1) >= 2**63:
        sizes, counts = sizes.astype(object), counts.astype(object)
    return max(_l2(sizes, counts, capacity), _dual_feasible(sizes, counts, capacity))


def _l2(sizes: IntArray, counts: IntArray, capacity: int) -> int:
    """Return the bound L2; *sizes* ascend."""
    samples = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * sizes)])
    halves = int(np.searchsorted(sizes, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], sizes[:halves]])
    # Runs below `small` are below K, those up to `halves` are at most half, those up to `large`
    # leave room for K.
    small = np.searchsorted(sizes, thresholds, side="left")
    large = np.maximum(np.searchsorted(sizes, capacity - thresholds, side="right"), halves)
    room = (samples[large] - samples[halves]) * capacity - (tokens[large] - tokens[halves])
    excess = np.maximum(tokens[halves] - tokens[small] - room, 0)
    return int(np.max((samples[-1] - samples[halves]) + -(-excess // capacity)))


def _dual_feasible(sizes: IntArray, counts: IntArray, capacity: int) -> int:
    """Return the best bound of the functions u(1) … u(MAX_PARTS)."""
    best = 0
    for parts in range(1, MAX_PARTS + 1):
        scaled = sizes * (parts + 1)
        whole = scaled // capacity
        # A length on the boundary keeps its share of the capacity. The others are rounded down to
        # whole parts.
        value = np.where(scaled == whole * capacity, sizes * parts, whole * capacity)
        best = max(best, -(-int((value * counts).sum()) // (capacity * parts)))
    return best
