"""
Packing algorithms by name.

Its entry in `ALGORITHMS` has the module of its function, which is loaded when it first packs, and
lists its further arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal

import attrs
import numpy as np
import scipy
from numpy.typing import NDArray

from packplan.core.length_counts import LengthCounts
from packplan.core.lengths import IntArray, Lengths, checked_works, lengths_up_to, whole_number
from packplan.core.packers.bin_count import with_bin_count
from packplan.core.packs import Packs


@attrs.frozen
class Algorithm:
    """
    Version and arguments of a packing algorithm.

    The function takes lengths, each from 1 to `capacity`, and returns packs in canonical order.
    """

    module: str
    """Module of this package whose function has the name of the algorithm."""

    version: str
    """
    Version of the packs, part of a plan's fingerprint. It changes if any input gives other packs.
    """

    counts_lengths: bool = False
    """Whether the function takes `LengthCounts` and returns a `PackingTrace`, instead of packs."""

    uses_seed: bool = False
    """Whether the packs depend on the seed. The function then takes `seed`."""

    uses_works: bool = False
    """Whether the packs depend on the work of the samples. The function then takes `works`."""

    uses_report: bool = False
    """Whether it takes long and reports progress. The function then takes `report`."""

    keeps_order: bool = False
    """Whether packs keep the order of the data, so that no draw gives others of equal quality."""


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "auto": Algorithm("fewest", "3", counts_lengths=True),
        "constant_volume": Algorithm("decreasing", "1", counts_lengths=True),
        "best_fit_decreasing": Algorithm("decreasing", "1", counts_lengths=True),
        "first_fit_decreasing": Algorithm("decreasing", "1", counts_lengths=True),
        "modified_first_fit_decreasing": Algorithm("decreasing", "1", counts_lengths=True),
        "concatenative": Algorithm("in_order", "1", keeps_order=True),
        "first_fit_shuffle": Algorithm("in_order", "1", uses_seed=True),
        "balanced": Algorithm("balanced", "7", uses_works=True, uses_report=True),
        "certified": Algorithm("fewest", f"3, scipy {scipy.__version__}", uses_seed=True, uses_report=True),
    }
)
"""Algorithms that `pack` and `PlanPolicy` may name."""


REDRAW_VERSION = "1"
"""Version of the packs of `redraw`, part of a plan's fingerprint, as an algorithm's is."""

Level = Literal["groups", "order", "equal lengths"]
"""
How packs were drawn: from random groups, from a random order in which the algorithm starts, or by
exchanging samples of equal length alone.
"""


@attrs.frozen
class Redrawn:
    """Packs of one draw."""

    packs: Packs
    """Packs of all samples, in canonical order."""

    level: Level
    """Strongest draw that needed few enough packs."""


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm *name*; ValueError with all names if there is none."""
    if name not in ALGORITHMS:
        message = f"algorithm is {name!r}, but has to be one of {', '.join(ALGORITHMS)}"
        raise ValueError(message)
    return ALGORITHMS[name]


def load_function(name: str) -> Callable[..., Any]:
    """Return the function of the algorithm *name*, whose module is loaded here."""
    function: Callable[..., Any] = getattr(import_module(f"{__name__}.{ALGORITHMS[name].module}"), name)
    return function


def checked_seed(seed: int) -> int:
    """Return *seed* if it is a whole number from 0 to 2**64 - 1; ValueError otherwise."""
    return whole_number("seed", seed, least=0, most=2**64 - 1)


def works_for(algorithm: str, works: Any, num: int) -> NDArray[np.float64] | None:
    """
    Return the works of samples as float64, or None as it is.

    Args:
        algorithm: Name of the algorithm that packs them.
        works: Work of each sample, >= 0 in any unit, or None.
        num: Number of samples.

    Raises:
        ArgumentError: The number of works differs, or one is negative or not finite.
        ValueError: The packs of the algorithm do not depend on works.
    """
    if works is None:
        return None
    if not ALGORITHMS[algorithm].uses_works:
        message = f"works do not change the packs of {algorithm}: take algorithm='balanced', or give none"
        raise ValueError(message)
    return checked_works(works, num, of="samples")


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
        ValueError: Works are given to an algorithm whose packs do not depend on them. More packs
            are wanted than there are samples.

    >>> pack([60, 20, 50, 30, 40, 40], capacity=80).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    capacity = whole_number("capacity", capacity)
    min_bin_count = whole_number("min_bin_count", min_bin_count)
    bin_count_multiple = whole_number("bin_count_multiple", bin_count_multiple)
    seed = checked_seed(seed)
    chosen = find_algorithm(algorithm)
    array = lengths_up_to(lengths, capacity=capacity)
    weights = works_for(algorithm, works, array.size)
    needs: dict[str, Any] = {}
    if chosen.uses_seed:
        needs["seed"] = seed
    if chosen.uses_works:
        needs["works"] = weights
    if chosen.uses_report:
        needs["report"] = report
    packs = Packs.from_lists([])
    if array.size:
        # No pack holds more than all tokens. Their sum fits 64 bits, which the capacity may not.
        packs = _call_packer(array, algorithm, capacity=min(capacity, int(array.sum())), **needs)
    return with_bin_count(packs, array, minimum=min_bin_count, multiple=bin_count_multiple)


def redraw(
    lengths: Lengths,
    *,
    capacity: int,
    algorithm: str = "constant_volume",
    seed: int = 0,
    epoch: int,
    works: NDArray[np.number] | Sequence[float] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Redrawn:
    """
    Draw other packs than `pack` returns, of equal quality: at most one pack in 200 more.

    They depend on the arguments alone. Two samples share a pack in few of the epochs, as far as
    their lengths allow.

    Args:
        lengths: Tokens of each sample, as for `pack`.
        capacity: Tokens a pack may hold, >= 1.
        algorithm: Name of an algorithm that does not keep the order of the data.
        seed: Seed of all epochs, from 0 to 2**64 - 1.
        epoch: Number of the draw, >= 0.
        works: Work of each sample, as for `pack`.
        report: Called with a progress message, by `certified` and `balanced`.

    Raises:
        ArgumentError: As `pack` does.
        ValueError: Works are given to an algorithm whose packs do not depend on them, or the
            algorithm keeps the order of the data.
    """
    if find_algorithm(algorithm).keeps_order:
        message = f"{algorithm} keeps the order of the data, so no draw has other packs: take another algorithm"
        raise ValueError(message)
    capacity, seed = whole_number("capacity", capacity), checked_seed(seed)
    epoch = whole_number("epoch", epoch, least=0)
    array = lengths_up_to(lengths, capacity=capacity)
    weights = works_for(algorithm, works, array.size)
    if not array.size:
        return Redrawn(Packs.from_lists([]), "equal lengths")
    draw: Callable[..., Redrawn] = import_module(f"{__name__}.drawing").draw
    return draw(
        array, capacity=min(capacity, int(array.sum())), algorithm=algorithm, seed=seed, epoch=epoch, works=weights,
        report=report,
    )  # fmt: skip


def _call_packer(lengths: IntArray, algorithm: str, **needs: Any) -> Packs:
    """Return the packs of an algorithm's function, given what it *needs*."""
    function = load_function(algorithm)
    tally = LengthCounts.from_lengths(lengths) if ALGORITHMS[algorithm].counts_lengths else None
    packs: Packs = function(lengths, **needs) if tally is None else function(tally, **needs).packs(lengths, tally)
    return packs
