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

from packplan.core.packs import Packs, filled
from packplan.core.stream.carry import Carry, CarryOptions, Emitted, advance, finish


@attrs.frozen
class Item:
    """Sample of an epoch: a record, or an answer to its prompt."""

    place: int
    """Place of the record in the epoch's order, from 0."""

    text: str | None = None
    """Answer of the model; None trains the record as it is."""

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

    @classmethod
    def of_pack(cls, lengths: Sequence[int], packing_length: int) -> StreamCounts:
        """Return the counts of one pack to train."""
        tokens = sum(lengths)
        return cls(packs=1, long=tokens >= packing_length and len(lengths) == 1,
                   filled_tokens=int(filled([tokens], packing_length)[0]))  # fmt: skip

    def without_pack(self, lengths: Sequence[int], packing_length: int) -> StreamCounts:
        """Return these counts with one of the packs dropped instead of trained."""
        pack = self.of_pack(lengths, packing_length)
        return attrs.evolve(
            self,
            packs=self.packs - 1,
            long=self.long - pack.long,
            filled_tokens=self.filled_tokens - pack.filled_tokens,
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

    carry: Carry = attrs.field(factory=Carry, eq=Carry.tolist)
    """The buffer; its indices count through `buffer`."""

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
    items = (*state.buffer, attrs.evolve(first, length=length))
    carry, emitted = advance(state.carry, [len(state.buffer)], [length], options=options)
    came = attrs.evolve(state, ahead=tuple(ahead), counts=state.counts + StreamCounts(samples=1, tokens=length))
    return _emit(came, items, carry, emitted)


def flush_buffer(state: ShardState, *, options: CarryOptions) -> ShardState:
    """Return the state after the buffer was packed at the end of the shard."""
    return _emit(state, state.buffer, Carry(), finish(state.carry, options=options))


def take_pack(state: ShardState, *, options: CarryOptions) -> tuple[tuple[Item, ...], ShardState]:
    """Return the first pack that waits, and the state after it is trained."""
    pack, *packs = state.packs
    counts = StreamCounts.of_pack([item.length for item in pack], options.packing_length)
    return pack, attrs.evolve(state, packs=tuple(packs), counts=state.counts + counts)


def _emit(state: ShardState, items: tuple[Item, ...], carry: Carry, emitted: Emitted) -> ShardState:
    """Return the state after packs left the buffer; all indices count through *items*."""
    dropped = emitted.underfilled if emitted.dropped else Packs.from_lists([])
    counts = StreamCounts(
        skipped=len(emitted.skipped_long),
        dropped=dropped.num_samples,
        dropped_packs=len(dropped),
        dropped_tokens=sum(items[index].length for index in dropped.indices.tolist()),
    )
    return attrs.evolve(
        state,
        buffer=tuple(items[index] for index in carry.indices.tolist()),
        carry=Carry(np.arange(carry.indices.size), carry.lengths, carry.carried),
        packs=(*state.packs, *(tuple(items[index] for index in pack) for pack in emitted.packs)),
        counts=state.counts + counts,
    )
