"""
Whole bins from the linear relaxation, by diving. For few samples, also restarts and an integer
program.

A dive takes the patterns with whole uses, and the best of the others until enough bins are fixed.
The remaining samples are then packed exactly, and the program is solved again for them.
"""

from collections.abc import Iterator

import numpy as np

from packplan.core.patterns import Filling, Pattern, PatternKey, key_of, num_packs
from packplan.core.patterns.effort import Effort
from packplan.core.patterns.fill import fill_exactly
from packplan.core.patterns.relaxation import FloatArray, Master, solve_master
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


MAX_DIVES = 40
"""Limit of linear programs after the relaxation. Each has fewer samples than the one before."""

MIN_SHARE_OF_A_DIVE = 0.5
"""Least share of the remaining packs that one dive fixes."""

FEW_SAMPLES = 60
MAX_RESTARTS = 100
"""
Problems of at most this many samples are packed this many times, and by an integer program over the
patterns found.
"""

_TINY = 1e-6
"""Tolerance of the solver around zero."""


def dives(runs: Runs, *, capacity: int, patterns: list[Pattern]) -> Iterator[Filling]:
    """
    Yield packings, each with more bins fixed by the linear program.

    Args:
        runs: Runs of lengths from 1 to *capacity*, counts >= 1.
        capacity: Tokens a bin may hold.
        patterns: Patterns of the relaxation, which include a packing of all samples.
    """
    left = list(runs.counts)
    fixed: Filling = []
    pool = {key_of(pattern): pattern for pattern in patterns}
    for dive in range(1, MAX_DIVES + 1):
        usable = [p for p in pool.values() if all(per_bin <= left[run] for run, per_bin in p.items())]
        master = _solve(usable, runs.sizes, left)
        if master is None:
            return
        fixed += _fix(usable, master.uses, left, at_least=MIN_SHARE_OF_A_DIVE * master.num_packs)
        if not any(left):
            yield fixed
            return
        rest = Runs(runs.sizes, left)
        fillings = [
            fill_exactly(rest, capacity=capacity, effort=Effort(), largest_first=largest_first, seed=seed)
            for largest_first, seed in ((True, dive), (True, None), (False, dive), (False, MAX_DIVES + dive))
        ]
        yield fixed + min(fillings, key=num_packs)
        pool.update({key_of(pattern): pattern for filling in fillings for pattern, _ in filling})


def restarts(runs: Runs, *, capacity: int) -> Iterator[Filling]:
    """Yield packings of other draws and the best packing of all their patterns, for few samples."""
    if sum(runs.counts) > FEW_SAMPLES:
        return
    pool: dict[PatternKey, Pattern] = {}
    for seed in range(MAX_RESTARTS):
        filling = fill_exactly(runs, capacity=capacity, effort=Effort(), largest_first=seed % 2 == 0, seed=seed)
        yield filling
        pool.update({key_of(pattern): pattern for pattern, _ in filling})
    chosen = fewest_patterns(list(pool.values()), runs)
    if chosen is not None:
        yield chosen


def _solve(patterns: list[Pattern], sizes: list[int], left: list[int]) -> Master | None:
    """Solve the linear program for the runs that have samples left."""
    alive = [run for run, count in enumerate(left) if count]
    place = {run: number for number, run in enumerate(alive)}
    return solve_master(
        [{place[run]: per_bin for run, per_bin in pattern.items()} for pattern in patterns],
        sizes=np.array([sizes[run] for run in alive]),
        counts=np.array([left[run] for run in alive]),
    )


def _fix(patterns: list[Pattern], uses: FloatArray, left: list[int], *, at_least: float) -> Filling:
    """
    Take bins of the most used patterns from *left*, all whole uses and *at_least* as many in all;
    return them.
    """
    fixed: Filling = []
    for place in np.argsort(-uses, kind="stable").tolist():
        pattern, used = patterns[place], float(uses[place])
        if used < 1 - _TINY and fixed and (num_packs(fixed) >= at_least or used < _TINY):
            break
        # The program lets a sample take the place of a longer one, so not every bin can be filled.
        num = min(max(int(used + _TINY), 1), *(left[run] // per_bin for run, per_bin in pattern.items()))
        if num:
            fixed.append((pattern, num))
            for run, per_bin in pattern.items():
                left[run] -= num * per_bin
    return fixed
