"""
Best-fit decreasing: longest samples first, each into the fullest bin that fits, of equal ones the
first.
"""

from packplan.core.runs import PackingTrace, Runs, fit_decreasing


def best_fit_decreasing(runs: Runs, *, capacity: int) -> PackingTrace:
    """Put each sample into the fullest bin that it fits."""
    return fit_decreasing(runs, capacity=capacity, fullest=True)
