"""
Iterable data set that packs samples as they come, each on one rank and one worker, in every epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from decimal import Decimal
from typing import Protocol

import attrs
from torch.utils.data import IterableDataset, get_worker_info

from packplan.adapters.trainer.packed_dataset import EncodedPack, Sample
from packplan.core.errors import PackplanError
from packplan.core.packs import Packs, filled
from packplan.core.stream import Carry, CarryOptions, Emitted, advance, finish

log = logging.getLogger(__name__)


class SampleStream(Protocol):
    """Source of encoded samples, in an order of each epoch."""

    def set_epoch(self, epoch: int, /) -> None:
        """Use the order of *epoch* from now on."""

    def samples(self, shard: int, num_shards: int, /) -> Iterator[tuple[str, Sample]]:
        """
        Yield the samples of one shard; shards share no samples.

        Each item is the name of a record and its encoding with a `length`.

        Raises:
            PackplanError: A record cannot become a sample.
        """


@attrs.frozen
class StreamCounts:
    """Counts of a shard's samples in an epoch so far, by outcome."""

    samples: int = 0
    packs: int = 0
    long: int = 0
    """Samples of the packing length or more, each in a pack of its own."""

    skipped: int = 0
    """Samples of the packing length or more that are in no pack."""

    dropped: int = 0
    """Samples of dropped underfilled packs, which were evicted or left at the end."""

    filled_tokens: int = 0
    """Filled tokens of the packing length over all packs; a long pack counts as full."""

    tokens: int = 0
    """Tokens of all samples so far."""

    dropped_packs: int = 0
    """Underfilled packs that were dropped."""

    dropped_tokens: int = 0
    """Tokens in the packs that were dropped."""

    def drops_more_than(self, share: Decimal) -> bool:
        """Return whether more than one pack, and more than this share of tokens, was dropped."""
        return self.dropped_packs > 1 and self.dropped_tokens > share * self.tokens

    def __add__(self, other: StreamCounts) -> StreamCounts:
        return StreamCounts(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


@attrs.frozen
class StreamedPack(EncodedPack):
    """Pack of a stream."""

    counts: StreamCounts
    """Counts of its shard's samples since the previous pack."""


@attrs.frozen
class Ended:
    """Marker of the end of a shard, after its last pack."""

    counts: StreamCounts
    """Counts of its samples since the last pack."""


class DynamicDataset(IterableDataset[StreamedPack | Ended | PackplanError]):
    """
    Packs of a stream's samples for this rank and worker, with counts of the samples.

    An error is yielded, not raised, as in `PackedDataset`, and ends the stream.
    """

    grouped = True

    def __init__(self, stream: SampleStream, options: CarryOptions, *, rank: int, world_size: int) -> None:
        """
        Pack a stream.

        Args:
            stream: Same stream on every rank.
            options: Packing options.
            rank: Rank of this process.
            world_size: Number of ranks.
        """
        self.stream, self.options, self.rank, self.world_size = stream, options, rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Start *epoch* of the stream; each iteration begins with an empty buffer."""
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[StreamedPack | Ended | PackplanError]:
        """Yield packs as they fill."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shard, num_shards = self.rank * workers + number, self.world_size * workers
        carry, held, counts, position = Carry(), dict[int, Sample](), StreamCounts(), 0
        try:
            for index, (record, sample) in enumerate(self.stream.samples(shard, num_shards)):
                held[index] = sample
                carry, emitted = advance(carry, [index], [sample["length"]], options=self.options)
                self._log_long(emitted, record, sample["length"])
                counts += StreamCounts(samples=1, tokens=sample["length"]) + self._count(emitted, held)
                for pack in _take_packs(emitted, held):
                    yield StreamedPack(position, pack, counts)
                    position, counts = position + 1, StreamCounts()
        except PackplanError as error:
            yield error
            return
        emitted = finish(carry, options=self.options)
        counts += self._count(emitted, held)
        for pack in _take_packs(emitted, held):
            yield StreamedPack(position, pack, counts)
            position, counts = position + 1, StreamCounts()
        yield Ended(counts)

    def _count(self, emitted: Emitted, held: dict[int, Sample]) -> StreamCounts:
        loads = [sum(held[index]["length"] for index in pack) for pack in emitted.packs]
        dropped = emitted.underfilled if emitted.dropped else Packs.from_lists([])
        return StreamCounts(
            packs=len(emitted.packs),
            long=len(emitted.single_long),
            skipped=len(emitted.skipped_long),
            dropped=dropped.num_samples,
            filled_tokens=int(filled(loads, self.options.packing_length).sum()),
            dropped_packs=len(dropped),
            dropped_tokens=sum(held[index]["length"] for index in dropped.indices.tolist()),
        )

    def _log_long(self, emitted: Emitted, record: str, length: int) -> None:
        limit = self.options.packing_length
        if emitted.single_long:
            log.info("%s: %s tokens, where a pack holds %s: a pack of its own", record, f"{length:,}", f"{limit:,}")
        if emitted.skipped_long:
            log.warning(
                "%s: %s tokens, where a pack holds %s: skipped; training.packing_allow_single_long: true trains it",
                record,
                f"{length:,}",
                f"{limit:,}",
            )


def _take_packs(emitted: Emitted, held: dict[int, Sample]) -> list[list[Sample]]:
    """Return the samples of the packs, and remove all samples that left the buffer."""
    packs = [[held[index] for index in pack] for pack in emitted.packs]
    removed = [*emitted.packs.indices.tolist(), *emitted.skipped_long, *emitted.underfilled.indices.tolist()]
    for index in removed:
        held.pop(index, None)
    return packs
