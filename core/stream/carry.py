"""
Dynamic packing: a buffer of arriving samples, which is packed whenever it is full.

Packs at or above the fill ratio leave the buffer. The samples of the others stay, and are packed
again with the next samples. Rules:

- At most half of the buffer stays for the next packing, so time is linear for any lengths. Beyond
  that half the packs of the oldest samples leave underfilled: they are trained, and counted.
- Underfilled packs are dropped at the end of the stream alone, if at all.
- Packs are those of the installed `binpacking.to_constant_volume` (specification 002). They depend
  on the samples and their order alone. Indices ascend in a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import attrs
import binpacking
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, share, whole_number
from packplan.core.packs import Packs

Order = Callable[[int], IntArray]
"""Epoch -> indices of samples, in order."""

PACKER_VERSION = str(binpacking.__version__)
"""Version of binpacking. Another one may pack in another way, as 2.0 did after 1.5."""


@attrs.frozen(kw_only=True)
class CarryOptions:
    """Options of packing a stream."""

    packing_length: int
    """Token limit of a pack. Samples of as many tokens or more are long."""

    packing_buffer: int = 512
    """Samples that are packed at a time."""

    min_fill_ratio: Fraction = attrs.field(
        default=Fraction(65, 100), converter=lambda value: share("min_fill_ratio", value)
    )
    """
    Share of the packing length from which a pack is full enough, read as the decimal that is
    written.
    """

    drop_last: bool = True
    """Whether packs that are underfilled at the end of the stream are dropped."""

    allow_single_long: bool = True
    """Whether long samples are packs of their own. Otherwise they are skipped."""

    def __attrs_post_init__(self) -> None:
        whole_number("packing_length", self.packing_length)
        whole_number("packing_buffer", self.packing_buffer)

    def is_full(self, tokens: IntArray) -> NDArray[np.bool_]:
        """Return whether packs of so many tokens are full enough; bool, shaped as *tokens*."""
        ratio = self.min_fill_ratio
        return tokens * ratio.denominator >= ratio.numerator * self.packing_length


def pack_buffer(lengths: IntArray, *, options: CarryOptions, most_carried: int) -> tuple[Packs, Packs, IntArray]:
    """
    Pack a buffer; return the packs that are full enough, the underfilled packs that leave it, and
    the indices of the samples that stay.

    Args:
        lengths: Tokens of the samples in order of arrival; int64, shape (num_samples,).
        options: Options of packing.
        most_carried: Number of samples that may stay.

    >>> lengths, options = np.array([41, 41, 41, 39]), CarryOptions(packing_length=80)
    >>> full, underfilled, stay = pack_buffer(lengths, options=options, most_carried=1)
    >>> full.tolist(), underfilled.tolist(), stay.tolist()
    ([[0, 3]], [[1]], [2])
    """
    bins = binpacking.to_constant_volume(list(enumerate(lengths.tolist())), options.packing_length, weight_pos=1)
    packs = Packs.from_lists(sorted(sorted(index for index, _ in one) for one in bins if one))
    is_full = options.is_full(packs.loads(lengths))
    under = packs.take(np.flatnonzero(~is_full))
    # Packs are in the order of their oldest samples, so that the youngest are the last.
    stays = np.cumsum(under.sizes()[::-1])[::-1] <= most_carried
    left = np.sort(under.take(np.flatnonzero(stays)).indices)
    return packs.take(np.flatnonzero(is_full)), under.take(np.flatnonzero(~stays)), left
