"""
Concatenative: samples in input order, with a new pack when the next does not fit. The literature
calls it next fit.
"""

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packs import BLOCK, Packs


def concatenative(lengths: IntArray, *, capacity: int) -> Packs:
    """
    Return packs of consecutive samples.

    Args:
        lengths: Tokens, each from 1 to *capacity*; at least one.
        capacity: Tokens a pack may hold.
    """
    offsets = [0]
    start, block = 0, BLOCK
    while True:
        inside = lengths[start : start + block]
        ends = np.cumsum(inside)
        # following[i]: the first sample that does not fit into a pack that starts at sample i.
        following = np.searchsorted(ends - capacity, ends - inside, side="right").tolist()
        at = 0
        while following[at] < inside.size:
            at = following[at]
            offsets.append(start + at)
        if start + inside.size == lengths.size:
            offsets.append(lengths.size)
            return Packs(np.array(offsets, dtype=np.int64), np.arange(lengths.size))
        # The last pack may go on behind the block. It starts the next one, which grows if a single
        # pack fills it.
        block = block if at else 2 * block
        start += at
