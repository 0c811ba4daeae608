"""The packing algorithms, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import attrs
import numpy as np

from core.errors import InvalidLengthError
from core.lengths import IntArray, Lengths, as_lengths, positive
from core.packers.constant_volume import constant_volume
from core.packs import Packs


class Packer(Protocol):
    """Puts samples into bins."""

    def __call__(self, lengths: IntArray, /, *, capacity: int) -> IntArray:
        """Return the bin of each sample; shape (num_samples,)."""


@attrs.frozen
class Algorithm:
    """A packing algorithm, as plans name it."""

    packer: Packer

    version: int
    """Rises whenever the algorithm gives other packs for some input; part of a plan's fingerprint."""


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({"constant_volume": Algorithm(constant_volume, 1)})
"""What `training.packing_algorithm` may name."""


def pack(lengths: Lengths, *, capacity: int, algorithm: str = "constant_volume") -> Packs:
    """
    Group samples into packs of at most *capacity* tokens, in canonical order.

    Args:
        lengths: Tokens of each sample, each from 1 to *capacity*.

        capacity: Tokens a pack may hold, >= 1.

        algorithm: A name in `ALGORITHMS`.

    Raises:
        InvalidLengthError: A length is not a whole number from 1 to *capacity*.

    >>> pack([60, 20, 50, 30, 40, 40], capacity=80).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    capacity = positive("capacity", capacity)
    array = as_lengths(lengths)
    if array.size and int(array.max()) > capacity:
        index = int(np.argmax(array > capacity))
        raise InvalidLengthError(index, int(array[index]), f"a pack holds {capacity:,} tokens")
    if algorithm not in ALGORITHMS:
        message = f"algorithm is {algorithm!r}, but has to be one of {', '.join(ALGORITHMS)}"
        raise ValueError(message)
    bins = ALGORITHMS[algorithm].packer(array, capacity=capacity)
    return Packs.from_assignment(np.arange(array.size), bins)
