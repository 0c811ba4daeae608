"""
How much a search may cost: counted in steps, never by the clock, so that its result is the same on every machine.

A step is what a completion of exact filling does for one run, about a third of a microsecond; the constants of the other
searches are such that their steps take about as long.
"""

from __future__ import annotations

from math import inf


class SpentError(Exception):
    """A search would cost more than it may."""


class Effort:
    """Steps that a search has left, for all of its parts together."""

    def __init__(self, limit: float = inf) -> None:
        """Allow *limit* steps; none by default is no limit."""
        self.left = limit

    def spend(self, steps: int) -> None:
        """Take *steps* before they are done; SpentError if so many are not left."""
        if steps > self.left:
            raise SpentError
        self.left -= steps
