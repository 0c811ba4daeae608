"""
Limit of a search, counted in steps and never by the clock: the result is the same on every machine.

A step takes about a third of a microsecond.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

REPORT_EVERY = 1_000_000
"""Steps between two progress messages of a search, about a third of a second."""


class SpentError(Exception):
    """A search would exceed its effort."""


class Effort:
    """Steps that remain for all parts of a search."""

    def __init__(self, limit: float = inf) -> None:
        """Allow *limit* steps; unlimited by default."""
        self.left = limit

    def spend(self, steps: int) -> None:
        """Subtract *steps* before they are done; SpentError if fewer remain."""
        if steps > self.left:
            raise SpentError
        self.left -= steps

    @contextmanager
    def part(self, most: float) -> Iterator["Effort"]:
        """Give an effort of *most* steps, or of those that remain, whose rest is given back."""
        steps = int(min(most, self.left))
        self.spend(steps)
        own = Effort(steps)
        try:
            yield own
        finally:
            self.left += own.left


class ReportedEffort(Effort):
    """Unlimited effort that reports the steps spent."""

    def __init__(self, report: Callable[[int], None]) -> None:
        """Call *report* with the number of steps so far, every `REPORT_EVERY` steps at most."""
        super().__init__()
        self._report, self._spent, self._reported = report, 0, 0

    def spend(self, steps: int) -> None:
        """Count *steps*, and report their sum from time to time."""
        self._spent += steps
        if self._spent - self._reported >= REPORT_EVERY:
            self._reported = self._spent
            self._report(self._spent)
