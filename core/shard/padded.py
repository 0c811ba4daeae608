"""Microbatches that are padded: of neighbours in order, or of sequences of similar length."""

from collections.abc import Sequence

import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, Lengths, whole_number
from packplan.core.shard.assignment import round_up
from packplan.core.shard.inputs import (
    BatchSize,
    FloatArray,
    SequenceWorks,
    WhenLong,
    WhenShort,
    Work,
    filled,
    global_batches,
    padded_lengths,
)
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


def shard_dynamic(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: BatchSize,
    max_tokens_per_microbatch: int,
    sequence_length_round: int = 1,
    when_short: WhenShort = "fill",
    when_long: WhenLong = "error",
    work: Work | None = None,
    media_work: Sequence[float] | FloatArray | None = None,
) -> Sharding:
    """
    Cut a batch into microbatches of sequences of similar length, padded to one width.

    Sequences of a global batch are sorted by length and assigned to the workers one by one, so that
    all workers share the boundaries and widths of their microbatches. A width is the longest
    sequence of any worker, rounded up.

    Args:
        lengths: Tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Data-parallel workers, >= 1.
        batch_size: Sequences of a global batch, over all workers; the last one may have fewer. A
            list gives the size of each global batch.
        max_tokens_per_microbatch: Limit of sequences times width.
        sequence_length_round: Widths are multiples of it.
        when_short: Whether to fill up with weight 0 or raise if workers do not divide a global
            batch.
        when_long: Whether a sequence wider than the budget is an error, or the one row of its
            microbatch (`alone`).
        work: Work of the model; None counts the square of a row's width. Or the work of each
            sequence, in any unit.
        media_work: Work of each sequence's images and videos, in the same unit, beside *work*.

    Raises:
        ArgumentError: A sequence alone is wider than the budget and `when_long` is `error`, there
            is no sequence, the workers do not divide them and `when_short` is `error`, or sizes or
            works do not match them.

    >>> sharding = shard_dynamic([2, 8, 4, 16, 28, 32, 2, 32], shards=2, batch_size=8,
    ...     max_tokens_per_microbatch=32, sequence_length_round=4)
    >>> [(batch.boundaries, batch.widths.tolist()) for worker in sharding for batch in worker]
    [([[0, 2], [2, 3], [3, 4]], [8, 28, 32]), ([[0, 2], [2, 3], [3, 4]], [8, 28, 32])]
    """
    capacity = whole_number("max_tokens_per_microbatch", max_tokens_per_microbatch)
    shards = whole_number("shards", shards, most=MOST_RANKS)
    array, padded = padded_lengths(lengths, sequence_length_round, capacity, when_long)
    works = SequenceWorks.from_arguments(work, media_work, array.size)
    parts = []
    for batch in global_batches(array.size, batch_size):
        costs = padded[batch.start : batch.stop]
        items = filled(costs, round_up(costs.size, shards), when_short)
        ascending = items[np.argsort(array[batch.start : batch.stop][items], kind="stable")]
        # Microbatch of each row. A row is as wide as the longest sequence of any worker.
        rows = costs[ascending[shards - 1 :: shards]]
        # A row over the budget counts as a full microbatch, so that it is alone.
        numbers = _numbers(np.minimum(rows, capacity).tolist(), capacity)
        widths = rows[np.flatnonzero(np.diff(numbers, append=numbers[-1] + 1))]
        labels = np.tile(np.arange(shards) * widths.size, rows.size) + np.repeat(numbers, shards)
        parts.append(Part(ascending + batch.start, labels, widths.size, widths))
    return join(
        "dynamic", array, padded, parts, shards=shards, capacity=capacity, multiple=int(sequence_length_round),
        work=works,
    )  # fmt: skip


def _numbers(rows: Sequence[int], capacity: int) -> IntArray:
    """
    Return the microbatch of each row. A microbatch takes the rows that fit at the width of the
    last.
    """
    numbers = []
    number = start = 0
    for row, width in enumerate(rows):
        if (row + 1 - start) * width > capacity:
            number, start = number + 1, row
        numbers.append(number)
    return np.array(numbers)
