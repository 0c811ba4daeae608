"""One limit for all waits of a run, whatever it waits for, and however often."""

import time
from collections.abc import Callable

import attrs


@attrs.frozen
class Deadline:
    """
    When a run stops waiting: for another job's lock, for rank 0, for the training and the
    evaluation data together.
    """

    timeout_s: float
    """Seconds from the start, in all; 0 means for ever."""

    clock: Callable[[], float] = time.monotonic
    """Gives the seconds now."""

    started_s: float = attrs.field(init=False)

    @started_s.default
    def _now(self) -> float:
        return self.clock()

    def left_s(self) -> float:
        """
        Return the seconds that the next wait may take, as ports take them: 0 means for ever; after
        the deadline, almost none.
        """
        if not self.timeout_s:
            return 0.0
        return max(self.timeout_s - (self.clock() - self.started_s), _LATE_S)

    def wait(self) -> dict[str, float]:
        """
        Return the options of a port's wait: the seconds that are left, and those in all, which an
        error names.
        """
        return {"timeout_s": self.left_s(), "limit_s": self.timeout_s}


_LATE_S = 1e-3
"""
Seconds left after the deadline: not 0, which would be for ever. Results that are ready are still
taken.
"""
