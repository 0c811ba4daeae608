"""
Constant volume: the emptiest bin that fits, longest samples first.

The packs are those of `binpacking.to_constant_volume` 2.x (with `weight_pos`), ties included,
without its quadratic search: the emptiest bin fits if any bin fits. The literature calls it
worst-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973). Bins are ranges of
neighbours with equal room. A new bin is the emptiest until it is full, so it takes all its samples
at once.
"""

from heapq import heappop, heappush

from packplan.core.length_counts import LengthCounts, PackingTrace


def constant_volume(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """
    Put each sample into the emptiest bin, of equal ones the first, or into a new bin if none fits.
    """
    trace = PackingTrace()
    num_bins = 0
    ranges: list[tuple[int, int, int]] = []  # (-room, first, number)
    for index, (size, count) in enumerate(zip(tally.sizes, tally.counts, strict=True)):
        left = count
        while left and ranges and -ranges[0][0] >= size:
            room, first, number = heappop(ranges)
            taken = min(number, left)
            trace.write((index, first, taken, 1))
            left -= taken
            heappush(ranges, (room + size, first, taken))
            if taken < number:
                heappush(ranges, (room, first + taken, number - taken))
        per_bin = capacity // size
        full, rest = divmod(left, per_bin)
        if full:
            trace.write((index, num_bins, full, per_bin))
            heappush(ranges, (per_bin * size - capacity, num_bins, full))
        if rest:
            trace.write((index, num_bins + full, 1, rest))
            heappush(ranges, (rest * size - capacity, num_bins + full, 1))
        num_bins += full + (rest > 0)
    return trace
