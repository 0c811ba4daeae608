"""
Best-fit decreasing: longest samples first, each into the fullest bin that fits, of equal ones the
first.
"""

from packplan.core.length_counts import LengthCounts, PackingTrace, fit_decreasing


def best_fit_decreasing(tally: LengthCounts, *, capacity: int) -> PackingTrace:
    """Put each sample into the fullest bin that it fits."""
    return fit_decreasing(tally, capacity=capacity, fullest=True)
