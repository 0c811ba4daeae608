"""
Progress of a stream over all ranks, and how other ranks go on from it.

An epoch's samples are assigned to shards in epoch order: shard s of S takes the places s, s + S,
s + 2S, … On other ranks or workers, what the epoch has not trained is assigned again in the same
way: first the samples that wait, then the places that no shard has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import attrs
import numpy as np

from packplan.core.errors import Difference
from packplan.core.fingerprint import NO_IDENTITY, Fingerprint, RunIdentity
from packplan.core.lengths import IntArray
from packplan.core.stream.shard import ShardState, StreamCounts


@attrs.frozen
class StreamSegment:
    """Part of an epoch that was trained on one number of shards, and has ended."""

    reads: tuple[int, ...]
    """Places that each shard has read."""


@attrs.frozen
class RankState:
    """Progress of one rank between two optimizer steps."""

    shards: tuple[ShardState, ...] = ()
    """Shard of each loader worker, or the rank's own one; empty if the epoch has not begun."""

    next_shard: int = 0
    """Shard that gives the next pack."""

    earlier: StreamCounts = attrs.field(factory=StreamCounts)
    """Counts of earlier epochs."""

    trained: int = 0
    """Samples that were trained in all epochs."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.next_shard < max(1, len(self.shards)) or self.trained < 0:
            message = f"shard {self.next_shard} of {len(self.shards)} is next, after {self.trained} samples"
            raise ValueError(message)


@attrs.frozen
class StreamProgress:
    """Progress of a stream between two optimizer steps."""

    world_size: int = 1
    shards_per_rank: int = 1
    step: int = 0
    """Optimizer steps done."""

    epoch: int = 0
    """Epoch of the next step."""

    epoch_step: int = 0
    """Optimizer steps done in that epoch."""

    segments: tuple[StreamSegment, ...] = ()
    """Earlier parts of that epoch, on other numbers of shards."""

    def __attrs_post_init__(self) -> None:
        reads = (0, *chain.from_iterable(segment.reads for segment in self.segments))
        sizes = (self.world_size - 1, self.shards_per_rank - 1, self.epoch, self.epoch_step, min(reads))
        if min(sizes) < 0 or self.epoch_step > self.step or not all(segment.reads for segment in self.segments):
            message = (
                f"step {self.step}, epoch {self.epoch}, its step {self.epoch_step}, {self.world_size} ranks with "
                f"{self.shards_per_rank} shards each, or what earlier shards read, contradict each other"
            )
            raise ValueError(message)


@attrs.frozen
class StreamState:
    """Progress and settings in a checkpoint, by which a stream continues or is refused."""

    inputs: Fingerprint
    """Everything that decides the samples, their order and their packs."""

    progress: StreamProgress

    identity: RunIdentity = NO_IDENTITY
    """Model, loss and settings of the run."""

    def differences(self, now: StreamState) -> tuple[Difference, ...]:
        """Return the inputs in which the current state *now* differs from this stored one."""
        found = self.inputs.differences(now.inputs) + self.identity.fixed.differences(now.identity.fixed)
        return tuple(dict.fromkeys(found))  # both have the settings of samples


def unread_places(num_places: int, segments: Sequence[StreamSegment]) -> IntArray:
    """
    Return the places of an epoch that the shards of its earlier segments have not read.

    >>> unread_places(6, [StreamSegment(reads=(1, 2))]).tolist()
    [2, 4, 5]
    """
    places = np.arange(num_places)
    for segment in segments:
        num_shards = len(segment.reads)
        parts = [places[shard::num_shards][read:] for shard, read in enumerate(segment.reads)]
        places = np.sort(np.concatenate(parts))
    return places


def reassign(
    progress: StreamProgress, ranks: Sequence[RankState], *, world_size: int, shards_per_rank: int
) -> tuple[StreamProgress, tuple[RankState, ...]]:
    """
    Return the progress on another number of ranks or shards.

    Args:
        progress: Progress of the stream.
        ranks: Progress of each rank of before.
        world_size: Number of ranks now.
        shards_per_rank: Number of shards of each rank now.
    """
    shards = tuple(chain.from_iterable(rank.shards for rank in ranks))
    now = attrs.evolve(progress, world_size=world_size, shards_per_rank=shards_per_rank)
    totals = RankState(
        earlier=sum((rank.earlier for rank in ranks), StreamCounts()), trained=sum(rank.trained for rank in ranks)
    )
    if not shards:
        return now, (totals, *[RankState()] * (world_size - 1))
    ended = StreamSegment(reads=tuple(shard.read for shard in shards))
    waiting = sorted(chain.from_iterable(shard.waiting for shard in shards), key=lambda item: item.place)
    # These come to a buffer again, and are counted then.
    again = [item.length for shard in shards for item in shard.admitted]
    counts = sum((shard.counts for shard in shards), StreamCounts(samples=-len(again), tokens=-sum(again)))
    num_shards = world_size * shards_per_rank
    assigned = [ShardState(ahead=tuple(waiting[shard::num_shards])) for shard in range(num_shards)]
    assigned[0] = attrs.evolve(assigned[0], counts=counts)
    firsts = range(0, num_shards, shards_per_rank)
    states = [RankState(shards=tuple(assigned[first : first + shards_per_rank])) for first in firsts]
    states[0] = attrs.evolve(totals, shards=states[0].shards)
    return attrs.evolve(now, segments=(*progress.segments, ended)), tuple(states)
