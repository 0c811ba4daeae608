"""Warnings about a plan: packs far over the packing length, and room that packs leave unused."""

from __future__ import annotations

from typing import Literal

import attrs
import numpy as np

from packplan.core.lengths import Lengths, as_lengths
from packplan.core.plan import RawPlan

MAX_FILL = 0.8
MIN_PACKS = 100
"""A plan of more packs than this with a fill below `MAX_FILL` is explained."""


@attrs.frozen
class LongestPack:
    """
    Longest pack, and number of packs far over the packing length. Only packs of a long sample
    exceed it.
    """

    tokens: int
    """Tokens of the longest pack."""

    num_oversized: int
    """Packs of more than 1.1 times the packing length."""


def longest_pack(plan: RawPlan, lengths: Lengths) -> LongestPack:
    """
    Return the longest pack of a plan, which decides the memory of training.

    >>> from packplan.core.plan import build_raw_plan
    >>> lengths = [50, 30, 100, 110, 111]
    >>> longest_pack(build_raw_plan(lengths, packing_length=100), lengths)
    LongestPack(tokens=111, num_oversized=1)
    """
    loads = plan.packs.loads(as_lengths(lengths, least=0))
    # In whole numbers: 1.1 is no binary fraction.
    return LongestPack(int(loads.max()), int((loads * 10 > plan.packing_length * 11).sum()))


@attrs.frozen
class LowFill:
    """Reason why a plan of many packs leaves much room unused."""

    fill: float
    """Mean fill of the packs. A long pack counts as full."""

    reason: Literal["algorithm", "partners", "lengths"]
    """
    `algorithm`: at least half of the unused room is in packs beyond the lower bound. `partners`:
    else, at least half is in packs of one sample of more than half the packing length. `lengths`:
    otherwise.
    """

    num_packs: int
    """Packs of short samples, dropped ones included."""

    lower_bound: int
    """Number of packs that no plan of these short samples can go below."""

    num_alone: int
    """Short samples of more than half the packing length that are each a pack by themselves."""

    median: int
    """Tokens of the median short sample."""


def low_fill(plan: RawPlan, lengths: Lengths) -> LowFill | None:
    """
    Return the reason of a low fill of many packs, or None.

    Args:
        plan: Plan of packed samples.
        lengths: Tokens of each record, 0 for one that is no sample; shape (num_records,).
    """
    if len(plan.packs) <= MIN_PACKS or plan.fill >= MAX_FILL:
        return None
    array = as_lengths(lengths, least=0)
    loads, sizes = plan.packs.loads(array), plan.packs.sizes()
    is_short = (sizes > 1) | (loads < plan.packing_length)
    short = array[(array > 0) & (array < plan.packing_length)]
    room = plan.packing_length - loads[is_short]
    alone = (sizes[is_short] == 1) & (room * 2 < plan.packing_length)
    num_packs = int(is_short.sum()) + len(plan.dropped_packs)
    bound = plan.lower_bound - len(plan.single_long)
    unused = int(room.sum()) + len(plan.dropped_packs) * plan.packing_length - plan.dropped_tokens
    reason: Literal["algorithm", "partners", "lengths"] = "lengths"
    if (num_packs - bound) * plan.packing_length * 2 >= unused:
        reason = "algorithm"
    elif int(room[alone].sum()) * 2 >= unused:
        reason = "partners"
    return LowFill(plan.fill, reason, num_packs, bound, int(alone.sum()), int(np.median(short)))
