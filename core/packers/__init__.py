"""
Packing algorithms by name.

The algorithm *name* is the function `name` of the module `core.packers.name`, which is loaded when
it first packs. Its entry in `ALGORITHMS` lists its further arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from numbers import Integral
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import scipy
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, Lengths, checked_works, lengths_up_to, positive
from packplan.core.packers.bin_count import with_bin_count
from packplan.core.packs import Packs
from packplan.core.runs import Runs

__all__ = ["ALGORITHMS", "algorithm_named", "checked_seed", "pack", "with_bin_count"]


@attrs.frozen
class Algorithm:
    """
    Version and arguments of a packing algorithm.

    The function takes lengths, each from 1 to `capacity`, and returns packs in canonical order.
    """

    version: str
    """
    Version of the packs, part of a plan's fingerprint. It changes if any input gives other packs.
    """

    over_runs: bool = False
    """Whether the function takes `Runs` and returns a `PackingTrace`, instead of packs."""

    draws: bool = False
    """Whether the packs depend on the seed. The function then takes `seed`."""

    weighs: bool = False
    """Whether the packs depend on the work of the samples. The function then takes `works`."""

    reports: bool = False
    """Whether it takes long and reports progress. The function then takes `report`."""


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "constant_volume": Algorithm("1", over_runs=True),
        "best_fit_decreasing": Algorithm("1", over_runs=True),
        "first_fit_decreasing": Algorithm("1", over_runs=True),
        "modified_first_fit_decreasing": Algorithm("1", over_runs=True),
        "concatenative": Algorithm("1"),
        "first_fit_shuffle": Algorithm("1", draws=True),
        "balanced": Algorithm("3", weighs=True, reports=True),
        "certified": Algorithm(f"1, scipy {scipy.__version__}", draws=True, reports=True),
    }
)
"""Algorithms that `pack` and `PlanPolicy` may name."""


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm *name*; ValueError with all names if there is none."""
    if name not in ALGORITHMS:
        message = f"algorithm is {name!r}, but has to be one of {', '.join(ALGORITHMS)}"
        raise ValueError(message)
    return ALGORITHMS[name]


def checked_seed(seed: int) -> int:
    """Return *seed* if it is a whole number from 0 to 2**64 - 1; ValueError otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**64:
        message = f"seed is {seed!r}, but has to be a whole number from 0 to 2**64 - 1"
        raise ValueError(message)
    return int(seed)


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
    Group samples into packs of at most *capacity* tokens, in canonical order.

    Args:
        lengths: Tokens of each sample, each from 1 to *capacity*. A numpy array of integers is
            fastest.
        capacity: Tokens a pack may hold, >= 1.
        algorithm: A name in `ALGORITHMS`.
        seed: Seed of random algorithms, from 0 to 2**64 - 1.
        min_bin_count: Least number of packs. If there are fewer, the fullest are split.
        bin_count_multiple: The number of packs becomes a multiple of this, in the same way.
        works: Work of each sample, >= 0 in any unit, for `balanced`. None takes tokens and squares
            of lengths in the proportion of an ordinary model.
        report: Called with a progress message, by `certified` and `balanced`.

    Raises:
        ArgumentError: A length is not a whole number from 1 to *capacity*.
        ArgumentError: The number of works differs from that of lengths, or one is negative or not
            finite.
        ValueError: Works are given to an algorithm whose packs do not depend on them.
            More packs are wanted than there are samples.

    >>> pack([60, 20, 50, 30, 40, 40], capacity=80).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    capacity = positive("capacity", capacity)
    min_bin_count = positive("min_bin_count", min_bin_count)
    bin_count_multiple = positive("bin_count_multiple", bin_count_multiple)
    seed = checked_seed(seed)
    chosen = algorithm_named(algorithm)
    array = lengths_up_to(lengths, capacity=capacity)
    if works is not None and not chosen.weighs:
        message = f"works do not change the packs of {algorithm}: take algorithm='balanced', or give none"
        raise ValueError(message)
    needs: dict[str, Any] = {}
    if chosen.draws:
        needs["seed"] = seed
    if chosen.weighs:
        needs["works"] = None if works is None else checked_works(works, array.size, of="samples")
    if chosen.reports:
        needs["report"] = report
    packs = Packs.from_lists([])
    if array.size:
        # No pack holds more than all tokens. Their sum fits 64 bits, which the capacity may not.
        packs = _packed(array, algorithm, capacity=min(capacity, int(array.sum())), **needs)
    return with_bin_count(packs, array, minimum=min_bin_count, multiple=bin_count_multiple)


def _packed(lengths: IntArray, algorithm: str, **needs: Any) -> Packs:
    """Return the packs of an algorithm's function, given what it *needs*."""
    function: Callable[..., Any] = getattr(import_module(f"{__name__}.{algorithm}"), algorithm)
    runs = Runs.from_lengths(lengths) if ALGORITHMS[algorithm].over_runs else None
    packs: Packs = function(lengths, **needs) if runs is None else function(runs, **needs).packs(lengths, runs)
    return packs
