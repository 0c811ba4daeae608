"""
Any fit: best fit and first fit, longest samples first, over runs of equal length.

Both stay with a bin until the length no longer fits. In first fit it remains the first that fits;
in best fit it becomes the fullest. So a range of neighbouring bins with equal room takes its
samples in one move. The cost grows with distinct lengths, not with samples. The packs are those of
the item-by-item algorithms (Johnson, "Near-optimal bin packing algorithms", 1973), ties included.
"""

from heapq import heappop, heappush

from packplan.core.runs import PackingTrace, Runs


class _OpenBins:
    """Ranges of neighbouring bins with equal room."""

    def __init__(self, *, fullest: bool) -> None:
        self._fullest = fullest
        self._fits: list[tuple[int, int, int, int]] = []  # (preference, first, number, room): the current length fits
        self._waits: list[tuple[int, int, int]] = []  # (-room, first, number): only a shorter one may fit

    def turn_to(self, size: int) -> None:
        """Go on to lengths of *size*, which is shorter than before."""
        while self._waits and -self._waits[0][0] >= size:
            room, first, number = heappop(self._waits)
            self.put(first, number, -room, size)

    def put(self, first: int, number: int, room: int, size: int) -> None:
        """Keep a range of bins; *size* is the current length."""
        if room >= size:
            heappush(self._fits, (room if self._fullest else 0, first, number, room))
        else:
            heappush(self._waits, (-room, first, number))

    def take(self) -> tuple[int, int, int] | None:
        """Return the preferred range that the current length fits, as (first, number, room)."""
        return heappop(self._fits)[1:] if self._fits else None


def fit_decreasing(
    runs: Runs, *, capacity: int, fullest: bool, trace: PackingTrace | None = None, num_bins: int = 0
) -> PackingTrace:
    """
    Pack all runs.

    Args:
        runs: Runs of lengths from 1 to *capacity*; counts may be 0.
        capacity: Tokens a bin may hold.
        fullest: Prefer the fullest bin (best fit), else the first (first fit).
        trace: Trace to append to; a new one by default.
        num_bins: Closed bins that are already in the trace.
    """
    trace = PackingTrace() if trace is None else trace
    bins = _OpenBins(fullest=fullest)
    for run, (size, count) in enumerate(zip(runs.sizes, runs.counts, strict=True)):
        left = count
        bins.turn_to(size)
        while left:
            taken = bins.take()
            if taken is None:
                taken = (num_bins, -(-left // (capacity // size)), capacity)
                num_bins += taken[1]
            first, number, room = taken
            per_bin = room // size
            full = min(number, left // per_bin)
            rest = min(per_bin, left - full * per_bin) if full < number else 0
            if full:
                trace.write((run, first, full, per_bin))
                bins.put(first, full, room - per_bin * size, size)
            if rest:
                trace.write((run, first + full, 1, rest))
                bins.put(first + full, 1, room - rest * size, size)
            untouched = number - full - (rest > 0)
            if untouched:
                bins.put(first + number - untouched, untouched, room, size)
            left -= full * per_bin + rest
    return trace
