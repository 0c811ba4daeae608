"""
Constant volume: the emptiest bin that fits, longest samples first.

The packs of `binpacking.to_constant_volume` 2.x (with `weight_pos`), without its quadratic search: the emptiest
bin fits if any bin fits, so a heap of (load, bin) finds it. Worst-fit decreasing in the literature (Johnson,
"Near-optimal bin packing algorithms", 1973).
"""

from __future__ import annotations

from heapq import heappush, heapreplace

import numpy as np

from core.lengths import IntArray


def constant_volume(lengths: IntArray, *, capacity: int) -> IntArray:
    """
    Return the bin of each sample; shape (num_samples,).

    Args:
        lengths: Tokens, each from 1 to *capacity*.

        capacity: Tokens a bin may hold.
    """
    # Equal lengths keep their input order, and of equally empty bins the one opened first is taken, as in the library.
    order = np.argsort(-lengths, kind="stable")
    bins: list[int] = []
    heap: list[tuple[int, int]] = []
    for length in lengths[order].tolist():
        if heap and heap[0][0] + length <= capacity:
            load, chosen = heap[0]
            heapreplace(heap, (load + length, chosen))
        else:
            chosen = len(heap)
            heappush(heap, (length, chosen))
        bins.append(chosen)
    assigned = np.empty(lengths.size, dtype=np.int64)
    assigned[order] = bins
    return assigned
