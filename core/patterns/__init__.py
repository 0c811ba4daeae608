"""
Patterns: the samples of each length that a bin takes, and the number of bins with each pattern.

`guided` fills bins in the proportions of a linear program, and `search` improves such a filling.
`relaxation` bounds the number of packs from below by a linear program over all lengths.
"""

from packplan.core.length_counts import PackingTrace

Pattern = dict[int, int]
"""Index of a length in `LengthCounts` -> samples of it in one bin."""

Filling = list[tuple[Pattern, int]]
"""Patterns and the number of bins of each. Together they hold every sample once."""


PatternKey = tuple[tuple[int, int], ...]


def key_of(pattern: Pattern) -> PatternKey:
    """Return a key that equal patterns share."""
    return tuple(sorted(pattern.items()))


def num_packs(filling: Filling) -> int:
    """Count the bins of all patterns."""
    return sum(num for _, num in filling)


def trace_of(filling: Filling) -> PackingTrace:
    """Return the trace of a packing over patterns."""
    trace = PackingTrace()
    first = 0
    for pattern, num in filling:
        for index, per_bin in pattern.items():
            trace.write((index, first, num, per_bin))
        first += num
    return trace
