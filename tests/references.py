"""The algorithms item by item, as their papers say: what the fast ones are compared with."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import binpacking
import numpy as np

from packplan.core.lengths import IntArray

Lengths = Sequence[int] | IntArray


def longest_first(lengths: Lengths) -> list[int]:
    """Sample indices, longest first, equal ones in input order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def fit(lengths: Lengths, capacity: int, order: Sequence[int], prefer: Callable[[int], int]) -> list[list[int]]:
    """Put each sample into the fitting bin that *prefer* ranks first, else into a new one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        fitting = [number for number, left in enumerate(room) if left >= lengths[index]]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            room.append(capacity)
        chosen = min(fitting, key=lambda number: prefer(room[number]))
        bins[chosen].append(index)
        room[chosen] -= lengths[index]
    return sorted(sorted(members) for members in bins)


def best_fit_decreasing(lengths: Lengths, capacity: int) -> list[list[int]]:
    """The least room."""
    return fit(lengths, capacity, longest_first(lengths), lambda room: room)


def first_fit_decreasing(lengths: Lengths, capacity: int) -> list[list[int]]:
    """The first."""
    return fit(lengths, capacity, longest_first(lengths), lambda _: 0)


def constant_volume(lengths: Lengths, capacity: int) -> list[list[int]]:
    """The library's, by its `weight_pos`."""
    bins = binpacking.to_constant_volume(list(enumerate(lengths)), capacity, weight_pos=1)
    return sorted(sorted(index for index, _ in members) for members in bins if members)


def first_fit_shuffle(lengths: Lengths, capacity: int, seed: int) -> list[list[int]]:
    """The first, in the order of PCG64's raw stream."""
    keys = list(np.random.PCG64(seed).random_raw(len(lengths)))
    return fit(lengths, capacity, sorted(range(len(lengths)), key=keys.__getitem__), lambda _: 0)


def concatenative(lengths: Lengths, capacity: int) -> list[list[int]]:
    """Next fit: a new bin where the next does not fit the last."""
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        if not bins or sum(lengths[i] for i in bins[-1]) + length > capacity:
            bins.append([])
        bins[-1].append(index)
    return bins


def modified_first_fit_decreasing(lengths: Lengths, capacity: int) -> list[list[int]]:
    """Johnson and Garey's phases on single samples; equal room in the order of opening."""
    left = longest_first(lengths)
    bins = [[index] for index in left if lengths[index] * 2 > capacity]
    left = left[len(bins) :]

    def room(members: list[int]) -> int:
        return capacity - sum(int(lengths[i]) for i in members)

    def add(members: list[int], index: int) -> None:
        members.append(index)
        left.remove(index)

    def between(low: int, high: int) -> list[int]:
        return [i for i in left if lengths[i] * low > capacity and lengths[i] * high <= capacity]

    for members in bins:
        fitting = [i for i in between(3, 2) if lengths[i] <= room(members)]
        if fitting:
            add(members, fitting[0])
    for members in sorted((b for b in bins if len(b) == 1), key=room, reverse=True):
        small = between(6, 3)
        if len(small) < 2 or lengths[small[-1]] + lengths[small[-2]] > room(members):
            continue
        smallest = next(i for i in small if lengths[i] == lengths[small[-1]])
        add(members, smallest)
        add(members, next(i for i in between(6, 3) if lengths[i] <= room(members)))
    for members in bins:
        while fitting := [i for i in left if lengths[i] <= room(members)]:
            add(members, fitting[0])
    rest = fit(lengths, capacity, left, lambda _: 0)
    return sorted(sorted(members) for members in bins + rest)


def fewest(lengths: Sequence[int], capacity: int, loads: tuple[int, ...] = ()) -> int:
    """The number of bins of the best packing, by exhaustion."""
    if not lengths:
        return len(loads)
    head, rest = lengths[0], lengths[1:]
    return min(
        fewest(rest, capacity, (*loads[:place], sum(loads[place : place + 1]) + head, *loads[place + 1 :]))
        for place in range(len(loads) + 1)
        if sum(loads[place : place + 1]) + head <= capacity
    )


def spread_slowly(sizes: list[int], works: list[int], *, shards: int, num: int, capacity: int) -> list[int] | None:
    """Return each sequence's microbatch as `core.shard.rounds` says it; None without room."""
    pools, levels = [list(range(num))], [0]  # the light microbatches, then the heavy rounds
    room, held, labels, is_open = [capacity] * num, [0] * num, [0] * len(sizes), False
    order = sorted(range(len(sizes)), key=lambda item: (-works[item], -sizes[item], item))
    for number, item in enumerate(order):
        size, work, left = sizes[item], works[item], order[number:]

        def least(pool: list[int], level: float = math.inf) -> int | None:
            places = [(held[place], place) for place in pool if room[place] >= size]  # noqa: B023
            load, place = min(places, default=(math.inf, -1))
            must_open = len(left) <= held.count(0) and load  # noqa: B023
            return None if place < 0 or load + work > level or must_open else place  # noqa: B023

        place = next((found for pool, level in zip(pools[1:], levels[1:], strict=True)
                      if (found := least(pool, level)) is not None), None)  # fmt: skip
        total = sum(works[one] for one in left)
        density = total / sum(sizes[one] for one in left)
        taken = sum(min(level - held[one], room[one] * density)
                    for pool, level in zip(pools[1:], levels[1:], strict=True) for one in pool)  # fmt: skip
        if place is None and not is_open and pools[0] and work > (total - taken) / len(pools[0]):
            pools, levels = [pools[0][shards:], *pools[1:], pools[0][:shards]], [*levels, work]
            place = pools[-1][0]
        for index, pool in enumerate(pools if place is None else []):
            if place is None and (found := least(pool)) is not None:
                place, is_open = found, is_open or not index
                levels[index] = max(levels[index], held[found] + work)
        if place is None:
            return None
        room[place], held[place], labels[item] = room[place] - size, held[place] + work, place
    return labels


def changed(value: Any) -> Iterator[Any]:
    """Yield a document with one of its numbers, texts or keys changed, or a list cut, at a time."""
    if isinstance(value, dict):
        for key, held in value.items():
            yield {**{name: one for name, one in value.items() if name != key}, f"{key}x": held}
            yield from ({**value, key: other} for other in changed(held))
    elif isinstance(value, list):
        if value:
            yield value[:-1]
        for number, held in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in changed(held))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, -1, float(value), str(value))
    else:
        yield f"{value}0"
