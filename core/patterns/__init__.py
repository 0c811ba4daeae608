"""
Patterns: what a bin takes of which runs, with the number of bins that look so.

`fill` finds patterns that use every token; `relaxation` says, by a linear program over patterns,
how few packs any packing needs.
"""

from __future__ import annotations

Pattern = dict[int, int]
"""Run -> samples of it in one bin."""

Filling = list[tuple[Pattern, int]]
"""Patterns and how many bins each has; together they hold every sample once."""


PatternKey = tuple[tuple[int, int], ...]


def key_of(pattern: Pattern) -> PatternKey:
    """Return what equal patterns have in common."""
    return tuple(sorted(pattern.items()))


def num_packs(filling: Filling) -> int:
    """Count the bins of all patterns."""
    return sum(num for _, num in filling)
