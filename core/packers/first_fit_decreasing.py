"""First-fit decreasing: longest samples first, each into the first bin that fits."""

from packplan.core.length_counts import LengthCounts, PackingTrace, fit_decreasing


def first_fit_decreasing(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """Put each sample into the first bin that it fits."""
    return fit_decreasing(tally, capacity=capacity, fullest=False)
