"""Integer arithmetic of a shell: + - * / % and parentheses over 64-bit whole numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?(0|[1-9]\d*)")

_LARGEST = 2**63 - 1


def compute(tokens: Sequence[str]) -> int:
    """
    Return the value that a shell computes, truncated towards zero where it divides.

    Args:
        tokens: Decimal numbers, operators and parentheses, in their order.

    Raises:
        ValueError: They are no such arithmetic, divide by 0, or are beyond 64 bits.

    >>> compute(["16", "/", "(", "1", "-", "4", ")"])
    -5
    """
    value, end = _sum(tokens, 0)
    if end != len(tokens):
        message = f"{tokens[end]} is not computed"
        raise ValueError(message)
    return value


def _sum(tokens: Sequence[str], at: int) -> tuple[int, int]:
    """Return the value of a sum or difference that begins at a token, and where it ends."""
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] in {"+", "-"}:
        other, end = _product(tokens, at + 1)
        value, at = _checked(value + other if tokens[at] == "+" else value - other), end
    return value, at


def _product(tokens: Sequence[str], at: int) -> tuple[int, int]:
    value, at = _factor(tokens, at)
    while at < len(tokens) and tokens[at] in {"*", "/", "%"}:
        other, end = _factor(tokens, at + 1)
        if tokens[at] == "*":
            value *= other
        elif not other:
            message = "it divides by 0"
            raise ValueError(message)
        else:
            quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
            value = quotient if tokens[at] == "/" else value - quotient * other
        value, at = _checked(value), end
    return value, at


def _factor(tokens: Sequence[str], at: int) -> tuple[int, int]:
    if tokens[at : at + 1] == ["("]:
        value, end = _sum(tokens, at + 1)
        if tokens[end : end + 1] != [")"]:
            message = "a ( does not close"
            raise ValueError(message)
        return value, end + 1
    if at == len(tokens) or not _NUMBER.fullmatch(tokens[at]):
        message = f"{tokens[at] if at < len(tokens) else 'its end'} is no decimal number"
        raise ValueError(message)
    return _checked(int(tokens[at])), at + 1


def _checked(value: int) -> int:
    if abs(value) > _LARGEST:
        message = "it is beyond 64 bits"
        raise ValueError(message)
    return value
