"""Groups of sequences that stay on one worker, as the answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from packplan.core.errors import ArgumentError
from packplan.core.lengths import IntArray, Lengths


def checked_groups(groups: Lengths, batches: Sequence[range]) -> IntArray:
    """
    Return the group of each sequence, numbered from 0.

    Args:
        groups: Label of each sequence, a whole number.
        batches: Sequences of each global batch.

    Raises:
        ArgumentError: Labels are not one whole number for each sequence, or a group has sequences
            in several global batches.
    """
    labels, num = np.asarray(groups), batches[-1].stop
    if labels.shape != (num,) or labels.dtype.kind not in "iu":
        fact = f"groups are labels of shape {labels.shape} and type {labels.dtype}, but the batch has {num:,} sequences"
        raise ArgumentError("batch", f"{fact}: give a whole number for each")
    names, numbers = np.unique(labels, return_inverse=True)
    batch_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    last = np.zeros(names.size, dtype=np.int64)
    np.maximum.at(last, numbers, batch_of)
    if (split := np.flatnonzero(last[numbers] != batch_of)).size:
        name, first = labels[split[0]], batch_of[split[0]]
        fact = f"group {name} has sequences in global batches {first:,} and {last[numbers[split[0]]]:,}"
        raise ArgumentError("batch", f"{fact}: order the batch by group, and end global batches with groups")
    return numbers


def assign_groups(groups: IntArray, values: IntArray, shards: int) -> list[IntArray]:
    """
    Return the sequences of each worker: groups in descending order, each to the least loaded.

    Args:
        groups: Group of each sequence, >= 0.
        values: Work of each sequence, in whole units.
        shards: Workers.
    """
    sums = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    np.add.at(sums, groups, values)
    workers = np.zeros_like(sums)
    heap = list(range(shards))  # load and worker in one number
    for group in np.argsort(-sums, kind="stable").tolist():
        workers[group] = heap[0] % shards
        heapreplace(heap, heap[0] + int(sums[group]) * shards)
    return [np.flatnonzero(workers[groups] == worker) for worker in range(shards)]
