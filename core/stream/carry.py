"""
Dynamic packing: a buffer of arriving samples, from which packs are emitted when they are full
enough.

The buffer is packed whenever it is full. Packs at or above the fill ratio are emitted. The samples
of the others stay in the buffer, and are packed again with the next samples. Rules:

- Every sample that arrived is exactly once in a pack, skipped as too long, evicted, or in the
  buffer.
- Packs depend on the order of samples alone, not on how many arrive at a time.
- At most half of the buffer is carried to the next packing, so time is linear for any lengths.
  Packs beyond that half are evicted, those carried the longest first, since they are the least
  likely to be filled later.
- Indices ascend in a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np

from packplan.core.lengths import IntArray, Lengths, as_lengths, share, whole_number
from packplan.core.packers import pack
from packplan.core.packs import Packs, concatenate

Order = Callable[[int], IntArray]
"""Epoch -> indices of samples, in order."""


def _ratio(value: float | str | Decimal | Fraction) -> Fraction:
    return share("min_fill_ratio", value)


@attrs.frozen(kw_only=True)
class CarryOptions:
    """Options of packing a stream."""

    packing_length: int
    """Token limit of a pack. Samples of as many tokens or more are long."""

    packing_buffer: int = 512
    """Samples that are packed at a time."""

    min_fill_ratio: Fraction = attrs.field(default=Fraction(65, 100), converter=_ratio)
    """
    Share of the packing length from which a pack is emitted, read as the decimal that is written.
    """

    drop_last: bool = True
    """
    Whether underfilled packs are dropped when they leave the buffer. Otherwise they are emitted.
    """

    allow_single_long: bool = True
    """Whether long samples are packs of their own. Otherwise they are skipped."""

    def __attrs_post_init__(self) -> None:
        whole_number("packing_length", self.packing_length)
        whole_number("packing_buffer", self.packing_buffer)


def _array(values: object) -> IntArray:
    return np.asarray(values, dtype=np.int64)


@attrs.frozen(eq=False)
class Carry:
    """Samples in the buffer, in order of arrival; arrays of shape (num_samples,)."""

    indices: IntArray = attrs.field(factory=lambda: _array([]), converter=_array)
    lengths: IntArray = attrs.field(factory=lambda: _array([]), converter=_array)

    carried: IntArray = attrs.field(factory=lambda: _array([]), converter=_array)
    """Number of times that each sample was packed and carried."""

    def tolist(self) -> list[list[int]]:
        """Return the three arrays as lists; `Carry(*lists)` restores them."""
        return [self.indices.tolist(), self.lengths.tolist(), self.carried.tolist()]


@attrs.frozen(eq=False)
class Emitted:
    """Packs and samples that left the buffer."""

    packs: Packs
    """Packs to train, in order."""

    single_long: tuple[int, ...]
    """Long samples, each a pack of its own among `packs`."""

    skipped_long: tuple[int, ...]
    """Long samples that are in no pack."""

    underfilled: Packs
    """
    Packs below the fill ratio that left the buffer. They are among `packs` too, unless they are
    dropped.
    """

    dropped: bool
    """Whether `underfilled` packs are dropped."""


def advance(
    carry: Carry, indices: Sequence[int] | IntArray, lengths: Lengths, *, options: CarryOptions
) -> tuple[Carry, Emitted]:
    """
    Add samples to the buffer, and emit packs that are full enough.

    Args:
        carry: Buffer before.
        indices: Sample indices, ascending over the whole stream.
        lengths: Tokens of the samples, >= 1.
        options: Options of packing.

    >>> options = CarryOptions(packing_length=80, packing_buffer=6, min_fill_ratio="0.6")
    >>> advance(Carry(), range(6), [30, 30, 20, 60, 50, 10], options=options)[1].packs.tolist()
    [[0, 4], [1, 2, 5], [3]]
    """
    indices, lengths = _array(indices), as_lengths(lengths)
    if indices.shape != lengths.shape:
        message = f"there are {indices.size} indices, but {lengths.size} lengths"
        raise ValueError(message)
    long = np.flatnonzero(lengths >= options.packing_length)
    short = np.flatnonzero(lengths < options.packing_length)
    named: tuple[int, ...] = tuple(indices[long].tolist())
    single, skipped = (named, ()) if options.allow_single_long else ((), named)
    emitted = [(int(at), Packs.from_lists([[index]])) for at, index in zip(long, single, strict=False)]
    underfilled: list[Packs] = []
    taken = 0
    while short.size - taken >= options.packing_buffer - carry.indices.size:
        new = short[taken : taken + options.packing_buffer - carry.indices.size]
        taken += new.size
        joined = _joined(carry, indices[new], lengths[new])
        carry, full, left = _pack(joined, options, most_carried=options.packing_buffer // 2)
        at = int(new[-1])
        emitted.append((at, full))
        underfilled.append(left)
        if not options.drop_last:
            emitted.append((at, left))
    rest = short[taken:]
    result = Emitted(
        # A long sample that arrived before others of a packing is emitted before them.
        packs=concatenate([_NONE, *(packs for _, packs in sorted(emitted, key=lambda pair: pair[0]))]),
        single_long=single,
        skipped_long=skipped,
        underfilled=concatenate([_NONE, *underfilled]),
        dropped=options.drop_last,
    )
    return _joined(carry, indices[rest], lengths[rest]), result


def finish(carry: Carry, *, options: CarryOptions) -> Emitted:
    """
    Empty the buffer at the end of the stream.

    >>> left = Carry([0, 1], [20, 15], [0, 0])
    >>> finish(left, options=CarryOptions(packing_length=80)).packs.tolist()
    []
    """
    _, full, left = _pack(carry, options, most_carried=0)
    kept = full if options.drop_last else concatenate([full, left])
    return Emitted(packs=kept, single_long=(), skipped_long=(), underfilled=left, dropped=options.drop_last)


_NONE = Packs.from_lists([])


def _joined(carry: Carry, indices: IntArray, lengths: IntArray) -> Carry:
    """Return the buffer with new samples at its end."""
    return Carry(
        np.concatenate([carry.indices, indices]),
        np.concatenate([carry.lengths, lengths]),
        np.concatenate([carry.carried, np.zeros_like(indices)]),
    )


def _pack(carry: Carry, options: CarryOptions, *, most_carried: int) -> tuple[Carry, Packs, Packs]:
    """
    Pack the buffer; return the carried samples, the packs that are full enough, and the evicted
    packs. At most *most_carried* samples are carried, those of the youngest packs.
    """
    packs, ratio = pack(carry.lengths, capacity=options.packing_length), options.min_fill_ratio
    is_full = packs.loads(carry.lengths) * ratio.denominator >= ratio.numerator * options.packing_length
    named = Packs(packs.offsets, carry.indices[packs.indices])
    under = np.flatnonzero(~is_full)
    ages = np.array([carry.carried[packs[place]].max() for place in under.tolist()])
    young = under[np.argsort(ages, kind="stable")]
    stays = np.cumsum(packs.sizes()[young]) <= most_carried
    kept, gone = np.sort(young[stays]), np.sort(young[~stays])
    left = np.sort(packs.take(kept).indices)
    rest = Carry(carry.indices[left], carry.lengths[left], carry.carried[left] + 1)
    return rest, named.take(np.flatnonzero(is_full)), named.take(gone)
