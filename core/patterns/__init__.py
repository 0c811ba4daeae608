"""
Patterns and fillings. A pattern says how many samples of each length a bin contains. A filling says
how many bins each pattern has.

`guided` fills bins in the proportions that a linear program computes, and `search` improves such a
filling. `relaxation` computes a lower bound on the number of packs by a linear program over all
lengths. `certificate` combines quick lower bounds, a search and the relaxation.

Searches are limited by a number of steps, and never by time. Their results are therefore the same
on every machine. A step takes a fraction of a microsecond.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from packplan.core.length_counts import PackingTrace

Pattern = dict[int, int]
"""Index of a length in `LengthCounts` -> number of samples of this length in one bin."""

Filling = list[tuple[Pattern, int]]
"""Patterns, each with its number of bins. Together, the bins contain every sample once."""


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
    """A search would need more steps than its limit allows."""


class Effort:
    """Number of steps that all parts of a search may still take."""

    def __init__(self, limit: float = inf) -> None:
        """Allow *limit* steps; unlimited by default."""
        self.left = limit

    def spend(self, steps: int) -> None:
        """Subtract *steps* before they are taken. Raise a SpentError if fewer steps are left."""
        if steps > self.left:
            raise SpentError
        self.left -= steps

    @contextmanager
    def lend(self, most: float) -> Iterator["Effort"]:
        """
        Lend up to *most* steps to a `with` block. Unused steps are returned at the end of the
        block.
        """
        steps = int(min(most, self.left))
        self.spend(steps)
        own = Effort(steps)
        try:
            yield own
        finally:
            self.left += own.left
