"""
Padded batches of samples of like length: what packing has to be compared with, beside random
batches.
"""

from __future__ import annotations

import attrs
import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.schedule import EpochSchedule
from packplan.core.shuffling import shuffled


@attrs.frozen(kw_only=True, eq=False)
class LikeLengths(EpochSchedule):
    """
    Batches of samples of like length, in a random order; what `group_by_length` is for, without its
    noise.
    """

    lengths: IntArray
    """Tokens of each sample; shape (num_packs,)."""

    def order(self, epoch: int) -> IntArray:
        """
        Return the samples of *epoch*, batch after batch; the smaller batch that may remain comes
        last.
        """
        ascending = np.argsort(self.lengths, kind="stable")
        # The shortest samples remain, which makes the smaller batch also the cheapest.
        rest, full = np.split(ascending, [ascending.size % self.batch_size])
        batches = full.reshape(-1, self.batch_size)
        return np.concatenate([batches[shuffled(len(batches), seed=(self.seed, epoch))].ravel(), rest])
