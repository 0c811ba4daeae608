"""Peak memory of a training step, from the births and deaths of its blocks of memory."""

from __future__ import annotations

from typing import Any, Literal, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

Kind = Literal["weights", "gradients", "optimizer", "activations", "temporaries"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""
Kinds of memory. Weights include buffers. Activations are the batch, and what the forward pass keeps
for the backward pass; temporaries are everything else of the two passes, and of the update.
"""


@attrs.frozen
class PeakMemory:
    """Memory of one rank at the moment of its peak, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        """Sum of the kinds."""
        return sum(attrs.astuple(self))


@attrs.frozen(eq=False)
class StepTrace:
    """
    Blocks of memory of the passes of one step, in steady state, and the totals of its update.

    Times count births and deaths. The optimizer's memory is no block: it is there throughout.
    """

    births: NDArray[np.int64]
    """Time from which a block is there; shape (num_blocks,)."""

    deaths: NDArray[np.int64]
    """Time from which it is not; shape (num_blocks,)."""

    sizes: NDArray[np.int64]
    """Bytes of each block; shape (num_blocks,)."""

    kinds: NDArray[np.int64]
    """Index of each block's kind in `KINDS`, or -1 for activations and temporaries; same shape."""

    logits: NDArray[np.bool_]
    """Whether a block has the vocabulary's width, as logits and their gradients; same shape."""

    forward_end: int
    """Time at which the forward pass ends."""

    optimizer: int
    """Bytes of the optimizer."""

    update: int
    """Temporary bytes of the optimizer's update, at their peak."""

    buckets: int = 0
    """Bytes of buckets in which ranks sum gradients; they are there throughout."""

    def peak(self, *, fused_loss: bool = False) -> PeakMemory:
        """
        Return the peak over both passes and the update.

        Args:
            fused_loss: Leave out logits, which fused losses never hold as a whole.
        """
        kept = ~self.logits if fused_loss else np.ones(len(self.sizes), dtype=bool)
        kinds, rows = self._kinds(), np.zeros((len(KINDS), 1 + int(self.deaths.max(initial=1))), dtype=np.int64)
        for times, sign in ((self.births, 1), (self.deaths, -1)):
            np.add.at(rows, (kinds[kept], times[kept]), sign * self.sizes[kept])
        held = rows.cumsum(axis=1)
        passes = self._at(held[:, int(held.sum(axis=0).argmax())], self.buckets)
        # What is held when the backward pass has ended is held during the update.
        updating = self._at(held[:, -2], self.buckets + self.update)
        return max(passes, updating, key=lambda one: one.total)

    def _at(self, held: NDArray[np.int64], temporaries: int) -> PeakMemory:
        named = dict(zip(KINDS, held.tolist(), strict=True))
        named["optimizer"] += self.optimizer
        named["temporaries"] += temporaries
        return PeakMemory(**named)

    def _kinds(self) -> NDArray[np.int64]:
        """Return the kind of every block."""
        kept = (self.births <= self.forward_end) & (self.deaths > self.forward_end)
        passing = np.where(kept, KINDS.index("activations"), KINDS.index("temporaries"))
        return np.where(self.kinds < 0, passing, self.kinds)


def candidate_packs(
    tokens: NDArray[Any],
    supervised: NDArray[Any],
    patches: NDArray[Any],
    *,
    per_token: float,
    per_supervised: float,
    per_patch: float,
) -> tuple[int, ...]:
    """
    Return the packs that may need the most memory: the one of most bytes by a rough estimate, and
    the second one where packs have images, whose sizes the estimate ignores.

    Args:
        tokens: Tokens of each pack; shape (num_packs,).
        supervised: Tokens of each pack with a loss; same shape.
        patches: Vision patches of each pack; same shape.
        per_token: Bytes of a token, roughly.
        per_supervised: Bytes of a token's logits, roughly.
        per_patch: Bytes of a patch, roughly.

    >>> tokens, supervised, patches = np.array([[9, 8], [1, 2], [0, 0]])
    >>> candidate_packs(tokens, supervised, patches, per_token=1, per_supervised=3, per_patch=1)
    (1,)
    """
    rough = tokens * per_token + supervised * per_supervised + patches * per_patch
    return tuple(np.argsort(-rough, kind="stable")[: 2 if patches.any() else 1].tolist())
