"""The packs that take the most memory to train, and shorter ones instead of them."""

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


def shorter_pack(stats: PackStats, lengths: IntArray, position: int, *, most: int) -> list[int]:
    """
    Return samples for a pack of fewer tokens: those of a pack that fit, and others of the plan that
    fit beside them, longest first.

    Args:
        stats: Packs of an epoch.
        lengths: Tokens of each sample; shape (num_samples,).
        position: Index of the pack.
        most: Tokens that the samples may have together.

    Returns:
        Indices of different samples; none if every sample is longer.
    """
    chosen: list[int] = []
    for sample in stats.packs[position]:
        if lengths[sample] <= most:
            chosen.append(sample)
            most -= int(lengths[sample])
    by_length = stats.packs.indices[np.argsort(lengths[stats.packs.indices], kind="stable")]
    sorted_lengths, left = lengths[by_length], by_length.size
    while left := int(np.searchsorted(sorted_lengths[:left], most, side="right")):
        left -= 1
        sample = int(by_length[left])
        if sample not in chosen:
            chosen.append(sample)
            most -= int(lengths[sample])
    return chosen
