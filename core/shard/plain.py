"""Microbatches of neighbours, padded to the longest sequence of their global batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, Lengths, whole_number
from packplan.core.shard.inputs import BatchSize, FloatArray, SequenceWorks, Work, global_batches, padded_lengths
from packplan.core.shard.sharding import Part, Sharding, join


def shard_plain(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: BatchSize,
    micro_batch_size: int | None = None,
    sequence_length_round: int = 1,
    allow_uneven: bool = False,
    work: Work | None = None,
    media_work: Sequence[float] | FloatArray | None = None,
) -> Sharding:
    """
    Cut a batch into equal ranges of neighbours, padded to the longest sequence of the global batch.

    Args:
        lengths: Tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Data-parallel workers, >= 1.
        batch_size: Sequences of a global batch, over all workers; the last one may have fewer. A
            list gives the size of each global batch.
        micro_batch_size: Limit of sequences of a microbatch. None takes all of a worker in a global
            batch.
        sequence_length_round: Widths are multiples of it.
        allow_uneven: Whether some workers may have one sequence more if workers do not divide a
            global batch. A worker without one gets the shortest with weight 0.
        work: Work of the model; None counts the square of a row's width. Or the work of each
            sequence, in any unit.
        media_work: Work of each sequence's images and videos, in the same unit, beside *work*.

    Raises:
        ArgumentError: The workers do not divide a global batch, and that is not allowed,
            there is no sequence, or sizes or works do not match them.

    >>> sharding = shard_plain([5, 5, 5, 5], shards=2, batch_size=4)
    >>> [batch.microbatches for worker in sharding for batch in worker]
    [[[0, 1]], [[2, 3]]]
    """
    shards = whole_number("shards", shards, most=MOST_RANKS)
    array, padded = padded_lengths(lengths, sequence_length_round)
    works = SequenceWorks.from_arguments(work, media_work, array.size)
    parts = []
    for batch in global_batches(array.size, batch_size):
        costs = padded[batch.start : batch.stop]
        if costs.size % shards and not allow_uneven:
            uneven, workers = counted(costs.size, "sequence"), counted(shards, "worker")
            fact = f"{uneven} of a batch cannot be divided evenly over {workers}"
            raise ArgumentError("uneven_shards", fact, {"num_sequences": costs.size, "num_shards": shards})
        most = -(-costs.size // shards)
        num = -(-most // whole_number("micro_batch_size", most if micro_batch_size is None else micro_batch_size))
        items, labels = [], []
        for rank, held in enumerate(np.array_split(np.arange(costs.size), shards)):
            # A worker with one sequence less may lack a microbatch that others have.
            filler = np.full(max(0, num - held.size), costs.argmin())
            items.append(np.concatenate([held, filler]))
            labels.append(rank * num + np.arange(items[-1].size) * num // items[-1].size)
        widths = np.full(num, costs.max())
        parts.append(Part(np.concatenate(items) + batch.start, np.concatenate(labels), num, widths))
    return join(
        "plain", array, padded, parts, shards=shards, capacity=1, multiple=int(sequence_length_round), work=works
    )
