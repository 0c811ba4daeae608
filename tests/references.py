"""The algorithms item by item, as their papers say: what the fast ones are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packplan.core.lengths import IntArray

Lengths = Sequence[int] | IntArray


def longest_first(lengths: Lengths) -> list[int]:
    """Sample indices, longest first, equal ones in input order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def fit(lengths: Lengths, capacity: int, order: Sequence[int], prefer: Callable[[int], int]) -> list[list[int]]:
    """
    Put each sample into the bin that *prefer* ranks first among those that it fits, else into a new
    one.
    """
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


def next_fit(lengths: Lengths, capacity: int) -> list[list[int]]:
    """A new bin where the next does not fit the last."""
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        if not bins or sum(lengths[i] for i in bins[-1]) + length > capacity:
            bins.append([])
        bins[-1].append(index)
    return bins


def modified_first_fit_decreasing(lengths: Lengths, capacity: int) -> list[list[int]]:
    """
    Johnson and Garey's phases on single samples; bins with equal room in the order they were
    opened.
    """
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


def fewest_in_order(lengths: Sequence[int], capacity: int, most: int) -> int:
    """
    The number of bins of the best packing in which no item moves further than *most*, by
    exhaustion. The least number of bins and load is kept for each set of packed items.
    """
    states = {frozenset[int](): (0, capacity)}
    for position in range(len(lengths)):
        following: dict[frozenset[int], tuple[int, int]] = {}
        for packed, (num, load) in states.items():
            left = [index for index in range(position + most + 1) if index < len(lengths) and index not in packed]
            for index in left[:1] if left[0] == position - most else left:
                fits = load + lengths[index] <= capacity
                state = (num, load + lengths[index]) if fits else (num + 1, lengths[index])
                reached = packed | {index}
                following[reached] = min(state, following.get(reached, state))
        states = following
    return states[frozenset(range(len(lengths)))][0]
