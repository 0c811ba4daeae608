"""Cutting RL batches into microbatches: one packed row each, or padded rows of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from packplan.core.lengths import MOST_RANKS, IntArray, Lengths, as_whole_number
from packplan.core.packers import pack, split_to_bin_count
from packplan.core.packs import Packs
from packplan.core.shard.assignment import (
    add_filler,
    assign_packs,
    balance_items,
    pack_in_fewer_rounds,
    rotate_to_least_loaded,
    round_up,
)
from packplan.core.shard.inputs import (
    SequenceWorks,
    WhenLong,
    Work,
    global_batches,
    lengths_and_padded,
    require_choice,
    slot_sequences,
)
from packplan.core.shard.rounds import assign_rounds, spread_over_rounds
from packplan.core.shard.sharding import CutBatch, Sharding, join_batches
from packplan.core.work.assignment import SyncPoint, to_units


def shard_packed(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_pad_multiple: int = 1,
    algorithm: str = "modified_first_fit_decreasing",
    when_long: WhenLong = "error",
    seed: int = 0,
    work: Work | None = None,
    sync_at: SyncPoint = "microbatch",
) -> Sharding:
    """
    Cut a batch into microbatches that become one packed row each.

    Args:
        lengths: Number of tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Number of data-parallel workers, >= 1.
        batch_size: Number of sequences in a global batch, over all workers; the last batch may have
            fewer.
        max_tokens_per_microbatch: Maximum number of tokens in a row, padding included.
        sequence_length_pad_multiple: Each sequence is padded to a multiple of this number.
        algorithm: Name of a packing algorithm, a key of `core.packers.ALGORITHMS`. This algorithm
            decides the number of microbatches, unless `certified` needs fewer on each worker.
        when_long: `error` refuses a sequence longer than the limit; `alone` makes it a row by
            itself.
        seed: Seed of random algorithms.
        work: Work model of the model, or work of each sequence in any unit. None uses squared
            padded lengths.
        sync_at: Where workers wait for each other. `microbatch`, such as with FSDP: microbatches
            that run at the same time get about equal work. `step`, at the end of a global batch:
            workers get about equal total work, and microbatches equal work as far as possible.

    Raises:
        ArgumentError: A sequence is too long for a row, and *when_long* is `error`.
        ArgumentError: There is no sequence, a size is invalid, or the number of works is wrong.

    >>> lengths = [900, 850, 1000, 950]
    >>> sharding = shard_packed(lengths, shards=2, batch_size=4, max_tokens_per_microbatch=1024)
    >>> [batch.microbatches for worker in sharding for batch in worker]
    [[[1], [2]], [[0], [3]]]
    """
    capacity = as_whole_number("max_tokens_per_microbatch", max_tokens_per_microbatch)
    shards = as_whole_number("shards", shards, most=MOST_RANKS)
    require_choice("sync_at", sync_at, get_args(SyncPoint))
    array, padded = lengths_and_padded(
        lengths, sequence_length_pad_multiple, capacity, when_long, name="sequence_length_pad_multiple"
    )
    # A sequence longer than the limit counts as a full row, so that it is a row by itself.
    costs_of = np.minimum(padded, capacity)
    works_of = SequenceWorks.from_arguments(work, array.size)
    # At least 1, so that a microbatch with sequences never counts as empty.
    units = np.maximum(to_units(works_of.row_works(padded) + works_of.fixed), 1)
    done = np.zeros(shards, dtype=np.int64)
    parts = []
    for batch in global_batches(array.size, batch_size):
        costs, works = costs_of[batch.start : batch.stop], units[batch.start : batch.stop]
        packs = pack(costs, capacity=capacity, algorithm=algorithm, seed=seed)
        packs = pack_in_fewer_rounds(packs, costs, capacity=capacity, round_size=shards)
        rounds = round_up(len(packs), shards) // shards
        items = slot_sequences(costs, shards * rounds)
        costs, works = costs[items], works[items]
        labels = _assign_evenly(packs, costs, works, shards=shards, rounds=rounds, capacity=capacity, sync_at=sync_at)
        labels, done = rotate_to_least_loaded(labels, works, done, rounds)
        labels = _renumber(labels, items, works, rounds=rounds)
        parts.append(CutBatch(items + batch.start, labels, rounds))
    return join_batches(
        "packed", array, padded, parts, shards=shards, capacity=capacity, multiple=int(sequence_length_pad_multiple),
        work=works_of,
    )  # fmt: skip


def _renumber(labels: IntArray, items: IntArray, works: IntArray, *, rounds: int) -> IntArray:
    """
    Renumber microbatches, so that the k-th heaviest microbatches of all workers form a round, and
    rounds are ordered by their first sequence.
    """
    num = int(labels.max()) + 1
    first = np.full(num, int(items.max()) + 1)
    np.minimum.at(first, labels, items)
    sums = np.zeros(num, dtype=np.int64)
    np.add.at(sums, labels, works)
    of_rounds = np.lexsort((first, -sums, np.arange(num) // rounds)).reshape(-1, rounds)
    order = of_rounds[:, np.argsort(first[of_rounds].min(axis=0), kind="stable")].ravel()
    return np.argsort(order)[labels]


def _assign_evenly(
    packs: Packs, costs: IntArray, works: IntArray, *, shards: int, rounds: int, capacity: int, sync_at: SyncPoint
) -> IntArray:
    """
    Return the microbatch of each item, numbered worker by worker, so that work is about equal.
    """
    even = None
    by_round = spread_over_rounds(costs, works, shards=shards, rounds=rounds, capacity=capacity)
    if by_round is not None:
        even = assign_rounds(by_round, costs, works, shards=shards, capacity=capacity)
        # However items are assigned, the busiest worker has at least the mean work.
        mean = -(-int(works.sum()) // shards)
        if sync_at == "microbatch" or _busiest_work(even, works, shards) <= _tolerated_work(mean):
            return even
    by_worker = balance_items(costs, works, shards=shards, per_shard=rounds, capacity=capacity)
    if by_worker is None:
        enough = add_filler(packs, costs.size)
        enough = split_to_bin_count(enough, costs, minimum=shards * rounds, multiple=1)
        by_worker = assign_packs(enough, works, shards)
    if even is None:
        even = assign_rounds(by_worker, costs, works, shards=shards, capacity=capacity)
    level_enough = _busiest_work(even, works, shards) <= _tolerated_work(_busiest_work(by_worker, works, shards))
    return even if sync_at == "microbatch" or level_enough else by_worker


def _busiest_work(labels: IntArray, works: IntArray, shards: int) -> int:
    """Return the work of the busiest worker."""
    rounds = (int(labels.max()) + 1) // shards
    sums = np.zeros(shards, dtype=np.int64)
    np.add.at(sums, labels // rounds, works)
    return int(sums.max())


def _tolerated_work(work: int) -> int:
    """Return *work* plus the tolerated excess of one thousandth."""
    return work + work // 1000


def shard_dynamic(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int = 1,
    when_long: WhenLong = "error",
    work: Work | None = None,
) -> Sharding:
    """
    Cut a batch into microbatches of sequences of similar length, padded to one width.

    Sequences of a global batch are sorted by length and assigned to the workers in turn. The
    microbatches of all workers therefore have the same boundaries and widths. The width of a
    microbatch is the length of its longest sequence on any worker, rounded up.

    Args:
        lengths: Number of tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Number of data-parallel workers, >= 1.
        batch_size: Number of sequences in a global batch, over all workers; the last batch may have
            fewer.
        max_tokens_per_microbatch: Maximum number of tokens in a microbatch, padding included: its
            number of sequences times its width.
        sequence_length_round: Widths are rounded up to a multiple of this number.
        when_long: `error` refuses a sequence wider than the limit; `alone` makes it a microbatch by
            itself.
        work: Work model of the model, or work of each sequence in any unit. None uses squared
            widths.

    Raises:
        ArgumentError: A sequence is wider than the limit, and *when_long* is `error`.
        ArgumentError: There is no sequence, a size is invalid, or the number of works is wrong.

    >>> sharding = shard_dynamic([2, 8, 4, 16, 28, 32, 2, 32], shards=2, batch_size=8,
    ...     max_tokens_per_microbatch=32, sequence_length_round=4)
    >>> [(batch.boundaries, batch.widths.tolist()) for worker in sharding for batch in worker]
    [([[0, 2], [2, 3], [3, 4]], [8, 28, 32]), ([[0, 2], [2, 3], [3, 4]], [8, 28, 32])]
    """
    capacity = as_whole_number("max_tokens_per_microbatch", max_tokens_per_microbatch)
    shards = as_whole_number("shards", shards, most=MOST_RANKS)
    array, padded = lengths_and_padded(
        lengths, sequence_length_round, capacity, when_long, name="sequence_length_round"
    )
    works = SequenceWorks.from_arguments(work, array.size)
    parts = []
    for batch in global_batches(array.size, batch_size):
        costs = padded[batch.start : batch.stop]
        items = slot_sequences(costs, round_up(costs.size, shards))
        ascending = items[np.argsort(array[batch.start : batch.stop][items], kind="stable")]
        # Row k has the k-th sequence of every worker, and is as wide as the longest of them.
        rows = costs[ascending[shards - 1 :: shards]]
        # A row wider than the limit counts as a full microbatch, so that it becomes one by itself.
        numbers = _group_rows(np.minimum(rows, capacity).tolist(), capacity)
        widths = rows[np.flatnonzero(np.diff(numbers, append=numbers[-1] + 1))]
        labels = np.tile(np.arange(shards) * widths.size, rows.size) + np.repeat(numbers, shards)
        parts.append(CutBatch(ascending + batch.start, labels, widths.size, widths))
    return join_batches(
        "dynamic", array, padded, parts, shards=shards, capacity=capacity, multiple=int(sequence_length_round),
        work=works,
    )  # fmt: skip


def _group_rows(rows: Sequence[int], capacity: int) -> IntArray:
    """
    Return the microbatch of each row. A microbatch has as many rows as fit with the width of its
    last row.
    """
    numbers = []
    number = start = 0
    for row, width in enumerate(rows):
        if (row + 1 - start) * width > capacity:
            number, start = number + 1, row
        numbers.append(number)
    return np.array(numbers)
