"""
Progress of one shard of a stream: each rank and loader worker packs a shard of an epoch's samples.

A buffer of arriving samples is packed whenever it is full. Packs at or above the fill ratio leave
it. The samples of the others stay, and are packed again with the next samples. Rules:

- Packs are those of the installed `binpacking.to_constant_volume` (specification 002). They depend
  on the samples and their order alone, also if the state was saved between them. Samples of a pack
  are in the order of their arrival.
- At most half of the buffer stays for the next packing, so time is linear for any lengths. Beyond
  that half the packs of the oldest samples leave underfilled: they are trained, and counted.
- Underfilled packs are dropped at the end of the stream alone, if at all.
- A sample that was read is ahead of the buffer, in it, in a filled pack, or counted as trained,
  dropped or skipped.

A `ShardState` is all that a shard knows between two packs, so that another process may go on from
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain

import attrs
import binpacking

from packplan.core.lengths import IntArray, share, whole_number

Order = Callable[[int], IntArray]
"""Epoch -> indices of samples, in order."""

PACKER_VERSION = str(binpacking.__version__)
"""Version of binpacking. Another one may pack in another way, as 2.0 did after 1.5."""


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

    def is_full(self, tokens: int) -> bool:
        """Return whether a pack of so many tokens is full enough."""
        return tokens >= self.min_fill_ratio * self.packing_length


@attrs.frozen
class Item:
    """Sample of an epoch."""

    place: int
    """Place of the record in the epoch's order, from 0."""

    length: int = 0
    """Tokens of the sample; 0 until it is encoded."""


@attrs.frozen
class StreamCounts:
    """Counts of samples of a stream, by outcome."""

    samples: int = 0
    """Samples that came to the buffer."""

    packs: int = 0
    """Packs to train."""

    long: int = 0
    """Samples of the packing length or more, each in a pack of its own."""

    skipped: int = 0
    """Samples of the packing length or more that are in no pack."""

    dropped: int = 0
    """Samples of dropped packs."""

    filled_tokens: int = 0
    """Filled tokens of the packing length over all packs; a long pack counts as full."""

    tokens: int = 0
    """Tokens of all samples so far."""

    dropped_packs: int = 0
    """Dropped packs: underfilled ones, and those that fill no step of all ranks."""

    dropped_tokens: int = 0
    """Tokens in the packs that were dropped."""

    underfilled_packs: int = 0
    """Packs to train below the fill ratio."""

    @classmethod
    def of_pack(cls, lengths: Sequence[int], options: CarryOptions) -> StreamCounts:
        """Return the counts of one pack to train."""
        tokens = sum(lengths)
        return cls(
            packs=1,
            long=int(tokens >= options.packing_length and len(lengths) == 1),
            filled_tokens=min(tokens, options.packing_length),
            underfilled_packs=int(not options.is_full(tokens)),
        )

    def without_pack(self, lengths: Sequence[int], options: CarryOptions) -> StreamCounts:
        """Return these counts with one of the packs dropped instead of trained."""
        pack = self.of_pack(lengths, options)
        return attrs.evolve(
            self,
            packs=self.packs - 1,
            long=self.long - pack.long,
            filled_tokens=self.filled_tokens - pack.filled_tokens,
            underfilled_packs=self.underfilled_packs - pack.underfilled_packs,
            dropped=self.dropped + len(lengths),
            dropped_packs=self.dropped_packs + 1,
            dropped_tokens=self.dropped_tokens + sum(lengths),
        )

    def drops_more_than(self, share: Decimal) -> bool:
        """Return whether more than one pack, and more than this share of tokens, was dropped."""
        return self.dropped_packs > 1 and self.dropped_tokens > share * self.tokens

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


@attrs.frozen
class ShardState:
    """Progress of a shard in an epoch, between two packs."""

    read: int = 0
    """Places of the shard that were read."""

    ahead: tuple[Item, ...] = ()
    """Items that were read and have not come to the buffer yet."""

    buffer: tuple[Item, ...] = ()
    """Items in the buffer, in order of arrival."""

    packs: tuple[tuple[Item, ...], ...] = ()
    """Packs that are filled and wait to be trained, in order."""

    counts: StreamCounts = StreamCounts()
    """Counts of the shard's samples in this epoch; packs that wait are not among them."""

    @property
    def admitted(self) -> tuple[Item, ...]:
        """Items that came to the buffer and wait, in the buffer or in a pack."""
        return (*chain.from_iterable(self.packs), *self.buffer)

    @property
    def waiting(self) -> tuple[Item, ...]:
        """Items that were read and are neither trained nor dropped nor skipped."""
        return (*self.admitted, *self.ahead)


def read_items(state: ShardState, items: Sequence[Item], *, places: int) -> ShardState:
    """
    Return the state after more items were read.

    Args:
        state: State before.
        items: Items of the next places, in order; several of one place, or none.
        places: Number of these places.
    """
    return attrs.evolve(state, read=state.read + places, ahead=(*state.ahead, *items))


def admit_first(state: ShardState, length: int, *, options: CarryOptions) -> ShardState:
    """
    Return the state after the first item ahead came to the buffer.

    Args:
        state: State before; an item is ahead.
        length: Tokens of the item.
        options: Options of packing.
    """
    first, *ahead = state.ahead
    item = attrs.evolve(first, length=length)
    counts = state.counts + StreamCounts(samples=1, tokens=length)
    if length >= options.packing_length:
        packs, skipped = ((item,),) if options.allow_single_long else (), int(not options.allow_single_long)
        counts += StreamCounts(skipped=skipped)
        return attrs.evolve(state, ahead=tuple(ahead), packs=(*state.packs, *packs), counts=counts)
    came = attrs.evolve(state, ahead=tuple(ahead), buffer=(*state.buffer, item), counts=counts)
    if len(came.buffer) < options.packing_buffer:
        return came
    return _pack(came, options, most_carried=options.packing_buffer // 2, drop=False)


def flush_buffer(state: ShardState, *, options: CarryOptions) -> ShardState:
    """Return the state after the buffer was packed at the end of the shard."""
    return _pack(state, options, most_carried=0, drop=options.drop_last)


def take_pack(state: ShardState, *, options: CarryOptions) -> tuple[tuple[Item, ...], ShardState]:
    """Return the first pack that waits, and the state after it is trained."""
    pack, *packs = state.packs
    counts = StreamCounts.of_pack([item.length for item in pack], options)
    return pack, attrs.evolve(state, packs=tuple(packs), counts=state.counts + counts)


def _pack(state: ShardState, options: CarryOptions, *, most_carried: int, drop: bool) -> ShardState:
    """Return the state after the buffer was packed, its underfilled packs dropped if asked."""
    arrived = list(enumerate(state.buffer))
    bins = binpacking.to_constant_volume(arrived, options.packing_length, key=lambda one: one[1].length)
    full: list[tuple[Item, ...]] = []
    underfilled: list[list[tuple[int, Item]]] = []
    for members in sorted(sorted(one) for one in bins if one):
        if options.is_full(sum(item.length for _, item in members)):
            full.append(tuple(item for _, item in members))
        else:
            underfilled.append(members)
    stays: list[tuple[int, Item]] = []
    # Packs are in the order of their oldest samples, so that the youngest are the last.
    while underfilled and len(stays) + len(underfilled[-1]) <= most_carried:
        stays += underfilled.pop()
    evicted = [tuple(item for _, item in members) for members in underfilled]
    counts = state.counts
    if drop:
        lost = [item.length for item in chain(*evicted)]
        counts += StreamCounts(dropped=len(lost), dropped_packs=len(evicted), dropped_tokens=sum(lost))
        evicted = []
    buffer = tuple(item for _, item in sorted(stays))
    return attrs.evolve(state, buffer=buffer, packs=(*state.packs, *full, *evicted), counts=counts)
