"""Integer arithmetic of a shell: + - * / % and parentheses over 64-bit whole numbers."""

from __future__ import annotations

import ast
import re

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
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError(expression) from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            value = -number
        case ast.BinOp(left=first, op=operator, right=second):
            value = _result(operator, _value(first), _value(second))
        case _:
            raise ValueError(node)
    if abs(value) >= _END:
        raise ValueError(value)
    return value


def _result(operator: ast.operator, left: int, right: int) -> int:
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1) if right else 0
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() if right:
            return quotient
        case ast.Mod() if right:
            return left - quotient * right
    raise ValueError(operator)
