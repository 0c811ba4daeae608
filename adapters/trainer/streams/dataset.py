"""
Data set and collator of a stream.

In every epoch, each sample goes to one shard: one loader worker of one rank.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
from torch.utils.data import IterableDataset, get_worker_info

from packplan.adapters.loaders.packs import PackOfRows
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.trainer.loader import Batch, Sample
from packplan.core.errors import Difference, PackplanError, StaleError
from packplan.core.lengths import IntArray
from packplan.core.stream import (
    Order,
    RankState,
    ShardState,
    StreamItem,
    StreamOptions,
    StreamSegment,
    admit_first,
    flush_buffer,
    read_place,
    take_pack,
    unread_places,
)

log = logging.getLogger(__name__)

LENGTHS, PROGRESS = "sample_lengths", "shard_progress"
"""
Extra keys of a batch: lengths of its samples; progress of its shard.
"""


@attrs.frozen
class ShardProgress:
    """Progress of one shard on this rank."""

    shard: int
    """Index of the shard on its rank, which is the loader worker's index at the epoch's start."""

    state: ShardState


class StreamedPack(PackOfRows):
    """Pack of a stream, with its shard's progress after this pack."""

    def __init__(self, samples: Iterable[Sample], pack: int, progress: ShardProgress) -> None:
        super().__init__(samples, pack)
        self.progress = progress


@attrs.frozen
class ShardEnd:
    """Item after the last pack of a shard, with the shard's final progress."""

    progress: ShardProgress


class StreamDataset(IterableDataset[StreamedPack | ShardEnd | PackplanError]):
    """
    Iterable data set of the packs of one rank and worker, each with its shard's progress.

    An error is yielded, not raised, as in `PackedDataset`, and ends the stream.

    Attributes:
        segments: Earlier parts of the epoch, on other numbers of shards.
        start: Progress of this rank from which an iteration starts.
    """

    def __init__(
        self, encoder: SwiftEncoder, order: Order, options: StreamOptions, *, rank: int, world_size: int
    ) -> None:
        """
        Pack a stream.

        Args:
            encoder: Encoder of the records.
            order: Order of the records in each epoch, the same on every rank.
            options: Packing options.
            rank: Rank of this process.
            world_size: Number of ranks.
        """
        self.encoder, self.options, self.rank, self.world_size = encoder, options, rank, world_size
        self._order, self.indices = order, order(0)
        self.segments: tuple[StreamSegment, ...] = ()
        self.start = RankState()

    def set_epoch(self, epoch: int) -> None:
        """Read the records in the order of *epoch* from now on."""
        self.indices = self._order(epoch)

    def start_from(self, start: RankState, segments: tuple[StreamSegment, ...] = ()) -> None:
        """
        Set the progress at which the next iteration starts, and the epoch's earlier *segments*.
        """
        self.start, self.segments = start, segments

    def num_left(self, shards: Sequence[ShardState]) -> int:
        """Return the number of this rank's records that are not yet trained, skipped or dropped."""
        parts = [self._shard_places(shard, len(shards))[state.read :] for shard, state in enumerate(shards)]
        return sum(map(len, parts)) + sum(len(state.waiting_items) for state in shards)

    def filler_pack(self) -> PackOfRows:
        """Return a pack of one early record of the epoch, for a rank that has no pack left."""
        samples = (self.encoder.encode(int(index)) for index in self.indices)
        limit, allows_long = self.options.packing_length, self.options.allow_single_long
        return PackOfRows([next(sample for sample in samples if allows_long or sample["length"] < limit)], 0)

    def __iter__(self) -> Iterator[StreamedPack | ShardEnd | PackplanError]:
        """Yield packs as soon as they are full."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shard = (self.start.next_shard + number) % workers
        state = self.start.shards[shard] if self.start.shards else ShardState()
        try:
            yield from self._yield_packs(shard, state, self._shard_places(shard, workers)[state.read :])
        except PackplanError as error:
            yield error

    def _shard_places(self, shard: int, shards_per_rank: int) -> IntArray:
        """Return the positions in the epoch's order that a shard of this rank reads."""
        places = unread_places(len(self.indices), self.segments)
        return places[self.rank * shards_per_rank + shard :: self.world_size * shards_per_rank]

    def _yield_packs(self, shard: int, state: ShardState, places: IntArray) -> Iterator[StreamedPack | ShardEnd]:
        unread = iter(places.tolist())
        encoded: dict[int, Sample] = {}
        position = 0
        while True:
            while state.packs:
                pack, state = take_pack(state, options=self.options)
                samples = [self._take_sample(item, encoded) for item in pack]
                yield StreamedPack(samples, position, ShardProgress(shard, state))
                position += 1
            if state.ahead:
                item, before = state.ahead[0], len(state.buffer)
                encoded[item.place] = sample = self._encode(item)
                self._log_long(item, sample["length"])
                state = admit_first(state, sample["length"], options=self.options)
                if len(state.buffer) <= before:  # some left the buffer, perhaps not in a pack
                    kept = {item.place for item in state.admitted_items}
                    encoded = {place: sample for place, sample in encoded.items() if place in kept}
            elif (place := next(unread, None)) is not None:
                state = read_place(state, place)
            elif state.buffer:
                state = flush_buffer(state, options=self.options)
            else:
                break
        yield ShardEnd(ShardProgress(shard, state))

    def _take_sample(self, item: StreamItem, encoded: dict[int, Sample]) -> Sample:
        """
        Return an item's sample, from *encoded* or encoded again; StaleError for another length.
        """
        sample = encoded.pop(item.place, None) or self._encode(item)
        if sample["length"] != item.length:
            differences = (Difference("length", item.length, sample["length"]),)
            raise StaleError.for_sample(item.place, self._record_location(item), differences)
        return sample

    def _record_location(self, item: StreamItem) -> str:
        return str(self.encoder.records.location(int(self.indices[item.place])))

    def _encode(self, item: StreamItem) -> Sample:
        return self.encoder.encode(int(self.indices[item.place]))

    def _log_long(self, item: StreamItem, length: int) -> None:
        if length < self.options.packing_length:
            return
        level, outcome = logging.WARNING, "skipped; training.packing_allow_single_long: true trains it"
        if self.options.allow_single_long:
            level, outcome = logging.INFO, "a pack of its own"
        holds = f"{length:,} tokens, where a pack holds {self.options.packing_length:,}"
        log.log(level, "%s: %s: %s", self._record_location(item), holds, outcome)


@attrs.frozen
class StreamCollator:
    """Collator of a pack that adds the lengths of its samples and the progress of its shard."""

    collate: Callable[[list[Any]], Any]
    """Collator of packs."""

    def __call__(self, items: list[StreamedPack | ShardEnd | PackplanError]) -> Batch | ShardEnd | PackplanError:
        """Return the batch of the only item; an error or the end of a shard stays as it is."""
        (item,) = items
        if isinstance(item, (ShardEnd, PackplanError)):
            return item
        lengths = tuple(sample["length"] for sample in item)
        return {**self.collate([item]), LENGTHS: lengths, PROGRESS: item.progress}
