"""
Rounds of equal work. A round consists of the microbatches that all workers compute at the same
time.

With FSDP, all workers wait for the busiest worker in every round. The time of a global batch is
therefore the time of the busiest microbatch, summed over all rounds. Sequences with more work than
a mean microbatch set the level of work in the first rounds. The other microbatches of these rounds
are filled up to this level. The remaining sequences are spread evenly over the other rounds.

Works are integers, and in a tie the lower index is chosen, so every process computes the same
microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

import numpy as np

from packplan.core.lengths import IntArray

_TOLERANCE = 1000
"""
Divisor of the mean work: a round is level once its busiest microbatch exceeds the mean by at most a
thousandth.
"""

_EXCHANGES = 8
"""Maximum number of exchanges in a round, per microbatch of the round."""

_PARTNERS = 4
"""
Number of least loaded microbatches with which the busiest microbatch of a round may exchange items.
"""


def spread_over_rounds(costs: IntArray, works: IntArray, *, shards: int, rounds: int, capacity: int) -> IntArray | None:
    """
    Assign items to microbatches, so that the microbatches of a round have about equal work.

    Return the microbatch of each item, or None if no microbatch has room for an item.

    Args:
        costs: Number of positions of each item; at least as many items as microbatches.
        works: Work of each item, as integers.
        shards: Number of microbatches in a round, one for each worker.
        rounds: Number of microbatches of each worker.
        capacity: Maximum number of positions in a microbatch.
    """
    order = np.lexsort((-costs, -works))
    fill = _RoundFiller(costs[order], works[order], shards, shards * rounds, capacity)
    places: list[int] = []
    while len(places) < order.size:
        if (place := fill.add(len(places))) is None:
            return None
        places.append(place)
    labels = np.empty_like(order)
    labels[order] = places
    return labels


class _Pool:
    """
    Set of microbatches; the next item goes to the least loaded microbatch that has room for it.

    A key combines the work and the index of a microbatch in one number: `work * num + index`.
    """

    def __init__(self, keys: list[int], room: list[int]) -> None:
        self.keys, self._room = keys, room
        # Microbatches without room for an item, the roomiest first, kept for a shorter item.
        self._waiting: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.keys) + len(self._waiting)

    def __iter__(self) -> Iterator[int]:
        """Yield the key of each microbatch."""
        yield from self.keys
        yield from (key for _, key in self._waiting)

    @property
    def most_waiting_room(self) -> int:
        """Number of positions of the longest item for which a waiting microbatch has room."""
        return -self._waiting[0][0] if self._waiting else 0

    def take(self, num: int) -> _Pool:
        """Move the first *num* microbatches, which have to be empty, into a new pool."""
        ordered = sorted(self.keys)
        self.keys = ordered[num:]  # a sorted list is a heap
        return _Pool(ordered[:num], self._room)

    def add(self, size: int, step: int, below: int) -> int | None:
        """
        Put an item into the least loaded microbatch with room. Return the microbatch's previous
        key, or None if no microbatch with a key below *below* has room.

        Args:
            size: Number of positions of the item.
            step: Work of the item, in units of a key.
            below: Exclusive upper limit of the previous key.
        """
        keys, waiting, room = self.keys, self._waiting, self._room
        while waiting and -waiting[0][0] >= size:
            heappush(keys, heappop(waiting)[1])
        while keys and (key := keys[0]) < below:
            place = key % len(room)
            if room[place] >= size:
                room[place] -= size
                heapreplace(keys, key + step)
                return key
            heappush(waiting, (-room[place], heappop(keys)))
        return None


class _RoundFiller:
    """Microbatches of all rounds while items are added by descending work."""

    def __init__(self, costs: IntArray, works: IntArray, shards: int, num: int, capacity: int) -> None:
        self._sizes, self._steps = costs.tolist(), [work * num for work in works.tolist()]
        # Sums of works and positions from each item to the last.
        self._left, self._positions_left = (np.cumsum(values[::-1])[::-1] for values in (works, costs))
        self._room = [capacity] * num
        self._shards, self._num, self._num_empty = shards, num, num
        self._limit = num * (int(self._left[0]) + 1)
        self._light = _Pool(list(range(num)), self._room)
        self._is_light_open = False
        # Keys of the microbatches of a heavy pool stay below its level.
        self._levels: list[int] = []
        self._heavy: list[_Pool] = []
        # No heavy pool takes an item that is longer than the size and adds at least the step.
        self._most_step, self._most_size = self._limit, 0

    def add(self, item: int) -> int | None:
        """Assign the next item; return its microbatch, or None if no microbatch has room."""
        # If as many items as empty microbatches are left, only empty ones get an item.
        must_open = len(self._sizes) - item <= self._num_empty
        key = self._add_below(item, self._num if must_open else self._limit)
        if key is None:
            return None
        self._num_empty -= key < self._num
        return key % self._num

    def _add_below(self, item: int, below: int) -> int | None:
        """Assign an item to a microbatch with a key below *below*; return this key, or None."""
        size, step = self._sizes[item], self._steps[item]
        if step < self._most_step or size <= self._most_size:
            for level, pool in zip(self._levels, self._heavy, strict=True):
                if (key := pool.add(size, step, min(level - step, below))) is not None:
                    return key
            self._update_heavy_limits()
        if not self._is_light_open and len(self._light):
            if step > self._num * self._mean_of_light(item):
                # The first item of a round sets its level, up to which later items fill the round.
                self._levels.append(step + self._num)
                self._heavy.append(self._light.take(self._shards))
                self._most_step = self._limit
                return self._heavy[-1].add(size, step, below)
            self._is_light_open = True
        if (key := self._light.add(size, step, below)) is not None:
            return key
        for number, pool in enumerate(self._heavy):
            if (key := pool.add(size, step, below)) is not None:
                level = (key // self._num + 1) * self._num + step
                self._levels[number] = max(self._levels[number], level)
                self._most_step = self._limit
                return key
        return None

    def _update_heavy_limits(self) -> None:
        """
        Update the limits of work and size: no heavy pool can take an item that adds at least
        `_most_step` and is longer than `_most_size`.
        """
        levels = zip(self._levels, self._heavy, strict=True)
        self._most_step = max((level - pool.keys[0] for level, pool in levels if pool.keys), default=0)
        self._most_size = max((pool.most_waiting_room for pool in self._heavy), default=0)

    def _mean_of_light(self, item: int) -> float:
        """
        Estimate the mean work of a microbatch in the light rounds, after the heavy rounds have been
        filled with items from *item* on.
        """
        left = int(self._left[item])
        density = left / int(self._positions_left[item])
        taken = sum(
            min(level // self._num - 1 - key // self._num, self._room[key % self._num] * density)
            for level, pool in zip(self._levels, self._heavy, strict=True)
            for key in pool
        )
        return float(left - taken) / len(self._light)


def assign_rounds(labels: IntArray, costs: IntArray, works: IntArray, *, shards: int, capacity: int) -> IntArray:
    """
    Assign microbatches to workers, so that all microbatches of a round, and the totals of all
    workers, have about equal work.

    A round is the set of all workers' k-th microbatches, which are computed at the same time.
    Return the new microbatch of each item.

    Args:
        labels: Microbatch of each item. The number of microbatches is a multiple of *shards*.
        costs: Number of positions of each item.
        works: Work of each item, as integers.
        shards: Number of workers.
        capacity: Maximum number of positions in a microbatch.
    """
    num = int(labels.max()) + 1
    rounds = num // shards
    held = np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1])
    sums = np.array([int(works[items].sum()) for items in held])
    falling = np.argsort(-sums, kind="stable").reshape(rounds, shards)
    levelled = [_Round(costs, works, [held[place] for place in places], capacity) for places in falling.tolist()]
    for one in levelled:
        one.level()
    result = np.empty_like(labels)
    done = np.zeros(shards, dtype=np.int64)
    # The least even rounds come first, so that later rounds compensate for them.
    order = sorted(range(rounds), key=lambda number: (-int(np.ptp(levelled[number].sums)), number))
    for number in order:
        one = levelled[number]
        workers = np.argsort(done, kind="stable")
        for worker, place in zip(workers.tolist(), np.argsort(-one.sums, kind="stable").tolist(), strict=True):
            result[one.held[place]] = worker * rounds + number
            done[worker] += one.sums[place]
    return result


class _Round:
    """Microbatches of one round, between which items are exchanged."""

    def __init__(self, costs: IntArray, works: IntArray, held: list[IntArray], capacity: int) -> None:
        self._costs, self._works, self._capacity = costs, works, capacity
        self.held = held
        self.sums = np.array([int(works[items].sum()) for items in held])
        self._loads = np.array([int(costs[items].sum()) for items in held])

    def level(self) -> None:
        """
        Exchange items of the busiest microbatch until work is level, or until no exchange helps.
        """
        limit = -(-int(self.sums.sum()) // len(self.held))
        limit += limit // _TOLERANCE
        for _ in range(_EXCHANGES * len(self.held)):
            busy = int(self.sums.argmax())
            if self.sums[busy] <= limit:
                return
            idle = np.argsort(self.sums, kind="stable")[:_PARTNERS].tolist()
            if not any(self._exchange(busy, other) for other in idle if other != busy):
                return

    def _exchange(self, busy: int, idle: int) -> bool:
        """
        Move an item from microbatch *busy* to *idle*, or swap it for an item of *idle*, if their
        works then differ less. Return whether an item was moved.
        """
        gives, takes = self.held[busy], self.held[idle]
        nothing = np.zeros(1, dtype=np.int64)
        works, less = (np.concatenate([self._works[items], nothing]) for items in (gives, takes))
        sizes, room = (np.concatenate([self._costs[items], nothing]) for items in (gives, takes))
        gap = int(self.sums[busy] - self.sums[idle])
        moved = works[:, None] - less
        longer = sizes[:, None] - room
        fits = (moved > 0) & (moved < gap)
        fits &= longer <= self._capacity - self._loads[idle]
        fits &= -longer <= self._capacity - self._loads[busy]
        if gives.size == 1:
            fits[:, -1] = False
        left = np.where(fits, np.abs(gap - 2 * moved), gap)
        given, taken = divmod(int(left.argmin()), less.size)
        if not fits[given, taken]:
            return False
        self.held[busy] = np.concatenate([np.delete(gives, given), takes[taken : taken + 1]])
        self.held[idle] = np.concatenate([takes[:taken], takes[taken + 1 :], gives[given : given + 1]])
        self.sums[[busy, idle]] += np.array([-1, 1]) * moved[given, taken]
        self._loads[[busy, idle]] += np.array([-1, 1]) * longer[given, taken]
        return True
