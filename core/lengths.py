"""Checks and conversions of the lengths, works and other numbers that callers pass."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import isnan
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, counted

Lengths = Sequence[int] | NDArray[np.integer]
"""
A list or an array of whole numbers, or an object whose slices are lists of whole numbers. An
example of such an object is a column of a `datasets` data set.
"""

IntArray = NDArray[np.int64]

MOST_RANKS = 100_000
"""Maximum number of ranks or workers, limited because arrays have an element for each of them."""


def as_lengths(lengths: Lengths, *, least: int = 1) -> IntArray:
    """
    Return *lengths* as a one-dimensional int64 array of tokens.

    Args:
        lengths: Number of tokens of each sample.
        least: Lowest allowed length: 1, or 0 if a length of 0 marks a record that is not a sample.

    Raises:
        ArgumentError: A value is not a whole number of at least *least*, or the total exceeds 64
            bits. The message has the index of a value at fault.
        ArgumentError: *lengths* is not a sequence.

    >>> as_lengths([3, 1, 2]).tolist()
    [3, 1, 2]
    """
    if isinstance(lengths, np.ma.MaskedArray) and lengths.mask.any():
        index = int(np.argmax(np.ma.getmaskarray(lengths)))
        raise _bad_length_error(index, "masked", "a length has to be a whole number of tokens")
    array = np.asarray(lengths) if isinstance(lengths, np.ndarray) else _convert_lengths(lengths)
    if array.ndim != 1:
        message = f"lengths have the shape {array.shape}, but a plan needs a flat list: one length for each sample"
        raise ArgumentError("argument", message)
    if array.dtype.kind == "O":
        array = _convert_lengths(array.tolist())
    if array.dtype.kind not in "iu":
        _raise_first_bad(list(array) if array.dtype.kind in "mM" else array.tolist())  # whose list may be integers
    if array.size and array.dtype.kind == "u" and int(array.max()) >= 2**63:
        index = int(array.argmax())
        raise _bad_length_error(index, int(array[index]), "a length has to be below 2**63")
    checked: IntArray = array.astype(np.int64, copy=False)
    if checked.size and int(checked.min()) < least:
        index = int(np.argmax(checked < least))
        raise _bad_length_error(index, int(checked[index]), f"a length has to be at least {counted(least, 'token')}")
    if checked.size and int(checked.max()) * checked.size >= 2**63:
        _raise_where_total_overflows(checked)
    return checked


def frozen_array(values: Any) -> IntArray:
    """Return whole numbers as a read-only int64 array; an array that can be written is copied."""
    array = np.asarray(values, dtype=np.int64)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def as_lengths_up_to(lengths: Lengths, *, capacity: int) -> IntArray:
    """Check lengths as `as_lengths` does. Raise an ArgumentError if one exceeds *capacity*."""
    array = as_lengths(lengths)
    if array.size and int(array.max()) > capacity:
        index = int(np.argmax(array > capacity))
        raise _bad_length_error(
            index,
            int(array[index]),
            f"a pack holds at most {counted(capacity, 'token')}; pp.plan packs longer ones alone",
        )
    return array


def _bad_length_error(index: int, value: object, reason: str) -> ArgumentError:
    return ArgumentError("length", f"length {index} is {value!r:.80}: {reason}", {"index": index, "value": value})


def _convert_lengths(values: Sequence[int]) -> IntArray:
    is_table = hasattr(values, "column_names") or hasattr(values, "columns")
    if is_table or isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__getitem__"):
        advice = ""
        if is_table:
            advice = ": give its column of lengths, such as data['length']"
        elif isinstance(values, Iterator):
            advice = ": give list(…) of it"
        message = f"lengths have to be a list or an array of whole numbers, not {type(values).__name__}{advice}"
        raise ArgumentError("argument", message)
    if not isinstance(values, (list, tuple, range)) and not hasattr(values, "__array__"):
        values = _read_in_one_slice(values)
    if hasattr(values, "__array__"):
        return _as_array(values)
    # One pass over the types is cheap if all are plain ints. numpy would convert a boolean to int.
    if not set(map(type, values)) <= {int}:
        _raise_first_bad(values)
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        index = next(i for i, n in enumerate(values) if not -(2**63) <= n < 2**63)
        reason = "a length has to be below 2**63" if values[index] > 0 else "a length has to be at least 1 token"
        raise _bad_length_error(index, values[index], reason) from None


def _as_array(values: Any) -> NDArray[Any]:
    """
    Return *values* as an array. A tensor that numpy cannot read, such as one that requires
    gradients, is first converted to a list.
    """
    try:
        return np.asarray(values)
    except (RuntimeError, TypeError):
        if not hasattr(values, "tolist"):
            raise
    try:
        return np.asarray(values.tolist())
    except RuntimeError as error:  # of a tensor on the device meta
        message = f"this {type(values).__name__} has no readable numbers: {error}"
        raise ArgumentError("argument", message) from error


def _read_in_one_slice(values: Sequence[int]) -> Sequence[int]:
    """
    Read a lazy column by one slice, because reading a million values one by one takes seconds.
    """
    try:
        return values[:]
    except TypeError:  # a deque has no slices
        return list(values)


def _raise_where_total_overflows(lengths: IntArray) -> None:
    total = 0
    for index, length in enumerate(lengths.tolist()):
        total += length
        if total >= 2**63:
            raise _bad_length_error(index, length, "with this length, the total reaches 2**63 tokens")


def _raise_first_bad(values: Sequence[object]) -> None:
    # pandas and Arrow return a column of whole numbers with a gap as floats. Then the gap is the
    # fault, not the first value.
    missing = next((index for index, value in enumerate(values) if isinstance(value, float) and isnan(value)), None)
    if missing is not None:
        fact = f"length {missing} is NaN: a length has to be a whole number of tokens"
        raise ArgumentError("length", fact, {"index": missing, "value": "NaN"})
    for index, value in enumerate(values):
        if isinstance(value, (bool, np.bool_, np.timedelta64)) or not isinstance(value, Integral):
            reason = "a length has to be a whole number of tokens"
            if isinstance(value, (Mapping, list, tuple, np.ndarray)):
                reason += ", such as len(row['input_ids'])"
            elif isinstance(value, float) and value.is_integer():
                reason += ": convert the lengths to int"
            raise _bad_length_error(index, value, reason)


def require_bools(**flags: object) -> None:
    """Raise an ArgumentError, which names the argument, if a flag is not True or False."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ArgumentError("argument", f"{name} is {value!r:.80}, but has to be True or False")


def squares(lengths: IntArray) -> NDArray[np.float64]:
    """Return the squares of *lengths* as float64, since the squares may exceed 64-bit integers."""
    return lengths.astype(np.float64) ** 2


def as_whole_number(name: str, value: int, *, least: int = 1, most: int = 2**63 - 1) -> int:
    """
    Return *value* if it is a whole number within bounds.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        least: Lowest allowed value.
        most: Highest allowed value.

    Raises:
        ArgumentError: The value is not a whole number, or is out of bounds. The message contains
            *name*.

    >>> as_whole_number("packing_length", 4096)
    4096
    """
    whole = isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))
    if not whole or not least <= value <= most:
        bound = f"at most {most:,}" if whole and value > most else f"at least {least}"
        message = f"{name} is {value!r}, but has to be a whole number of {bound}"
        if whole and value == int(1e30):
            message += ": this value is int(1e30), the model_max_length of a tokenizer that sets no limit"
        raise ArgumentError("argument", message)
    return int(value)


def round_up_lengths(lengths: IntArray, multiple: int) -> IntArray:
    """Round lengths up to *multiple*, >= 1; ArgumentError if their sum reaches 2**63."""
    if lengths.size and (int(lengths.max()) + multiple) * lengths.size >= 2**63:
        total = sum(-(-length // multiple) * multiple for length in lengths.tolist())
        if total >= 2**63:
            fact = f"lengths rounded up to multiples of {multiple:,} have 2**63 tokens or more in total"
            raise ArgumentError("length", fact, {"multiple": multiple})
    return -(-lengths // multiple) * multiple


def exact_share(name: str, value: float | str | Decimal | Fraction) -> Fraction:
    """
    Return a share as an exact fraction. Raise an ArgumentError if the share is not from 0 to 1.

    >>> exact_share("min_fill_ratio", 0.55)
    Fraction(11, 20)
    """
    try:
        exact = Fraction(str(value))
    except (ArithmeticError, ValueError):  # no number, or not a finite one
        exact = Fraction(-1)
    if not 0 <= exact <= 1:
        raise ArgumentError("argument", f"{name} is {value}, but has to be from 0 to 1")
    return exact


def as_works(works: Any, num: int, *, items: str = "packs") -> NDArray[np.float64]:
    """
    Check the work of each item, and return it as float64; shape (num,).

    Args:
        works: Work of each item, in any unit.
        num: Number of items.
        items: Name of the items in the error, in the plural.

    Raises:
        ArgumentError: There are not *num* works, or a work is not a finite number of at least 0.
    """
    try:
        array = _as_array(works).astype(np.float64, copy=False)
    except (TypeError, ValueError):
        fact = f"the work of {items} has to be a list of finite numbers of at least 0, not {type(works).__name__}"
        raise ArgumentError("works", fact, {"num": num, "num_works": 0}) from None
    if array.shape != (num,):
        fact = f"works and {items} differ in number ({array.size:,} and {num:,}): give one work for each of the {items}"
        raise ArgumentError("works", fact, {"num": num, "num_works": array.size})
    wrong = np.flatnonzero(~((array >= 0) & np.isfinite(array)))
    if wrong.size:
        index, value = int(wrong[0]), float(array[wrong[0]])
        others = f"; {wrong.size:,} of {num:,} are wrong" if wrong.size > 1 else ""
        fact = f"work {index} is {value}, but the work of {items} has to be a finite number of at least 0{others}"
        raise ArgumentError("works", fact, {"index": index, "value": value, "num_wrong": int(wrong.size)})
    return array
