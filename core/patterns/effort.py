"""
How much a search may cost: counted in steps, never by the clock, so that its result is the same on
every machine.

A step is what a completion of exact filling does for one run, about a third of a microsecond; the
constants of the other searches are such that their steps take about as long.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

TOLD_EVERY = 1_000_000
"""Steps between two times that a search says how many it took: about a third of a second."""


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


class ToldEffort(Effort):
    """Effort without a limit, which says how much of it is spent."""

    def __init__(self, report: Callable[[int], None]) -> None:
        """Call *report* with the steps so far, every `TOLD_EVERY` steps at most."""
        super().__init__()
        self._tell, self._spent, self._told = report, 0, 0

    def spend(self, steps: int) -> None:
        """Count *steps*, and say how many they are by now."""
        self._spent += steps
        if self._spent - self._told >= TOLD_EVERY:
            self._told = self._spent
            self._tell(self._spent)
