"""
Patterns: numbers of samples of each length in a bin; and packings as numbers of bins by pattern.

`guided` fills bins in the proportions of a linear program, and `search` improves such a filling.
`relaxation` bounds the number of packs from below by a linear program over all lengths.

Searches are limited by steps of about a third of a microsecond, and never by the clock: their
results are the same on every machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from packplan.core.length_counts import PackingTrace

Pattern = dict[int, int]
"""Index of a length in `LengthCounts` -> samples of it in one bin."""

Filling = list[tuple[Pattern, int]]
"""Patterns and the number of bins of each. Together they hold every sample once."""


PatternKey = tuple[tuple[int, int], ...]


def pattern_key(pattern: Pattern) -> PatternKey:
    """Return a hashable key that is the same for equal patterns."""
    return tuple(sorted(pattern.items()))


def num_packs(filling: Filling) -> int:
    """Return the number of bins in a filling."""
    return sum(num for _, num in filling)


def to_trace(filling: Filling) -> PackingTrace:
    """Convert a filling to a trace."""
    trace = PackingTrace()
    first = 0
    for pattern, num in filling:
        for index, per_bin in pattern.items():
            trace.write((index, first, num, per_bin))
        first += num
    return trace


class SpentError(Exception):
    """A search would exceed its limit of steps."""


class Effort:
    """Limit of steps for all parts of a search."""

    def __init__(self, limit: float = inf) -> None:
        """Allow *limit* steps; unlimited by default."""
        self.left = limit

    def spend(self, steps: int) -> None:
        """Count *steps* that are about to be taken; SpentError if fewer are left."""
        if steps > self.left:
            raise SpentError
        self.left -= steps

    @contextmanager
    def lend(self, most: float) -> Iterator["Effort"]:
        """Lend up to *most* steps to a `with` block; unused steps come back at its end."""
        steps = int(min(most, self.left))
        self.spend(steps)
        own = Effort(steps)
        try:
            yield own
        finally:
            self.left += own.left
