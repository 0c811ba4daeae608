"""
Assignment of items to the workers' microbatches by work, within a token limit or as whole packs.

A label is the index of an item's microbatch. Every worker has `per_shard` microbatches. Those of
worker r are numbered from `r * per_shard` to `(r + 1) * per_shard - 1`.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush, heapreplace

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.packs import Packs

MAX_CERTIFIED = 1024
"""
Maximum number of sequences in a global batch for the algorithm `certified`. With more sequences,
its linear programs take seconds.
"""


def round_up(number: int, multiple: int) -> int:
    """Return *number*, rounded up to a multiple of *multiple*."""
    return -(-number // multiple) * multiple


def pack_in_fewer_rounds(packs: Packs, costs: IntArray, *, capacity: int, round_size: int) -> Packs:
    """
    Pack with the algorithm `certified` if this saves a whole round, else return *packs*.

    Args:
        packs: Microbatches that another algorithm made.
        costs: Number of positions of each sequence; shape (num_sequences,).
        capacity: Maximum number of positions in a microbatch.
        round_size: Number of microbatches that all workers compute at the same time.
    """
    least = round_up(-(-int(costs.sum()) // capacity), round_size)
    if costs.size > MAX_CERTIFIED or least >= round_up(len(packs), round_size):
        return packs
    fewer = pack(costs, capacity=capacity, algorithm="certified")
    return fewer if round_up(len(fewer), round_size) < round_up(len(packs), round_size) else packs


def add_filler(packs: Packs, num_items: int) -> Packs:
    """
    Return *packs*, extended by one pack for each filler item until *num_items* items are packed.
    """
    ends = np.arange(packs.num_samples, num_items) + 1
    return Packs(np.concatenate([packs.offsets, ends]), np.concatenate([packs.indices, ends - 1]))


def balance_items(costs: IntArray, works: IntArray, *, shards: int, per_shard: int, capacity: int) -> IntArray | None:
    """
    Assign items by descending work, each to the least loaded worker that has room for it.

    Return the microbatch of each item, or None if no worker has room for an item.

    Args:
        costs: Number of positions of each item; at least `shards * per_shard` items.
        works: Work of each item, as integers.
        shards: Number of workers.
        per_shard: Number of microbatches of each worker.
        capacity: Maximum number of positions in a microbatch.
    """
    sizes, weights = costs.tolist(), works.tolist()
    held: list[list[int]] = [[] for _ in range(shards)]
    labels = [0] * len(sizes)
    # Room and index of a worker's microbatches, combined in one number and ascending: the first
    # one with enough room is the fullest.
    rooms = [[capacity * per_shard + place for place in range(per_shard)] for _ in range(shards)]
    needed, left = shards * per_shard, len(sizes)
    heap = list(range(shards))  # work and worker in one number
    for item in np.lexsort((-costs, -works)).tolist():
        size = sizes[item]
        wanted = size * per_shard
        passed = []
        while heap:
            shard = heap[0] % shards
            free = rooms[shard]
            # The last items go to workers with empty microbatches, so that none stays empty.
            if free[-1] >= wanted and (left > needed or len(held[shard]) < per_shard):
                break
            passed.append(heappop(heap))
        else:
            return None
        # The first items go to empty microbatches, so that none stays empty. Each later item goes
        # to the fullest microbatch with room.
        room = free.pop() if len(held[shard]) < per_shard else free.pop(bisect_left(free, wanted))
        insort(free, room - wanted)
        labels[item] = room % per_shard
        needed -= len(held[shard]) < per_shard
        left -= 1
        held[shard].append(item)
        heapreplace(heap, heap[0] + weights[item] * shards)
        for key in passed:
            heappush(heap, key)
    for shard, items in enumerate(held):
        places = _place_evenly([sizes[item] for item in items], per_shard, capacity)
        for number, item in enumerate(items):
            labels[item] = shard * per_shard + (places[number] if places else labels[item])
    return np.array(labels)


def _place_evenly(sizes: list[int], num: int, capacity: int) -> list[int] | None:
    """
    Return the microbatch of each item, so that microbatches have about equally many positions; None
    if a microbatch exceeds the capacity.
    """
    heap = list(range(num))  # load and place in one number
    places = []
    for size in sizes:
        places.append(heap[0] % num)
        heapreplace(heap, heap[0] + size * num)
    return places if max(heap) // num <= capacity else None


def assign_packs(packs: Packs, works: IntArray, shards: int) -> IntArray:
    """
    Assign the same number of whole packs to each worker. Packs are assigned by descending work,
    each to the least loaded worker with room for a pack.

    Return the microbatch of each item.

    Args:
        packs: Microbatches; their number is a multiple of *shards*.
        works: Work of each item, as integers; shape (num_items,).
        shards: Number of workers.
    """
    per_shard = len(packs) // shards
    labels, of_packs = np.empty(len(packs), dtype=np.int64), packs.loads(works)
    heap, held = list(range(shards)), [0] * shards
    for pack_ in np.argsort(-of_packs, kind="stable").tolist():
        shard = heap[0] % shards
        labels[pack_] = shard * per_shard + held[shard]
        held[shard] += 1
        if held[shard] < per_shard:
            heapreplace(heap, heap[0] + int(of_packs[pack_]) * shards)
        else:
            heappop(heap)
    return labels[packs.to_labels(packs.num_samples)]


def rotate_to_least_loaded(
    labels: IntArray, works: IntArray, done: IntArray, per_shard: int
) -> tuple[IntArray, IntArray]:
    """
    Swap the loads of workers, so that the worker with the least work so far gets the largest load
    of this global batch.

    Return the new labels, and the work of each worker including this global batch.

    Args:
        labels: Microbatch of each item, numbered worker by worker; shape (num_items,).
        works: Work of each item, as integers; shape (num_items,).
        done: Work of each worker in earlier global batches; shape (num_workers,).
        per_shard: Number of microbatches of each worker.
    """
    of_workers = np.zeros(done.size, dtype=np.int64)
    np.add.at(of_workers, labels // per_shard, works)
    to = np.empty(done.size, dtype=np.int64)
    to[np.argsort(-of_workers, kind="stable")] = np.argsort(done, kind="stable")
    done = done.copy()
    done[to] += of_workers
    return to[labels // per_shard] * per_shard + labels % per_shard, done
