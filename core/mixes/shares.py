"""Shares of sources in an epoch, as they were asked for and as they were drawn."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.mixes.draw import pools
from packplan.core.mixes.mixes import Mixes
from packplan.core.mixes.quotas import quotas


@attrs.frozen
class SourceShare:
    """One source in an epoch. Shares are of the unit that its mix counts: samples or tokens."""

    file: str

    asked_share: float
    """Share that follows from the ratios, counts and caps."""

    samples: int
    """Samples drawn, repeated ones included."""

    tokens: int
    """Tokens of these samples."""

    share: float
    """Share of the source in what was drawn."""


def told_shares(
    mixes: Mixes, lengths: Lengths, sizes: Sequence[int], selection: IntArray, *, epoch: int
) -> tuple[SourceShare, ...]:
    """
    Return the shares of each source of an epoch, in the order of its mix.

    Args:
        mixes: See `select`.
        lengths: See `select`.
        sizes: See `select`.
        selection: Records that `select` returned for this epoch; at least one.
        epoch: Epoch, from 0.
    """
    mix, length_of = mixes.at(epoch), as_lengths(lengths, least=0)
    wanted = quotas(mix, [pool.available(mix) for pool in pools(mix, mixes, length_of, sizes)])
    ends = np.searchsorted(selection, np.cumsum([0, *sizes]))
    tokens_to = np.concatenate([[0], np.cumsum(length_of[selection])])[ends]
    samples = dict(zip(mixes.files, np.diff(ends).tolist(), strict=True))
    tokens = dict(zip(mixes.files, np.diff(tokens_to).tolist(), strict=True))
    drawn = samples if mix.by == "samples" else tokens
    return tuple(
        SourceShare(
            source.jsonl,
            asked_share=float(quota / sum(wanted)),
            samples=samples[source.jsonl],
            tokens=tokens[source.jsonl],
            share=drawn[source.jsonl] / sum(drawn.values()),
        )
        for source, quota in zip(mix.sources, wanted, strict=True)
    )
