"""Streams: packing while training, from a buffer of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain

import attrs
import binpacking
import numpy as np

from packplan.core.errors import Difference, counted
from packplan.core.fingerprint import NO_IDENTITY, Fingerprint, RunIdentity
from packplan.core.lengths import IntArray, as_whole_number, exact_share

Order = Callable[[int], IntArray]
"""Function that returns the sample indices of an epoch in the order of reading."""

PACKER_VERSION = str(binpacking.__version__)
"""Version of binpacking. Other versions may make other packs: 2.0 and 1.5 pack differently."""

RULES_VERSION = 2
"""
Version of the rules by which buffers are packed. A run can be resumed only with the version that
started it.
"""


def _exact_ratio(value: float | str | Decimal | Fraction) -> Fraction:
    return exact_share("min_fill_ratio", value)


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of packing in a stream."""

    packing_length: int
    """
    Maximum number of tokens in a pack of several samples. A sample with at least this many tokens
    is long.
    """

    packing_buffer: int = 512
    """
    Minimum number of samples that are packed together, except when a reader has read its last
    sample.
    """

    min_fill_ratio: Fraction = attrs.field(default=Fraction(65, 100), converter=_exact_ratio)
    """Fill below which a pack counts as underfilled, as an exact decimal."""

    drop_last: bool = True
    """Whether packs that are still underfilled at the end of an epoch are dropped."""

    allow_single_long: bool = True
    """Whether long samples are packs by themselves. If false, long samples are skipped."""

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
    """Position of the record in the epoch's order, from 0."""

    length: int = 0
    """Number of tokens of the sample; 0 until it is encoded."""


@attrs.frozen
class StreamCounts:
    """Numbers of samples and tokens that a stream trained, dropped or skipped."""

    samples: int = 0
    """Number of samples that were buffered, packed or skipped so far, long samples included."""

    packs: int = 0
    """Number of trained packs."""

    long: int = 0
    """Number of samples of the packing length or more that were packs by themselves."""

    skipped: int = 0
    """Number of samples of the packing length or more that were skipped."""

    dropped: int = 0
    """Number of samples in dropped packs."""

    filled_tokens: int = 0
    """
    Sum of the tokens of all trained packs. Each pack adds at most the packing length, so that the
    pack of a long sample counts as full.
    """

    tokens: int = 0
    """Number of tokens of the samples counted in `samples`."""

    dropped_packs: int = 0
    """
    Number of dropped packs: underfilled packs, and last packs that are too few for a step of all
    ranks.
    """

    dropped_tokens: int = 0
    """Number of tokens in dropped packs."""

    underfilled_packs: int = 0
    """Number of trained packs filled below `min_fill_ratio`."""

    @classmethod
    def from_pack(cls, lengths: Sequence[int], options: StreamOptions) -> StreamCounts:
        """
        Return the counts that training one pack adds, except its samples and tokens, which are
        counted earlier.
        """
        tokens = sum(lengths)
        return cls(
            packs=1,
            long=int(tokens >= options.packing_length and len(lengths) == 1),
            filled_tokens=min(tokens, options.packing_length),
            underfilled_packs=int(not options.reaches_min_fill(tokens)),
        )

    def with_pack_dropped(self, lengths: Sequence[int], options: StreamOptions) -> StreamCounts:
        """Return these counts with one pack counted as dropped instead of trained."""
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
        """
        Return whether several packs were dropped that contain more than *share* of all tokens.
        """
        return self.dropped_packs > 1 and self.dropped_tokens > share * self.tokens

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


@attrs.frozen
class ReaderState:
    """Progress of one reader in an epoch."""

    read: int = 0
    """Number of positions that the reader has read so far."""

    ahead: tuple[StreamItem, ...] = ()
    """Items that were read but are not yet in the buffer or a pack, in order."""

    buffer: tuple[StreamItem, ...] = ()
    """Items in the buffer, in order of arrival."""

    packs: tuple[tuple[StreamItem, ...], ...] = ()
    """Packs that are made but not yet trained, in order."""

    counts: StreamCounts = StreamCounts()
    """Counts of the reader in this epoch. Packs that are not yet trained are not counted."""

    @property
    def admitted_items(self) -> tuple[StreamItem, ...]:
        """Items in the buffer and in packs that are not yet trained."""
        return (*chain.from_iterable(self.packs), *self.buffer)

    @property
    def waiting_items(self) -> tuple[StreamItem, ...]:
        """Items that were read but not yet trained, dropped or skipped."""
        return (*self.admitted_items, *self.ahead)


def read_place(state: ReaderState, place: int) -> ReaderState:
    """Return the state after the item at *place* has been read."""
    return attrs.evolve(state, read=state.read + 1, ahead=(*state.ahead, StreamItem(place)))


def admit_first(state: ReaderState, length: int, *, options: StreamOptions) -> ReaderState:
    """
    Return the state after the first item in `ahead` has been processed.

    A long item becomes a pack or is skipped. Any other item is added to the buffer, which is packed
    once it is full.

    Args:
        state: State with at least one item in `ahead`.
        length: Number of tokens of the item.
        options: Settings that decide how buffers are packed.
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
    Return whether a buffer has too few samples, or too few tokens for a pack.

    If all samples of a full buffer together do not reach the minimum fill, packing would leave all
    of them in the buffer. The buffer then grows until it has the tokens of a whole pack.
    """
    needed = options.min_fill_ratio if len(buffer) == options.packing_buffer else 1
    has_few = len(buffer) < options.packing_buffer
    return has_few or sum(item.length for item in buffer) < needed * options.packing_length


def flush_buffer(state: ReaderState, *, options: StreamOptions) -> ReaderState:
    """Pack the rest of the buffer after a reader has read its last sample; return the new state."""
    return _pack_buffer(state, options, at_end=True)


def take_pack(state: ReaderState, *, options: StreamOptions) -> tuple[tuple[StreamItem, ...], ReaderState]:
    """Return the first waiting pack, and the state after it has been trained."""
    pack, *packs = state.packs
    counts = StreamCounts.from_pack([item.length for item in pack], options)
    return pack, attrs.evolve(state, packs=tuple(packs), counts=state.counts + counts)


def _pack_buffer(state: ReaderState, options: StreamOptions, *, at_end: bool) -> ReaderState:
    """
    Pack the buffer; return the new state.

    The newest underfilled pack stays in the buffer. Older underfilled packs stay too, as long as
    all packs that stay have together at most half a buffer of samples. All other packs are trained.
    Samples of underfilled packs that are trained count as evicted.

    When a reader has read its last sample, no pack stays in the buffer. Underfilled packs are then
    dropped if `drop_last` is true.
    """
    arrived = list(enumerate(state.buffer))
    bins = binpacking.to_constant_volume(arrived, options.packing_length, key=lambda one: one[1].length)
    full: list[list[tuple[int, StreamItem]]] = []
    underfilled: list[list[tuple[int, StreamItem]]] = []
    # In the order of their oldest samples, so that the newest packs come last.
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
    """Earlier part of an epoch that was trained with one number of readers."""

    reads: tuple[int, ...]
    """Number of positions that each reader has read."""


@attrs.frozen
class RankState:
    """Progress of one rank between two optimizer steps."""

    readers: tuple[ReaderState, ...] = ()
    """
    State of each reader; empty if the epoch has not started. A rank has one reader for each loader
    worker, or a single reader without loader workers.
    """

    next_reader: int = 0
    """Index of the reader whose pack is trained next."""

    earlier: StreamCounts = attrs.field(factory=StreamCounts)
    """Counts of earlier epochs."""

    trained: int = 0
    """Number of samples trained so far, over all epochs."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.next_reader < max(1, len(self.readers)) or self.trained < 0:
            given = f"reader {self.next_reader} of {len(self.readers)} is next, after {counted(self.trained, 'sample')}"
            raise ValueError(f"a rank cannot have this progress: {given}")


@attrs.frozen
class StreamProgress:
    """Progress of a stream between two optimizer steps."""

    world_size: int = 1
    readers_per_rank: int = 1
    step: int = 0
    """Number of optimizer steps done so far."""

    epoch: int = 0
    """Epoch of the next step."""

    epoch_step: int = 0
    """Number of optimizer steps done so far in the epoch of the next step."""

    segments: tuple[StreamSegment, ...] = ()
    """Earlier parts of the epoch of the next step, with other numbers of readers."""

    def __attrs_post_init__(self) -> None:
        reads = (0, *chain.from_iterable(segment.reads for segment in self.segments))
        sizes = (self.world_size - 1, self.readers_per_rank - 1, self.epoch, self.epoch_step, min(reads))
        if min(sizes) < 0 or self.epoch_step > self.step or not all(segment.reads for segment in self.segments):
            message = (
                f"step {self.step}, epoch {self.epoch}, epoch step {self.epoch_step}, "
                f"{counted(self.world_size, 'rank')} with {counted(self.readers_per_rank, 'reader')} each, "
                "and the reads of earlier readers do not agree"
            )
            raise ValueError(message)


@attrs.frozen
class StreamState:
    """
    Progress and settings that a checkpoint of a stream stores. A resumed run is compared with these
    values.
    """

    inputs: Fingerprint
    """All inputs that decide the samples, their order and their packs."""

    progress: StreamProgress

    identity: RunIdentity = NO_IDENTITY
    """Model, loss and settings of the run."""

    ranks: tuple[RankState, ...] = ()
    """Progress of each rank."""

    def differences(self, now: StreamState) -> tuple[Difference, ...]:
        """Return the settings that differ between this stored state and the current state *now*."""
        found = self.inputs.differences(now.inputs) + self.identity.fixed.differences(now.identity.fixed)
        return tuple(dict.fromkeys(found))  # both contain the settings of samples


def unread_places(num_places: int, segments: Sequence[StreamSegment]) -> IntArray:
    """
    Return the positions in an epoch's order that no reader of the earlier segments has read.

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
    Convert the progress of a stream and its ranks to other numbers of ranks or readers per rank.

    Args:
        progress: Progress of the stream.
        ranks: Progress of each previous rank.
        world_size: New number of ranks.
        readers_per_rank: New number of readers on each rank.
    """
    readers = tuple(chain.from_iterable(rank.readers for rank in ranks))
    now = attrs.evolve(progress, world_size=world_size, readers_per_rank=readers_per_rank)
    earlier = sum((rank.earlier for rank in ranks), StreamCounts())
    totals = RankState(earlier=earlier, trained=sum(rank.trained for rank in ranks))
    if not readers:
        return now, (totals, *[RankState()] * (world_size - 1))
    ended = StreamSegment(reads=tuple(reader.read for reader in readers))
    waiting = sorted(chain.from_iterable(reader.waiting_items for reader in readers), key=lambda item: item.place)
    # These items are added to a buffer again, and are counted then.
    again = [item.length for reader in readers for item in reader.admitted_items]
    counts = sum((reader.counts for reader in readers), StreamCounts(samples=-len(again), tokens=-sum(again)))
    num_readers = world_size * readers_per_rank
    assigned = [ReaderState(ahead=tuple(waiting[reader::num_readers])) for reader in range(num_readers)]
    assigned[0] = attrs.evolve(assigned[0], counts=counts)
    parts = [assigned[first : first + readers_per_rank] for first in range(0, num_readers, readers_per_rank)]
    states = [RankState(readers=tuple(part)) for part in parts]
    states[0] = attrs.evolve(totals, readers=states[0].readers)
    return attrs.evolve(now, segments=(*progress.segments, ended)), tuple(states)
