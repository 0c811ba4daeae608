"""
Assignment of items to workers' microbatches by work: within a token limit, or as whole packs.

A label is the microbatch of an item. Worker r has the microbatches from `r * per_shard` on.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush, heapreplace

import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.packs import Packs

MAX_CERTIFIED = 1024
"""
Largest number of sequences of a global batch for the certified packer. Beyond it, linear programs
take seconds.
"""


def round_up(number: int, multiple: int) -> int:
    """Return *number*, rounded up to a multiple of *multiple*."""
    return -(-number // multiple) * multiple


def pack_in_fewer_rounds(packs: Packs, costs: IntArray, *, capacity: int, round_size: int) -> Packs:
    """
    Return a packing by the algorithm `certified` if that saves a whole round, else *packs*.

    Args:
        packs: Microbatches of one algorithm.
        costs: Positions of each sequence; shape (num_sequences,).
        capacity: Positions of a microbatch.
        round_size: Microbatches that all workers compute at the same time.
    """
    least = round_up(-(-int(costs.sum()) // capacity), round_size)
    if costs.size > MAX_CERTIFIED or least >= round_up(len(packs), round_size):
        return packs
    fewer = pack(costs, capacity=capacity, algorithm="certified")
    return fewer if round_up(len(fewer), round_size) < round_up(len(packs), round_size) else packs


def add_filler(packs: Packs, num_items: int) -> Packs:
    """Return *packs* and one pack for each filler item, until *num_items* items are packed."""
    ends = np.arange(packs.num_samples, num_items) + 1
    return Packs(np.concatenate([packs.offsets, ends]), np.concatenate([packs.indices, ends - 1]))


def balance_items(costs: IntArray, works: IntArray, *, shards: int, per_shard: int, capacity: int) -> IntArray | None:
    """
    Assign items by descending work, each to the least loaded worker that has room for it.

    Return the microbatch of each item, or None if an item has no room anywhere.

    Args:
        costs: Positions of each item; at least `shards * per_shard`.
        works: Work of each item, in whole units.
        shards: Workers.
        per_shard: Microbatches of each worker.
        capacity: Positions of a microbatch.
    """
    sizes, weights = costs.tolist(), works.tolist()
    held: list[list[int]] = [[] for _ in range(shards)]
    labels = [0] * len(sizes)
    # Room and microbatch of a worker in one number, ascending: the first with enough room is the
    # fullest.
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
        # First items open a microbatch each, so that none stays empty. Then the fullest with room
        # takes them.
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
    Return the microbatch of each item, with about equal positions in each; None if a microbatch
    exceeds the capacity.
    """
    heap = list(range(num))  # load and place in one number
    places = []
    for size in sizes:
        places.append(heap[0] % num)
        heapreplace(heap, heap[0] + size * num)
    return places if max(heap) // num <= capacity else None


def assign_packs(packs: Packs, works: IntArray, shards: int) -> IntArray:
    """
    Assign the same number of whole packs to each worker, by descending work to the least loaded.

    Return the microbatch of each item.

    Args:
        packs: Microbatches; their number is a multiple of *shards*.
        works: Work of each item, in whole units; shape (num_items,).
        shards: Workers.
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
    Give this global batch's largest load to the worker with the least work so far.

    Return the labels, and each worker's work after this global batch.

    Args:
        labels: Microbatch of each item, worker by worker; shape (num_items,).
        works: Work of each item, in whole units; shape (num_items,).
        done: Work of each worker in earlier global batches; shape (num_workers,).
        per_shard: Microbatches of each worker.
    """
    of_workers = np.zeros(done.size, dtype=np.int64)
    np.add.at(of_workers, labels // per_shard, works)
    to = np.empty(done.size, dtype=np.int64)
    to[np.argsort(-of_workers, kind="stable")] = np.argsort(done, kind="stable")
    done = done.copy()
    done[to] += of_workers
    return to[labels // per_shard] * per_shard + labels % per_shard, done
