"""
Progress of one shard of a stream: each rank and loader worker packs a shard of an epoch's samples.

A `ShardState` is all that a shard knows between two packs, so that another process may go on from
it. Rules:

- A sample that was read is ahead of the buffer, in it, in a filled pack, or counted as trained,
  dropped or skipped.
- Packs depend on the samples and their order alone, also if the state was saved between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from itertools import chain

import attrs
import numpy as np

from packplan.core.packs import filled
from packplan.core.stream.carry import CarryOptions, pack_buffer


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
            filled_tokens=int(filled([tokens], options.packing_length)[0]),
            underfilled_packs=int(not options.is_full(np.array([tokens]))[0]),
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
    items, lengths = state.buffer, np.array([item.length for item in state.buffer], dtype=np.int64)
    packs, underfilled, left = pack_buffer(lengths, options=options, most_carried=most_carried)
    counts = state.counts
    if drop:
        counts += StreamCounts(
            dropped=underfilled.num_samples,
            dropped_packs=len(underfilled),
            dropped_tokens=int(lengths[underfilled.indices].sum()),
        )
    leaving = packs if drop else chain(packs, underfilled)
    return attrs.evolve(
        state,
        buffer=tuple(items[index] for index in left.tolist()),
        packs=(*state.packs, *(tuple(items[index] for index in pack) for pack in leaving)),
        counts=counts,
    )
