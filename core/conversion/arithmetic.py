"""Integer arithmetic of a shell: + - * / % and parentheses over 64-bit whole numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_ALLOWED = re.compile(r"[\d\s()+*/%-]*")

_END = 2**63


def compute(expression: str) -> int:
    """
    Return the value that a shell computes, truncated towards zero where it divides.

    Raises:
        ValueError: The expression holds anything else, divides by 0, or leaves 64 bits.

    >>> compute("16 / (1 - 4)")
    -5
    """
    if not _ALLOWED.fullmatch(expression):
        raise ValueError(expression)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (KeyError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError(expression) from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            value = -number
        case ast.BinOp(left=first, op=sign, right=second):
            value = _RESULTS[type(sign)](_value(first), _value(second))
        case _:
            raise ValueError(node)
    if abs(value) >= _END:
        raise ValueError(value)
    return value


_RESULTS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: lambda left, right: int(Fraction(left, right)),
    ast.Mod: lambda left, right: left - int(Fraction(left, right)) * right,
}
