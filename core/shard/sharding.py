"""
Microbatches of each data-parallel worker, cut from an RL batch.

A slot is one place in a microbatch, for a sequence or for filler. Every `Sharding` keeps these
rules:

- Global batches stay separate and in order.
- In a global batch, every worker has the same number of microbatches, and none is empty.
- Every sequence is in exactly one microbatch with weight 1.
- Filler is the shortest sequence of the global batch with weight 0.
- A microbatch exceeds the token limit only if it consists of a single longer sequence.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, frozen_array
from packplan.core.packs import Packs
from packplan.core.shard.inputs import SequenceWorks

Mode = Literal["packed", "dynamic"]

_Number = TypeVar("_Number", np.int64, np.float64)


@attrs.frozen(eq=False)
class ShardBatch:
    """One worker's microbatches in one global batch."""

    indices: IntArray = attrs.field(converter=frozen_array)
    """Sequence of each slot; shape (num_slots,)."""

    weights: IntArray = attrs.field(converter=frozen_array)
    """Weight of each slot: 1, or 0 for filler; shape (num_slots,)."""

    offsets: IntArray = attrs.field(converter=frozen_array)
    """
    Start of each microbatch in `indices`, then the end of the last microbatch; shape
    (num_microbatches + 1,).
    """

    widths: IntArray = attrs.field(converter=frozen_array)
    """
    Number of positions in the row of a packed microbatch, or in every row of a padded microbatch;
    shape (num_microbatches,).
    """

    @property
    def boundaries(self) -> list[list[int]]:
        """First slot and end of each microbatch, as a list of pairs."""
        return [[int(start), int(stop)] for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    @property
    def microbatches(self) -> list[list[int]]:
        """Indices of the sequences in each microbatch."""
        return [self.indices[start:stop].tolist() for start, stop in self.boundaries]


@attrs.frozen(eq=False)
class Sharding:
    """
    RL batch, cut into microbatches for each worker.

    `results[sharding.restore]` restores the order of the batch, given the results of all slots,
    worker after worker. `order[restore]` is 0, 1, 2, …
    """

    mode: Mode

    num_shards: int
    """Number of data-parallel workers."""

    num_microbatches: tuple[int, ...]
    """Number of microbatches of every worker, for each global batch."""

    lengths: IntArray = attrs.field(converter=frozen_array)
    """Number of tokens of each sequence; shape (num_sequences,)."""

    slots: Packs
    """
    Microbatches of worker 0 over all global batches, then the microbatches of worker 1, and so on.
    """

    weights: IntArray = attrs.field(converter=frozen_array)
    """Weight of each slot: 1, or 0 for filler; shape (num_slots,)."""

    widths: IntArray = attrs.field(converter=frozen_array)
    """
    Number of positions in the row of a packed microbatch, or in every row of a padded microbatch;
    shape (num_microbatches,).
    """

    positions: IntArray = attrs.field(converter=frozen_array)
    """Number of positions in each microbatch; shape (num_microbatches,)."""

    works: NDArray[np.float64]
    """
    Work of each microbatch, including padding; shape (num_microbatches,). With a work model, the
    unit is FLOPs. If the caller gave works of sequences, the work is the sum of these works.
    Without either, the work is the sum of squared row widths, or of squared padded sequence lengths
    if packed.
    """

    capacity: int
    """Token limit, or the largest number of positions in a microbatch if that is more."""

    multiple: int
    """Multiple to which sequences in a packed row, or the widths of padded rows, are padded."""

    @property
    def order(self) -> IntArray:
        """Sequence in each slot, worker after worker; shape (num_slots,)."""
        return self.slots.indices

    @cached_property
    def restore(self) -> IntArray:
        """Index of the slot of each sequence; shape (num_sequences,)."""
        restore = np.empty(self.lengths.size, dtype=np.int64)
        real = np.flatnonzero(self.weights)
        restore[self.order[real]] = real
        return restore

    def by_worker(self, values: NDArray[_Number]) -> NDArray[_Number]:
        """Reshape values, one for each microbatch, to (num_shards, microbatches of a worker)."""
        return values.reshape(self.num_shards, -1)

    def shard(self, rank: int) -> tuple[ShardBatch, ...]:
        """Return the microbatches of worker *rank*, one `ShardBatch` for each global batch."""
        ends = np.cumsum(self.num_microbatches) + range(self.num_shards)[rank] * sum(self.num_microbatches)
        return tuple(self._slice(end - num, end) for num, end in zip(self.num_microbatches, ends.tolist(), strict=True))

    def _slice(self, start: int, stop: int) -> ShardBatch:
        """
        Return the microbatches *start* to *stop* - 1, which belong to one worker and one global
        batch.
        """
        offsets = self.slots.offsets[start : stop + 1]
        held = slice(offsets[0], offsets[-1])
        return ShardBatch(self.slots.indices[held], self.weights[held], offsets - offsets[0], self.widths[start:stop])

    def __len__(self) -> int:
        return self.num_shards

    def __iter__(self) -> Iterator[tuple[ShardBatch, ...]]:
        return map(self.shard, range(self.num_shards))


@attrs.frozen(eq=False)
class CutBatch:
    """One global batch, cut into microbatches."""

    sequences: IntArray
    """
    Sequence in each slot, in order inside each microbatch; shape (num_slots,). If a sequence occurs
    several times, all but its first slot are filler.
    """

    labels: IntArray
    """
    Microbatch of each slot; shape (num_slots,). The first `num` microbatches belong to worker 0.
    """

    num: int
    """Number of microbatches of every worker."""

    widths: IntArray | None = None
    """
    Number of positions in each row of a padded microbatch, which is equal for all workers; shape
    (num,). None if microbatches are packed.
    """


def join_batches(
    mode: Mode,
    lengths: IntArray,
    padded: IntArray,
    parts: Sequence[CutBatch],
    *,
    shards: int,
    capacity: int,
    multiple: int,
    work: SequenceWorks,
) -> Sharding:
    """
    Join the microbatches of all global batches into one `Sharding`, worker by worker.

    Args:
        mode: Kind of microbatches.
        lengths: Number of tokens of each sequence; shape (num_sequences,).
        padded: Number of positions of each sequence, padding included; shape (num_sequences,).
        parts: Global batches, in order.
        shards: Number of data-parallel workers.
        capacity: Token limit: maximum number of positions in a microbatch of several sequences.
        multiple: Multiple to which sequences or widths are padded.
        work: Work of the sequences.
    """
    total = sum(part.num for part in parts)
    first = np.cumsum([0, *(part.num for part in parts[:-1])])
    places = np.concatenate(
        [
            part.labels // part.num * total + start + part.labels % part.num
            for part, start in zip(parts, first, strict=True)
        ]
    )
    sequences = np.concatenate([part.sequences for part in parts])
    # The sequences of packed rows are sorted by index; padded microbatches keep their order.
    order = np.lexsort((sequences, places)) if mode == "packed" else np.argsort(places, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(places))])
    slots = Packs(offsets, sequences[order])
    # Filler comes after the sequences of its global batch.
    weights = np.zeros(slots.num_samples, dtype=np.int64)
    weights[np.unique(sequences, return_index=True)[1]] = 1
    works = np.add.reduceat(work.fixed[slots.indices], slots.offsets[:-1])
    if mode == "packed":
        widths = positions = slots.loads(padded)
        works += np.add.reduceat(work.row_works(padded)[slots.indices], slots.offsets[:-1])
    else:
        widths = np.tile(np.concatenate([part.widths for part in parts if part.widths is not None]), shards)
        positions = slots.sizes() * widths
        works += slots.sizes() * work.row_works(widths)
    works.flags.writeable = False
    return Sharding(
        mode=mode,
        num_shards=shards,
        num_microbatches=tuple(part.num for part in parts),
        lengths=lengths,
        slots=slots,
        weights=weights[order],
        widths=widths,
        positions=positions,
        works=works,
        capacity=max(capacity, int(positions.max())),
        multiple=multiple,
    )
