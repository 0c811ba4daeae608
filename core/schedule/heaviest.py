"""The packs that take the most memory to train."""

from __future__ import annotations

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.schedule.telemetry import PackStats


def heaviest_packs(stats: PackStats, supervised: IntArray, *, size: int = 1) -> tuple[tuple[int, ...], ...]:
    """
    Return batches of the packs that may take the most memory: those of most tokens, of most tokens
    with a loss, whose logits are held, of most work, and of most work in images.

    Args:
        stats: Packs of an epoch, with counts.
        supervised: Tokens of each sample with a loss; shape (num_samples,).
        size: Packs in a batch, >= 1; fewer if there are no more.

    Returns:
        From one to four batches, each the indices of its packs, heaviest first.
    """
    weights = [stats.tokens, stats.packs.loads(supervised), stats.work]
    if stats.images is not None and stats.images.any():
        weights.append(stats.images)
    batches = (tuple(np.argsort(-weight, kind="stable")[:size].tolist()) for weight in weights)
    return tuple(dict.fromkeys(batches))
