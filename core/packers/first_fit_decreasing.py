"""First-fit decreasing: longest samples first, each into the first bin that fits."""

from packplan.core.runs import PackingTrace, Runs, fit_decreasing


def first_fit_decreasing(runs: Runs, *, capacity: int) -> PackingTrace:
    """Put each sample into the first bin that it fits."""
    return fit_decreasing(runs, capacity=capacity, fullest=False)
