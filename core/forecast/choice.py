"""Packs of a plan whose steps are measured, so that every term of their seconds varies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.packs import Packs

REPEATS = 3
"""Times that each step is measured, one after all others."""

_QUANTILES = (1.0, 0.0, 0.5, 0.75, 0.25)
"""Places of measured packs among those of a plan, by work; the heaviest come first."""

_WINDOW = 8
"""A step has packs of like work: at most one of these parts of a plan, repeated if need be."""


def calibration_packs(
    packs: Packs,
    work: NDArray[np.float64],
    vision: NDArray[np.float64],
    order: IntArray,
    *,
    world_size: int,
    batches: int,
    batch_size: int = 1,
) -> list[list[int]]:
    """
    Return the samples of each pack to train, in order, step after step.

    The steps hold packs of like work from the heaviest to the lightest, those of most images,
    halves of packs, and the run's own first steps. The last one has a single microbatch.

    Args:
        packs: Packs of the plan.
        work: FLOPs of each pack; shape (num_packs,).
        vision: FLOPs of each pack's images; shape (num_packs,).
        order: Packs in the order of training, over all ranks.
        world_size: Data-parallel learners.
        batches: Microbatches of a rank in a step.
        batch_size: Packs of a microbatch; above 1 only if each is one sample.
    """
    each = world_size * batches * batch_size
    by_work = np.argsort(work, kind="stable")
    window = max(1, min(each, len(by_work) // _WINDOW))
    steps = [_window(by_work, place, window) for place in _QUANTILES]
    if np.ptp(vision):
        steps.append(_window(np.argsort(vision, kind="stable"), 1.0, window))
    steps += [order[:each], order[each : 2 * each] if order.size > each else order[:each]]
    chosen = [packs[pack] for step in steps for pack in np.resize(step, each).tolist()]
    median = [packs[pack] for pack in np.resize(_window(by_work, 0.5, window), each).tolist()]
    if batch_size == 1:
        chosen += [pack[: -(-len(pack) // 2)] for pack in median]
    return chosen + (median[: world_size * batch_size] if batches > 1 else [])


def _window(ranked: IntArray, place: float, window: int) -> IntArray:
    """Return neighbours at a place from 0 to 1 of a ranking, ascending."""
    start = round(place * (ranked.size - window))
    return ranked[start : start + window]
