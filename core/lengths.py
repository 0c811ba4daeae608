"""Lengths: what every packer takes, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidLengthError

Lengths = Sequence[int] | NDArray[np.integer]

IntArray = NDArray[np.int64]


def as_lengths(lengths: Lengths) -> IntArray:
    """
    Return *lengths* as a one-dimensional int64 array of tokens, each >= 1.

    Raises:
        InvalidLengthError: The first value that is not a positive whole number, with its index.

    >>> as_lengths([3, 1, 2]).tolist()
    [3, 1, 2]
    """
    if isinstance(lengths, np.ndarray):
        array = lengths
        if array.ndim != 1:
            raise InvalidLengthError(0, f"array of shape {array.shape}", "lengths are one-dimensional")
        if array.dtype.kind not in "iu":
            _raise_first_bad(array.tolist())
    else:
        _raise_first_bad(lengths)
        try:
            array = np.array(lengths, dtype=np.int64)
        except OverflowError:
            index = next(i for i, n in enumerate(lengths) if n >= 2**63)
            raise InvalidLengthError(index, lengths[index], "a length is below 2**63") from None
    if array.size and array.dtype.kind == "u" and int(array.max()) >= 2**63:
        index = int(array.argmax())
        raise InvalidLengthError(index, int(array[index]), "a length is below 2**63")
    checked: IntArray = array.astype(np.int64, copy=False)
    if checked.size and int(checked.min()) < 1:
        index = int(np.argmax(checked < 1))
        raise InvalidLengthError(index, int(checked[index]), "a length is at least 1 token")
    return checked


def _raise_first_bad(values: Sequence[object]) -> None:
    for index, value in enumerate(values):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
            raise InvalidLengthError(index, value, "a length is a whole number of tokens")


def positive(name: str, value: int) -> int:
    """Return *value* if it is a whole number >= 1; ValueError naming it otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        message = f"{name} is {value!r}, but has to be a whole number of at least 1"
        raise ValueError(message)
    return int(value)
