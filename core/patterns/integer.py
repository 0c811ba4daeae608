"""Integer program over known patterns, for problems of few samples."""

from __future__ import annotations

import numpy as np

from packplan.core.patterns import Filling, Pattern
from packplan.core.runs import Runs

MAX_NODES = 200
"""Limit of nodes in the solver's search tree. It ends by this count, never by the clock."""


def fewest_patterns(patterns: list[Pattern], runs: Runs) -> Filling | None:
    """
    Return the fewest bins of whole patterns that have a place for every sample; None without a
    solution.

    Args:
        patterns: Patterns over *runs*. Each run has to be in one.
        runs: Runs of at most some hundred samples.
    """
    # It takes half a second to load, and most plans are proven without it.
    from scipy.optimize import LinearConstraint, milp  # noqa: PLC0415

    places = np.zeros((len(runs.sizes), len(patterns)))
    for column, pattern in enumerate(patterns):
        places[list(pattern), column] = list(pattern.values())
    ones = np.ones(len(patterns))
    solved = milp(
        ones,
        constraints=LinearConstraint(places, lb=np.array(runs.counts)),
        integrality=ones,
        options={"node_limit": MAX_NODES},
    )
    if solved.x is None:
        return None
    left = list(runs.counts)
    filling: Filling = []
    for pattern, num in zip(patterns, np.rint(solved.x).astype(int).tolist(), strict=True):
        for _ in range(num):
            # There may be more places than samples.
            held = {run: min(per_bin, left[run]) for run, per_bin in pattern.items() if left[run]}
            for run, per_bin in held.items():
                left[run] -= per_bin
            if held:
                filling.append((held, 1))
    return filling
