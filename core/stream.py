"""Packing while training: samples enter a buffer, and leave it in packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain

import attrs
import binpacking
import numpy as np

from packplan.core.errors import Difference
from packplan.core.fingerprint import NO_IDENTITY, Fingerprint, RunIdentity
from packplan.core.lengths import IntArray, as_whole_number, exact_share

Order = Callable[[int], IntArray]
"""Epoch -> indices of samples, in order."""

PACKER_VERSION = str(binpacking.__version__)
"""Version of binpacking. Another version may pack in another way, as 2.0 did after 1.5."""

RULES_VERSION = 2
"""
Version of the rules by which buffers are packed. A run resumes only under the version it began
with.
"""


def _exact_ratio(value: float | str | Decimal | Fraction) -> Fraction:
    return exact_share("min_fill_ratio", value)


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a stream's packing."""

    packing_length: int
    """Token limit of a pack. Samples of as many tokens or more are long."""

    packing_buffer: int = 512
    """Samples that are packed at a time."""

    min_fill_ratio: Fraction = attrs.field(default=Fraction(65, 100), converter=_exact_ratio)
    """
    Share of the packing length from which a pack is full enough, read as the decimal that is
    written.
    """

    drop_last: bool = True
    """Whether packs that are underfilled at the end of the stream are dropped."""

    allow_single_long: bool = True
    """Whether long samples are packs by themselves. Otherwise they are skipped."""

    def __attrs_post_init__(self) -> None:
        as_whole_number("packing_length", self.packing_length)
        as_whole_number("packing_buffer", self.packing_buffer)

    def reaches_min_fill(self, tokens: int) -> bool:
        """Return whether a pack with this many tokens reaches the minimum fill."""
        return tokens >= self.min_fill_ratio * self.packing_length


@attrs.frozen
class StreamItem:
    """Sample of a stream, identified by its position in the order of the epoch."""

    place: int
    """Place of the record in the epoch's order, from 0."""

    length: int = 0
    """Tokens of the sample; 0 until it is encoded."""


@attrs.frozen
class StreamCounts:
    """Numbers of samples and tokens that a stream trained, dropped or skipped."""

    samples: int = 0
    """Samples admitted so far, long ones included."""

    packs: int = 0
    """Packs to train."""

    long: int = 0
    """Samples of the packing length or more, each in a pack by itself."""

    skipped: int = 0
    """Samples of the packing length or more that are in no pack."""

    dropped: int = 0
    """Samples of dropped packs."""

    filled_tokens: int = 0
    """Filled tokens of the packing length over all packs; a long pack counts as full."""

    tokens: int = 0
    """Tokens of the samples admitted so far."""

    dropped_packs: int = 0
    """Dropped packs: underfilled ones, and last ones too few for a step of all ranks."""

    dropped_tokens: int = 0
    """Tokens in the packs that were dropped."""

    underfilled_packs: int = 0
    """Packs to train below the fill ratio."""

    @classmethod
    def from_pack(cls, lengths: Sequence[int], options: StreamOptions) -> StreamCounts:
        """Return the counts that training one pack adds; its samples were counted before."""
        tokens = sum(lengths)
        return cls(
            packs=1,
            long=int(tokens >= options.packing_length and len(lengths) == 1),
            filled_tokens=min(tokens, options.packing_length),
            underfilled_packs=int(not options.reaches_min_fill(tokens)),
        )

    def with_pack_dropped(self, lengths: Sequence[int], options: StreamOptions) -> StreamCounts:
        """Return these counts after one pack, counted as trained, is dropped instead."""
        pack = self.from_pack(lengths, options)
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

    def dropped_more_than(self, share: Decimal) -> bool:
        """Return whether several packs were dropped, with more than *share* of all tokens."""
        return self.dropped_packs > 1 and self.dropped_tokens > share * self.tokens

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


@attrs.frozen
class ReaderState:
    """Progress of one reader in an epoch, between two of its packs."""

    read: int = 0
    """Number of the reader's places that were read."""

    ahead: tuple[StreamItem, ...] = ()
    """Items that were read but not yet admitted, in order."""

    buffer: tuple[StreamItem, ...] = ()
    """Items in the buffer, in order of arrival."""

    packs: tuple[tuple[StreamItem, ...], ...] = ()
    """Packs that are filled and wait to be trained, in order."""

    counts: StreamCounts = StreamCounts()
    """Counts of the reader's samples in this epoch; waiting packs are not counted yet."""

    @property
    def admitted_items(self) -> tuple[StreamItem, ...]:
        """Items that wait in the buffer or in a filled pack."""
        return (*chain.from_iterable(self.packs), *self.buffer)

    @property
    def waiting_items(self) -> tuple[StreamItem, ...]:
        """Items that were read, but not yet trained, dropped or skipped."""
        return (*self.admitted_items, *self.ahead)


def read_place(state: ReaderState, place: int) -> ReaderState:
    """Return the state after the item at *place* has been read."""
    return attrs.evolve(state, read=state.read + 1, ahead=(*state.ahead, StreamItem(place)))


def admit_first(state: ReaderState, length: int, *, options: StreamOptions) -> ReaderState:
    """
    Return the state after the first item that was read ahead is admitted.

    A long item becomes a pack or is skipped. Others enter the buffer, which is packed once it is
    full.

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
    return came if _is_too_small(came.buffer, options) else _pack_buffer(came, options, at_end=False)


def _is_too_small(buffer: Sequence[StreamItem], options: StreamOptions) -> bool:
    """
    Return whether a buffer waits for more samples, since it has too few or they fill no pack.

    If all samples of the buffer together do not reach the minimum fill, packing would leave them
    all in it. The buffer then grows until it has the tokens of a whole pack, so that packing it
    trains a pack.
    """
    needed = options.min_fill_ratio if len(buffer) == options.packing_buffer else 1
    has_few = len(buffer) < options.packing_buffer
    return has_few or sum(item.length for item in buffer) < needed * options.packing_length


def flush_buffer(state: ReaderState, *, options: StreamOptions) -> ReaderState:
    """Return the state after the rest of the buffer is packed, at the end of a reader."""
    return _pack_buffer(state, options, at_end=True)


def take_pack(state: ReaderState, *, options: StreamOptions) -> tuple[tuple[StreamItem, ...], ReaderState]:
    """Return the first waiting pack, and the state after it has been trained."""
    pack, *packs = state.packs
    counts = StreamCounts.from_pack([item.length for item in pack], options)
    return pack, attrs.evolve(state, packs=tuple(packs), counts=state.counts + counts)


def _pack_buffer(state: ReaderState, options: StreamOptions, *, at_end: bool) -> ReaderState:
    """
    Pack the buffer; return the new state. The newest underfilled pack stays in the buffer, and so
    do older ones, as long as all of these have at most half a buffer of samples. The others are
    evicted, and trained.

    At the end of a reader no pack stays, and `drop_last` drops the underfilled ones.
    """
    arrived = list(enumerate(state.buffer))
    bins = binpacking.to_constant_volume(arrived, options.packing_length, key=lambda one: one[1].length)
    full: list[list[tuple[int, StreamItem]]] = []
    underfilled: list[list[tuple[int, StreamItem]]] = []
    # In the order of their oldest samples, so that the newest packs are the last.
    for members in sorted(sorted(one) for one in bins if one):
        is_full = options.reaches_min_fill(sum(item.length for _, item in members))
        (full if is_full else underfilled).append(members)
    stays = underfilled.pop() if underfilled and not at_end else []
    while stays and underfilled and len(stays) + len(underfilled[-1]) <= options.packing_buffer // 2:
        stays += underfilled.pop()
    dropped = underfilled if at_end and options.drop_last else []
    lost = [item.length for _, item in chain(*dropped)]
    counts = state.counts + StreamCounts(dropped=len(lost), dropped_packs=len(dropped), dropped_tokens=sum(lost))
    trained = full if dropped else [*full, *underfilled]
    packs = [tuple(item for _, item in members) for members in trained]
    buffer = tuple(item for _, item in sorted(stays))
    return attrs.evolve(state, buffer=buffer, packs=(*state.packs, *packs), counts=counts)


@attrs.frozen
class StreamSegment:
    """Earlier part of an epoch that was trained on one number of readers."""

    reads: tuple[int, ...]
    """Number of places that each reader has read."""


@attrs.frozen
class RankState:
    """Progress of one rank between two optimizer steps."""

    readers: tuple[ReaderState, ...] = ()
    """Reader of each loader worker, or the rank's own one; empty if the epoch has not begun."""

    next_reader: int = 0
    """Reader that gives the next pack."""

    earlier: StreamCounts = attrs.field(factory=StreamCounts)
    """Counts of earlier epochs."""

    trained: int = 0
    """Samples that were trained in all epochs."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.next_reader < max(1, len(self.readers)) or self.trained < 0:
            raise ValueError(f"reader {self.next_reader} of {len(self.readers)} is next, after {self.trained} samples")


@attrs.frozen
class StreamProgress:
    """Progress of a stream between two optimizer steps."""

    world_size: int = 1
    readers_per_rank: int = 1
    step: int = 0
    """Optimizer steps done."""

    epoch: int = 0
    """Epoch of the next step."""

    epoch_step: int = 0
    """Optimizer steps done in that epoch."""

    segments: tuple[StreamSegment, ...] = ()
    """Earlier parts of that epoch, on other numbers of readers."""

    def __attrs_post_init__(self) -> None:
        reads = (0, *chain.from_iterable(segment.reads for segment in self.segments))
        sizes = (self.world_size - 1, self.readers_per_rank - 1, self.epoch, self.epoch_step, min(reads))
        if min(sizes) < 0 or self.epoch_step > self.step or not all(segment.reads for segment in self.segments):
            message = (
                f"step {self.step}, epoch {self.epoch}, its step {self.epoch_step}, {self.world_size} ranks with "
                f"{self.readers_per_rank} readers each, or the reads of earlier readers, do not agree"
            )
            raise ValueError(message)


@attrs.frozen
class StreamState:
    """
    Progress and settings that a stream's checkpoint keeps; a resumed run is compared with them.
    """

    inputs: Fingerprint
    """Everything that decides the samples, their order and their packs."""

    progress: StreamProgress

    identity: RunIdentity = NO_IDENTITY
    """Model, loss and settings of the run."""

    ranks: tuple[RankState, ...] = ()
    """Progress of each rank."""

    def differences(self, now: StreamState) -> tuple[Difference, ...]:
        """Return the settings in which the current state *now* differs from this stored one."""
        found = self.inputs.differences(now.inputs) + self.identity.fixed.differences(now.identity.fixed)
        return tuple(dict.fromkeys(found))  # both have the settings of samples


def unread_places(num_places: int, segments: Sequence[StreamSegment]) -> IntArray:
    """
    Return the positions of an epoch's order that no reader of its earlier segments has read.

    >>> unread_places(6, [StreamSegment(reads=(1, 2))]).tolist()
    [2, 4, 5]
    """
    places = np.arange(num_places)
    for segment in segments:
        num_readers = len(segment.reads)
        parts = [places[reader::num_readers][read:] for reader, read in enumerate(segment.reads)]
        places = np.sort(np.concatenate(parts))
    return places


def redistribute(
    progress: StreamProgress, ranks: Sequence[RankState], *, world_size: int, readers_per_rank: int
) -> tuple[StreamProgress, tuple[RankState, ...]]:
    """
    Return the progress of a stream and its ranks for other numbers of ranks or readers per rank.

    Args:
        progress: Progress of the stream.
        ranks: Progress of each former rank.
        world_size: Number of ranks now.
        readers_per_rank: Number of readers of each rank now.
    """
    readers = tuple(chain.from_iterable(rank.readers for rank in ranks))
    now = attrs.evolve(progress, world_size=world_size, readers_per_rank=readers_per_rank)
    earlier = sum((rank.earlier for rank in ranks), StreamCounts())
    totals = RankState(earlier=earlier, trained=sum(rank.trained for rank in ranks))
    if not readers:
        return now, (totals, *[RankState()] * (world_size - 1))
    ended = StreamSegment(reads=tuple(reader.read for reader in readers))
    waiting = sorted(chain.from_iterable(reader.waiting_items for reader in readers), key=lambda item: item.place)
    # These enter a buffer again, and are counted then.
    again = [item.length for reader in readers for item in reader.admitted_items]
    counts = sum((reader.counts for reader in readers), StreamCounts(samples=-len(again), tokens=-sum(again)))
    num_readers = world_size * readers_per_rank
    assigned = [ReaderState(ahead=tuple(waiting[reader::num_readers])) for reader in range(num_readers)]
    assigned[0] = attrs.evolve(assigned[0], counts=counts)
    parts = [assigned[first : first + readers_per_rank] for first in range(0, num_readers, readers_per_rank)]
    states = [RankState(readers=tuple(part)) for part in parts]
    states[0] = attrs.evolve(totals, readers=states[0].readers)
    return attrs.evolve(now, segments=(*progress.segments, ended)), tuple(states)
