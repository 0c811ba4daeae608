"""
Rounds: microbatches that all workers compute at the same time, made of equal work.

Under FSDP, workers wait in every round for its busiest worker. So the time of a global batch is the
sum over the busiest microbatches of its rounds. Sequences heavier than a mean microbatch set the
level of the first rounds, whose other microbatches are filled up to it. The remaining sequences are
spread evenly over the other rounds.

Works are whole numbers, and ties go to the lower index: every process gets the same microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

import numpy as np

from packplan.core.lengths import IntArray

_TOLERANCE = 1000
"""A round is level once its busiest microbatch exceeds the mean by at most a thousandth."""

_EXCHANGES = 8
"""Limit of exchanges in a round, for each of its microbatches."""

_PARTNERS = 4
"""Idle microbatches that the busiest one of a round tries to exchange with."""


def spread(costs: IntArray, works: IntArray, *, shards: int, rounds: int, capacity: int) -> IntArray | None:
    """
    Return the microbatch of each item; None if one fits nowhere. Every *shards* neighbouring
    microbatches have about equal work.

    Args:
        costs: Positions of each item; at least as many items as microbatches.
        works: Work of each item, in whole units.
        shards: Microbatches of a round, one a worker.
        rounds: Microbatches of each worker.
        capacity: Positions of a microbatch.
    """
    fill = _Fill(costs, works, shards, rounds, capacity)
    labels = [0] * costs.size
    left = costs.size
    for item in np.lexsort((-costs, -works)).tolist():
        place = fill.add(item, must_open=left <= fill.num_empty)
        if place is None:
            return None
        labels[item] = place
        left -= 1
    return np.array(labels)


class _Pool:
    """Microbatches that take items, the one of least work first."""

    def __init__(self, places: Iterable[int], room: list[int]) -> None:
        self._room = room
        # The heap has work and microbatch. Microbatches that lacked room wait, the roomiest first,
        # for a shorter item.
        self._heap = [(0, place) for place in places]
        self._waiting: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap) + len(self._waiting)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the work and the index of each microbatch."""
        yield from self._heap
        yield from ((work, place) for _, work, place in self._waiting)

    def take(self, num: int, room: list[int]) -> _Pool:
        """Move the first *num* microbatches, which are empty, into a separate pool."""
        ordered = sorted(self._heap)
        self._heap = ordered[num:]  # what is sorted is a heap
        return _Pool([place for _, place in ordered[:num]], room)

    def add(self, size: int, work: int, *, level: int | None, must_open: bool) -> tuple[int, int] | None:
        """
        Put an item into the least loaded microbatch with room. Return the microbatch and its work
        before, or None.

        Args:
            size: Positions of the item.
            work: Work of the item.
            level: Limit of work of a microbatch; None for no limit.
            must_open: Whether only an empty microbatch may take it.
        """
        while self._waiting and -self._waiting[0][0] >= size:
            _, held, place = heappop(self._waiting)
            heappush(self._heap, (held, place))
        while self._heap:
            held, place = self._heap[0]
            if (level is not None and held + work > level) or (must_open and held):
                return None
            heappop(self._heap)
            if self._room[place] >= size:
                self._room[place] -= size
                heappush(self._heap, (held + work, place))
                return place, held
            heappush(self._waiting, (-self._room[place], held, place))
        return None


class _Fill:
    """Microbatches that take items by descending work."""

    def __init__(self, costs: IntArray, works: IntArray, shards: int, rounds: int, capacity: int) -> None:
        self._sizes, self._works = costs.tolist(), works.tolist()
        self._shards = shards
        self._left, self._left_positions = sum(self._works), sum(self._sizes)
        self._room = [capacity] * (shards * rounds)
        self._light = _Pool(range(shards * rounds), self._room)
        self._is_light_open = False
        self._levels: list[int] = []
        self._heavy: list[_Pool] = []
        self.num_empty = shards * rounds

    def add(self, item: int, *, must_open: bool) -> int | None:
        """
        Return the microbatch that takes an item, or None without room.

        Args:
            item: An item at least as heavy as all later ones.
            must_open: Whether only an empty microbatch may take it, since no more items are left
                than empty ones.
        """
        size, work = self._sizes[item], self._works[item]
        if (found := self._placed(size, work, must_open=must_open)) is None:
            return None
        place, held = found
        self.num_empty -= not held
        self._left -= work
        self._left_positions -= size
        return place

    def _placed(self, size: int, work: int, *, must_open: bool) -> tuple[int, int] | None:
        for level, pool in zip(self._levels, self._heavy, strict=True):
            if found := pool.add(size, work, level=level, must_open=must_open):
                return found
        if not self._is_light_open and len(self._light) and work > self._mean_of_light():
            # The first item of a round sets its level. The next ones fill it up to this level.
            self._levels.append(work)
            self._heavy.append(self._light.take(self._shards, self._room))
            return self._heavy[-1].add(size, work, level=work, must_open=must_open)
        if found := self._light.add(size, work, level=None, must_open=must_open):
            self._is_light_open = True
            return found
        for number, pool in enumerate(self._heavy):
            if found := pool.add(size, work, level=None, must_open=must_open):
                self._levels[number] = max(self._levels[number], found[1] + work)
                return found
        return None

    def _mean_of_light(self) -> float:
        """
        Estimate the mean work of a microbatch of the other rounds after the heavy rounds are
        filled.
        """
        density = self._left / self._left_positions
        taken = sum(
            min(level - work, self._room[place] * density)
            for level, pool in zip(self._levels, self._heavy, strict=True)
            for work, place in pool
        )
        return float(self._left - taken) / len(self._light)


def in_rounds(labels: IntArray, costs: IntArray, works: IntArray, *, shards: int, capacity: int) -> IntArray:
    """
    Assign microbatches to workers, so that those of a round have equal work and workers about equal
    sums. Microbatch k of a worker runs at the same time as microbatch k of the others.

    Args:
        labels: Microbatch of each item. The number of microbatches is a multiple of *shards*.
        costs: Positions of each item.
        works: Work of each item, in whole units.
        shards: Workers.
        capacity: Positions of a microbatch.
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
    # The least even rounds come first, so that the others compensate for them.
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
        """Exchange items of the busiest microbatch until it is level, or nothing helps."""
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
        Exchange an item for another or for none if the two become more even; return whether they
        did.
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
