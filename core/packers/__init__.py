"""The packing algorithms, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import numpy as np
import scipy
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, Lengths, lengths_up_to, positive
from packplan.core.packers.balanced import balanced
from packplan.core.packers.best_fit_decreasing import best_fit_decreasing
from packplan.core.packers.bin_count import with_bin_count
from packplan.core.packers.certified import certified
from packplan.core.packers.concatenative import concatenative
from packplan.core.packers.constant_volume import constant_volume
from packplan.core.packers.first_fit_decreasing import first_fit_decreasing
from packplan.core.packers.first_fit_shuffle import first_fit_shuffle
from packplan.core.packers.modified_first_fit_decreasing import modified_first_fit_decreasing
from packplan.core.packs import Packs
from packplan.core.runs import PackingTrace, Runs
from packplan.core.work import WorkModel, checked_works

__all__ = ["ALGORITHMS", "Algorithm", "Packer", "algorithm_named", "checked_seed", "pack", "with_bin_count"]


class Packer(Protocol):
    """Puts samples into packs."""

    def __call__(
        self,
        lengths: IntArray,
        /,
        *,
        capacity: int,
        seed: int,
        works: NDArray[np.float64],
        report: Callable[[str], None],
    ) -> Packs:
        """
        Return packs in canonical order; *lengths* are from 1 to *capacity*. What takes long says
        how far it is.
        """


@attrs.frozen
class Algorithm:
    """A packing algorithm, as plans name it."""

    packer: Packer

    version: str
    """
    Another one whenever the algorithm gives other packs for some input; part of a plan's
    fingerprint.
    """

    draws: bool = False
    """Whether the packs depend on the seed."""

    weighs: bool = False
    """Whether the packs depend on the work of the samples."""


def _over_runs(plan: Callable[..., PackingTrace]) -> Packer:
    """Turn an algorithm over runs of equal length into one over samples."""

    def packer(lengths: IntArray, /, *, capacity: int, **_: Any) -> Packs:
        runs = Runs.of(lengths)
        return plan(runs, capacity=capacity).packs(lengths, runs)

    return packer


def _concatenative(lengths: IntArray, /, *, capacity: int, **_: Any) -> Packs:
    return concatenative(lengths, capacity=capacity)


def _first_fit_shuffle(lengths: IntArray, /, *, capacity: int, seed: int, **_: Any) -> Packs:
    return first_fit_shuffle(lengths, capacity=capacity, seed=seed)


def _certified(lengths: IntArray, /, *, capacity: int, seed: int, report: Callable[[str], None], **_: Any) -> Packs:
    return certified(lengths, capacity=capacity, seed=seed, report=report)


def _balanced(
    lengths: IntArray, /, *, capacity: int, works: NDArray[np.float64], report: Callable[[str], None], **_: Any
) -> Packs:
    return balanced(lengths, capacity=capacity, works=works, report=report)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "constant_volume": Algorithm(_over_runs(constant_volume), "1"),
        "best_fit_decreasing": Algorithm(_over_runs(best_fit_decreasing), "1"),
        "first_fit_decreasing": Algorithm(_over_runs(first_fit_decreasing), "1"),
        "modified_first_fit_decreasing": Algorithm(_over_runs(modified_first_fit_decreasing), "1"),
        "concatenative": Algorithm(_concatenative, "1"),
        "first_fit_shuffle": Algorithm(_first_fit_shuffle, "1", draws=True),
        "balanced": Algorithm(_balanced, "3", weighs=True),
        "certified": Algorithm(_certified, f"1, scipy {scipy.__version__}", draws=True),
    }
)
"""What `training.packing_algorithm` may name."""


def algorithm_named(name: str) -> Algorithm:
    """Return an algorithm of `ALGORITHMS`; ValueError with their names if it is none."""
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
        lengths: Tokens of each sample, each from 1 to *capacity*; a numpy array of integers is the
        fastest.

        capacity: Tokens a pack may hold, >= 1.

        algorithm: A name in `ALGORITHMS`.

        seed: For `first_fit_shuffle`, from 0 to 2**64 - 1.

        min_bin_count: Packs at least; the fullest are split where there are fewer.

        bin_count_multiple: The number of packs is made a multiple of this, likewise.

        works: Work of each sample, for `balanced`, >= 0 in any unit; None takes tokens and squares
        of lengths in the proportion of an ordinary model.

        report: Hears how far `certified` and `balanced` are; the others are done at once.

    Raises:
        InvalidLengthError: A length is not a whole number from 1 to *capacity*.

        WorkError: The works are of another number than the lengths, or one is negative or not
        finite.

        ValueError: Works are given to an algorithm whose packs do not depend on them.

        TooFewSamplesError: More packs are wanted than there are samples.

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
    weights = (
        WorkModel.estimated({}).trained().of(array) if works is None else checked_works(works, array.size, of="samples")
    )
    packs = Packs.from_lists([])
    if array.size:
        # No pack holds more than all tokens, and their sum fits 64 bits where the capacity may not.
        capacity = min(capacity, int(array.sum()))
        packs = chosen.packer(array, capacity=capacity, seed=seed, works=weights, report=report)
    return with_bin_count(packs, array, minimum=min_bin_count, multiple=bin_count_multiple)
