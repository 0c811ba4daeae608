"""
Packing algorithms, by name.

To add an algorithm, write a function with its name in a module of this package, and an entry of
`ALGORITHMS` that names the module. The function takes lengths (each from 1 to `capacity`) and, by
keyword, `capacity` and the arguments that the entry lists in `takes`. The function returns `Packs`
that ascend by their first index. If the entry sets `counts_lengths`, the function takes
`LengthCounts` and returns a `PackingTrace` instead. `tests.laws.test_packers` tests all entries by
the same laws.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from importlib import import_module
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import scipy
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, counted
from packplan.core.length_counts import LengthCounts
from packplan.core.lengths import IntArray, Lengths, as_lengths_up_to, as_whole_number, as_works
from packplan.core.packs import Packs, concatenate, sort_by_first_index


@attrs.frozen
class Algorithm:
    """Entry of a packing algorithm: its module, the version of its packs, and its inputs."""

    module: str
    """
    Module of this package that has a function with the algorithm's name; imported at first use.
    """

    version: str
    """
    Version of the packs, which is part of a plan's fingerprint. Raise it if the packs change for
    any input.
    """

    counts_lengths: bool = False
    """
    Whether the function gets `LengthCounts` and returns a `PackingTrace`, instead of lengths and
    packs.
    """

    takes: tuple[str, ...] = ()
    """
    Further arguments of the function. `seed`: packs are random. `works`: packs depend on the work
    of samples. `report`: packing is slow enough to report progress.
    """

    keeps_order: bool = False
    """
    Whether packs keep the order of the data. There are then no other packs that a replanned epoch
    could draw.
    """


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "auto": Algorithm("fewest", "5", counts_lengths=True),
        "constant_volume": Algorithm("decreasing", "1", counts_lengths=True),
        "best_fit_decreasing": Algorithm("decreasing", "1", counts_lengths=True),
        "first_fit_decreasing": Algorithm("decreasing", "1", counts_lengths=True),
        "modified_first_fit_decreasing": Algorithm("decreasing", "1", counts_lengths=True),
        "concatenative": Algorithm("in_order", "1", keeps_order=True),
        "first_fit_shuffle": Algorithm("in_order", "1", takes=("seed",)),
        "balanced": Algorithm("balanced", "8", takes=("works", "report")),
        "certified": Algorithm("fewest", f"4, scipy {scipy.__version__}", takes=("seed", "report")),
    }
)
"""Name of a packing algorithm, for `pack` and `PlanPolicy` -> its entry."""


def find_algorithm(name: str) -> Algorithm:
    """Return the entry of the algorithm *name*, or raise an ArgumentError that lists all names."""
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ArgumentError("argument", f"algorithm is {name!r}, but has to be one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def load_packer(name: str) -> Callable[..., Any]:
    """Return the function of the algorithm *name*."""
    function: Callable[..., Any] = getattr(import_module(f"{__name__}.{ALGORITHMS[name].module}"), name)
    return function


def as_seed(seed: int) -> int:
    """Return *seed*. Raise an ArgumentError if it is not a whole number from 0 to 2**64 - 1."""
    return as_whole_number("seed", seed, least=0, most=2**64 - 1)


def check_algorithm_works(algorithm: str, works: Any, num: int) -> NDArray[np.float64] | None:
    """
    Check the works that a caller passes to an algorithm, and return them as float64, or None.

    Args:
        algorithm: Name of the algorithm that packs the samples.
        works: Work of each sample, >= 0 in any unit, or None.
        num: Number of samples.

    Raises:
        ArgumentError: The number of works is wrong, or a work is negative or not finite.
        ArgumentError: *works* is passed, but the algorithm's packs do not depend on work.
    """
    if works is None:
        return None
    if "works" not in ALGORITHMS[algorithm].takes:
        message = f"works do not change the packs of {algorithm}: use algorithm='balanced', or pass no works"
        raise ArgumentError("argument", message)
    return as_works(works, num, items="samples")


def pack(
    lengths: Lengths,
    *,
    capacity: int,
    algorithm: str = "constant_volume",
    seed: int = 0,
    min_bin_count: int = 1,
    bin_count_multiple: int = 1,
    works: NDArray[np.number] | Sequence[float] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Packs:
    """
    Group samples into packs of at most *capacity* tokens.

    Indices ascend in a pack, and packs ascend by their first index.

    Args:
        lengths: Number of tokens of each sample, each from 1 to *capacity*. A numpy array of
            integers is fastest.
        capacity: Maximum number of tokens in a pack, >= 1.
        algorithm: Name of an algorithm, a key of `ALGORITHMS`.
        seed: Seed of random algorithms, from 0 to 2**64 - 1.
        min_bin_count: Minimum number of packs. If there are fewer, the fullest packs are split.
        bin_count_multiple: Packs are split until their number is a multiple of this number.
        works: Work of each sample, >= 0 in any unit, for `balanced`. None estimates the work from
            the length and the squared length, in the proportion of a typical model.
        report: Called with a progress message, by `certified` and `balanced`.

    Raises:
        ArgumentError: There is no such algorithm, or a number is out of range.
        ArgumentError: A length is not a whole number from 1 to *capacity*.
        ArgumentError: The numbers of works and lengths differ, or a work is negative or not finite.
        ArgumentError: *works* is passed for an algorithm whose packs do not depend on work.
        ArgumentError: *min_bin_count* or *bin_count_multiple* needs more packs than there are
            samples.

    >>> pack([60, 20, 50, 30, 40, 40], capacity=80).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    capacity = as_whole_number("capacity", capacity)
    min_bin_count = as_whole_number("min_bin_count", min_bin_count)
    bin_count_multiple = as_whole_number("bin_count_multiple", bin_count_multiple)
    seed = as_seed(seed)
    chosen = find_algorithm(algorithm)
    array = as_lengths_up_to(lengths, capacity=capacity)
    given = {"seed": seed, "works": check_algorithm_works(algorithm, works, array.size), "report": report}
    packs = Packs.from_lists([])
    if array.size:
        # No pack has more than all tokens, whose sum fits into 64 bits; the capacity may not.
        options = {name: given[name] for name in chosen.takes} | {"capacity": min(capacity, int(array.sum()))}
        tally = LengthCounts.from_lengths(array) if chosen.counts_lengths else None
        found = load_packer(algorithm)(array if tally is None else tally, **options)
        packs = found if tally is None else found.packs(array, tally)
    return split_to_bin_count(packs, array, minimum=min_bin_count, multiple=bin_count_multiple)


def split_to_bin_count(packs: Packs, lengths: IntArray, *, minimum: int, multiple: int) -> Packs:
    """
    Split packs until their number is at least *minimum* and a multiple of *multiple*.

    In each step, the fullest pack that has several samples is split into two packs of about equal
    load. Each sample of the split pack, longest first, goes to the emptier of the two packs.

    Args:
        packs: Packs, ordered by first sample.
        lengths: Number of tokens of each sample.
        minimum: Minimum number of packs, >= 1. If *minimum* is 1 and there are no samples, the
            result has no packs.
        multiple: Number that has to divide the number of packs, >= 1.

    Raises:
        ArgumentError: There would have to be more packs than there are samples.
    """
    wanted = -(-max(len(packs), minimum if minimum > 1 else 0) // multiple) * multiple
    if wanted == len(packs):
        return packs
    if wanted > packs.num_samples:
        fact = (
            f"{counted(packs.num_samples, 'sample')} cannot fill {counted(wanted, 'pack')} (min_bin_count {minimum:,}, "
            f"bin_count_multiple {multiple:,}), since no pack may be empty"
        )
        raise ArgumentError("too_few_samples", fact, {"num_samples": packs.num_samples, "num_packs": wanted})
    sizes, loads = packs.sizes().tolist(), packs.loads(lengths).tolist()
    heap = [(-loads[place], place) for place, size in enumerate(sizes) if size > 1]
    heapify(heap)
    split: dict[int, list[int]] = {}  # pack -> its samples now, for packs that were split
    for new in range(len(packs), wanted):
        _, place = heappop(heap)
        members = split.pop(place) if place in split else packs[place]
        for position, half in zip((place, new), _split_in_halves(members, lengths), strict=True):
            split[position] = half
            if len(half) > 1:
                heappush(heap, (-sum(int(lengths[i]) for i in half), position))
    kept = packs.take(np.array([place for place in range(len(packs)) if place not in split], dtype=np.int64))
    return sort_by_first_index(concatenate([kept, Packs.from_lists(split.values())]))


def _split_in_halves(members: list[int], lengths: IntArray) -> tuple[list[int], list[int]]:
    """Split a pack into two non-empty packs of about equal load, with ascending indices."""
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in sorted(members, key=lambda i: (-int(lengths[i]), i)):
        emptier = int(loads[1] < loads[0])
        halves[emptier].append(index)
        loads[emptier] += int(lengths[index])
    return sorted(halves[0]), sorted(halves[1])
