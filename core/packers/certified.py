"""
Certified: the fewest packs that can be found, beside the bound that proves how few there can be.

Best fit first, then exact filling; where a gap to the bound stays, column generation, whose solution is rounded by
diving: patterns that the relaxation uses whole are taken, the program is solved again for what is left, and what is
left is packed exactly after each dive. A gap of few samples is searched by restarts and an integer program. Everything is bounded by iterations, so the result does not depend on the
machine's speed. The plan is never worse than that of any other algorithm: the last resort is the best of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from core.lengths import IntArray
from core.packers.best_fit_decreasing import best_fit_decreasing
from core.packers.concatenative import concatenative
from core.packers.constant_volume import constant_volume
from core.packers.first_fit_decreasing import first_fit_decreasing
from core.packers.first_fit_shuffle import first_fit_shuffle
from core.packers.modified_first_fit_decreasing import modified_first_fit_decreasing
from core.packs import Packs
from core.patterns import Filling, Pattern, PatternKey, key_of, num_packs
from core.patterns.certificate import certify, reduced
from core.patterns.fill import fill_exactly
from core.patterns.integer import fewest_patterns
from core.patterns.relaxation import solve_master
from core.runs import Ledger, Runs

MAX_DIVES = 40
"""Linear programs after the relaxation; each has fewer samples than the one before."""

MIN_SHARE_OF_A_DIVE = 0.5
"""Of the packs still to find, at least so many are fixed in one dive."""

FEW_SAMPLES = 60
MAX_RESTARTS = 100
"""Where so few samples leave a gap, so many packings are tried, and an integer program over their patterns."""


def certified(lengths: IntArray, *, capacity: int, seed: int) -> Packs:
    """
    Return the fewest packs found.

    Args:
        lengths: Tokens, each from 1 to *capacity*.

        capacity: Tokens a pack may hold.

        seed: Of first-fit-shuffle, which is tried last.
    """
    runs = Runs.of(lengths)
    best, bound = _fewest(runs, capacity=capacity)
    if best.num_bins > bound:
        for algorithm in (constant_volume, first_fit_decreasing, modified_first_fit_decreasing):
            best = min(best, algorithm(runs, capacity=capacity), key=lambda ledger: ledger.num_bins)
    packs = best.packs(lengths, runs)
    if len(packs) > bound:
        in_order = concatenative(lengths, capacity=capacity)
        shuffled = first_fit_shuffle(lengths, capacity=capacity, seed=seed)
        packs = min(packs, in_order, shuffled, key=len)
    return packs


def _fewest(runs: Runs, *, capacity: int) -> tuple[Ledger, int]:
    """Return the best packing over runs, and the bound that it was compared with."""
    best_fit = best_fit_decreasing(runs, capacity=capacity)
    runs, capacity = reduced(runs, capacity=capacity)
    certificate = certify(runs, capacity=capacity, known=best_fit.num_bins)
    bound, best = certificate.bound, certificate.filling
    if best is None or best_fit.num_bins == bound:
        return best_fit, bound
    searches = chain(_dives(runs, capacity=capacity, patterns=certificate.patterns), _restarts(runs, capacity=capacity))
    while num_packs(best) > bound and (found := next(searches, None)) is not None:
        best = min(best, found, key=num_packs)
    return min(best_fit, _ledger_of(best), key=lambda ledger: ledger.num_bins), bound


def _dives(runs: Runs, *, capacity: int, patterns: list[Pattern]) -> Iterator[Filling]:
    """Yield packings, each with more of its patterns fixed by the linear program."""
    left = list(runs.counts)
    fixed: Filling = []
    pool = {key_of(pattern): pattern for pattern in patterns}
    for dive in range(1, MAX_DIVES + 1):
        alive = [run for run, count in enumerate(left) if count]
        if not alive:
            return
        here = {run: place for place, run in enumerate(alive)}
        usable = [p for p in pool.values() if all(per_bin <= left[run] for run, per_bin in p.items())]
        master = solve_master(
            [{here[run]: per_bin for run, per_bin in pattern.items()} for pattern in usable],
            sizes=np.array([runs.sizes[run] for run in alive]),
            counts=np.array([left[run] for run in alive]),
        )
        if master is None:
            return
        missing = max(1.0, MIN_SHARE_OF_A_DIVE * master.num_packs)
        for place in np.argsort(-master.uses, kind="stable").tolist():
            pattern, used = usable[place], float(master.uses[place])
            if used < 1 - 1e-6 and (missing <= 0 or used < 1e-6):
                break
            num = min(max(int(used + 1e-6), 1), *(left[run] // per_bin for run, per_bin in pattern.items()))
            if num:
                fixed.append((pattern, num))
                missing -= num
                for run, per_bin in pattern.items():
                    left[run] -= num * per_bin
        rest = Runs(runs.sizes, left)
        fillings = [
            fill_exactly(rest, capacity=capacity, largest_first=largest_first, seed=seed)
            for largest_first, seed in ((True, dive), (True, None), (False, dive), (False, MAX_DIVES + dive))
        ]
        yield fixed + min(fillings, key=num_packs)
        pool.update({key_of(pattern): pattern for filling in fillings for pattern, _ in filling})


def _restarts(runs: Runs, *, capacity: int) -> Iterator[Filling]:
    """Yield packings of other draws, and at last the best one of all their patterns, where there are few samples."""
    if sum(runs.counts) > FEW_SAMPLES:
        return
    pool: dict[PatternKey, Pattern] = {}
    for seed in range(MAX_RESTARTS):
        filling = fill_exactly(runs, capacity=capacity, largest_first=seed % 2 == 0, seed=seed)
        yield filling
        pool.update({key_of(pattern): pattern for pattern, _ in filling})
    chosen = fewest_patterns(list(pool.values()), runs)
    if chosen is not None:
        yield chosen


def _ledger_of(filling: Filling) -> Ledger:
    """Write down which bins each pattern has."""
    ledger = Ledger()
    first = 0
    for pattern, num in filling:
        for run, per_bin in pattern.items():
            ledger.write((run, first, num, per_bin))
        first += num
    return ledger
