"""
Data set and collator of a stream.

In every epoch, each sample goes to one reader: a loader worker, or a rank without loader workers.
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
    ReaderState,
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

LENGTHS, PROGRESS = "sample_lengths", "reader_progress"
"""Extra keys of a batch: lengths of its samples, and progress of the reader that packed them."""


@attrs.frozen
class ReaderProgress:
    """Progress of one reader on this rank."""

    reader: int
    """Index of the reader on its rank, which is the loader worker's index at the epoch's start."""

    state: ReaderState


class StreamedPack(PackOfRows):
    """Pack of a stream, with its reader's progress after this pack."""

    def __init__(self, samples: Iterable[Sample], pack: int, progress: ReaderProgress) -> None:
        super().__init__(samples, pack)
        self.progress = progress


@attrs.frozen
class ReaderEnd:
    """Item after the last pack of a reader, with the reader's final progress."""

    progress: ReaderProgress


class StreamDataset(IterableDataset[StreamedPack | ReaderEnd | PackplanError]):
    """
    Iterable data set of the packs of one rank and worker, each with its reader's progress.

    An error is yielded, not raised, as in `PackedDataset`, and ends the stream.

    Attributes:
        segments: Earlier parts of the epoch, which other numbers of readers have read.
        start: Progress of this rank from which the next iteration starts.
    """

    def __init__(
        self, encoder: SwiftEncoder, order: Order, options: StreamOptions, *, rank: int, world_size: int
    ) -> None:
        """
        Prepare a stream, whose packs are made in each iteration.

        Args:
            encoder: Encoder of the records.
            order: Order of the records in each epoch, the same on every rank.
            options: Packing length and other options of packing.
            rank: Rank of this process.
            world_size: Number of ranks.
        """
        self.encoder, self.options, self.rank, self.world_size = encoder, options, rank, world_size
        self._order, self.indices = order, order(0)
        self.segments: tuple[StreamSegment, ...] = ()
        self.start = RankState()

    def set_epoch(self, epoch: int) -> None:
        """Select the order of *epoch*, in which later iterations read the records."""
        self.indices = self._order(epoch)

    def start_from(self, start: RankState, segments: tuple[StreamSegment, ...] = ()) -> None:
        """
        Set the progress at which the next iteration starts, and the epoch's earlier *segments*.
        """
        self.start, self.segments = start, segments

    def num_left(self, readers: Sequence[ReaderState]) -> int:
        """Return the number of this rank's records that are not yet trained, skipped or dropped."""
        parts = [self._reader_places(reader, len(readers))[state.read :] for reader, state in enumerate(readers)]
        return sum(map(len, parts)) + sum(len(state.waiting_items) for state in readers)

    def filler_pack(self) -> PackOfRows:
        """Return a pack of the epoch's first packable sample, for a rank that has no pack left."""
        samples = (self.encoder.encode(int(index)) for index in self.indices)
        limit, allows_long = self.options.packing_length, self.options.allow_single_long
        return PackOfRows([next(sample for sample in samples if allows_long or sample["length"] < limit)], 0)

    def __iter__(self) -> Iterator[StreamedPack | ReaderEnd | PackplanError]:
        """Yield each pack once it is made, and at the end the reader's progress or an error."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        reader = (self.start.next_reader + number) % workers
        state = self.start.readers[reader] if self.start.readers else ReaderState()
        try:
            yield from self._yield_packs(reader, state, self._reader_places(reader, workers)[state.read :])
        except PackplanError as error:
            yield error

    def _reader_places(self, reader: int, readers_per_rank: int) -> IntArray:
        """Return the positions in the epoch's order that a reader of this rank reads."""
        places = unread_places(len(self.indices), self.segments)
        return places[self.rank * readers_per_rank + reader :: self.world_size * readers_per_rank]

    def _yield_packs(self, reader: int, state: ReaderState, places: IntArray) -> Iterator[StreamedPack | ReaderEnd]:
        unread = iter(places.tolist())
        encoded: dict[int, Sample] = {}
        position = 0
        while True:
            while state.packs:
                pack, state = take_pack(state, options=self.options)
                samples = [self._take_sample(item, encoded) for item in pack]
                yield StreamedPack(samples, position, ReaderProgress(reader, state))
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
        yield ReaderEnd(ReaderProgress(reader, state))

    def _take_sample(self, item: StreamItem, encoded: dict[int, Sample]) -> Sample:
        """
        Return an item's sample, from *encoded* or encoded again; StaleError if its length has
        changed.
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
        level, outcome = logging.WARNING, "is skipped; training.packing_allow_single_long: true trains it"
        if self.options.allow_single_long:
            level, outcome = logging.INFO, "becomes a pack by itself"
        holds = f"{length:,} tokens, at least the packing length of {self.options.packing_length:,}"
        log.log(level, "%s has %s, and %s", self._record_location(item), holds, outcome)


@attrs.frozen
class StreamCollator:
    """
    Collator that adds the lengths of samples and the reader's progress to the batch of a pack.
    """

    collate: Callable[[list[Any]], Any]
    """Collator of packs."""

    def __call__(self, items: list[StreamedPack | ReaderEnd | PackplanError]) -> Batch | ReaderEnd | PackplanError:
        """
        Return the batch of the only item, or the item itself if it is an error or a reader's end.
        """
        (item,) = items
        if isinstance(item, (ReaderEnd, PackplanError)):
            return item
        lengths = tuple(sample["length"] for sample in item)
        return {**self.collate([item]), LENGTHS: lengths, PROGRESS: item.progress}
