"""
The linear relaxation of packing over patterns, solved by column generation.

The relaxation allows fractional uses of patterns (Gilmore and Gomory, "A linear programming
approach to the cutting-stock problem", 1961, 1963). HiGHS solves the master program through scipy.
A knapsack problem over the dual values finds new patterns. Two known methods speed up convergence.
A sample may use the place of a longer sample (the dual cuts of Valério de Carvalho, 2005).
Knapsacks are solved for values between the best dual values so far and the current dual values (the
smoothing of Wentges, 1997). At first, each length's share of the capacity counts as its best dual
value.

The bound is exact in spite of floating point. Dual values are rounded to integers, for which the
knapsack is solved exactly. Farley's bound (1990) is then a quotient of integers.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import counted
from packplan.core.length_counts import LengthCounts
from packplan.core.lengths import IntArray
from packplan.core.patterns import Effort, Filling, Pattern, PatternKey, SpentError, pattern_key

MAX_ROUNDS = 30
"""Maximum number of master programs, each of which gives a valid bound."""

MAX_NEW_PATTERNS = 1_000
"""Maximum number of patterns that are added from one knapsack."""

MAX_CAPACITY = 1 << 17
MAX_SIZES = 20_000
"""
Maximum capacity in tokens, and maximum number of distinct lengths. Above these limits, one knapsack
would take longer than a few seconds.
"""

_SCALE = 1 << 40
_SMOOTHING = 0.8

FloatArray = NDArray[np.float64]


def tighten_bound(
    tally: LengthCounts,
    *,
    capacity: int,
    filling: Filling,
    bound: int,
    enough: int,
    effort: Effort,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[int, list[Pattern]]:
    """
    Improve a lower bound on the number of packs; return the new bound, and all patterns that
    were collected.

    Args:
        tally: Lengths from 1 to *capacity*, counts >= 1.
        capacity: Maximum number of tokens in a pack.
        filling: Known packing, whose patterns are among the first patterns of the program.
        bound: Known lower bound.
        enough: Number of packs of a known packing. The search ends, at the latest, when the bound
            equals this number.
        effort: Limit of the search. At the limit, the best bound so far is returned.
        report: Called with a progress message.
    """
    sizes, counts = np.array(tally.sizes), np.array(tally.counts)
    pool = {pattern_key(pattern): pattern for pattern, _ in filling}
    for index, size in enumerate(tally.sizes):
        pool.setdefault(((index, capacity // size),), {index: capacity // size})
    centre = sizes / capacity
    best = 0.0
    with suppress(SpentError):
        for number in range(1, MAX_ROUNDS + 1):
            effort.spend(estimate_master_steps(pool.values()))
            report(f"{counted(enough, 'pack')}, the bound is {bound:,}: program {number} of at most {MAX_ROUNDS}")
            master = solve_master(list(pool.values()), counts=counts)
            if master is None:
                break
            for smoothing in (_SMOOTHING, 0.0):
                # Its table has an entry for each token, and more sizes need more passes over it.
                effort.spend(capacity * (12 + sizes.size // 150))
                smoothed = smoothing * centre + (1 - smoothing) * master.duals
                knapsack = solve_knapsack(sizes, np.floor(np.maximum(smoothed, 0) * _SCALE).astype(np.int64), capacity)
                total = sum(price * count for price, count in zip(knapsack.prices.tolist(), tally.counts, strict=True))
                bound = max(bound, -(-total // knapsack.best_price))
                if total / knapsack.best_price > best:
                    best = total / knapsack.best_price
                    centre = knapsack.prices / knapsack.best_price
                added = _add_patterns(pool, knapsack, master.duals)
                if added:
                    break
            if not added or bound >= min(enough, np.ceil(master.num_packs - 1e-6)):
                break
    return bound, list(pool.values())


def estimate_master_steps(patterns: Collection[Pattern]) -> int:
    """
    Estimate the number of steps to solve a master program. The estimate is a fixed number plus a
    quarter of a product: the distinct lengths in *patterns* times the entries of all patterns.
    """
    num_sizes = len({index for pattern in patterns for index in pattern})
    return 15_000 + num_sizes * sum(map(len, patterns)) // 4


@attrs.frozen
class MasterSolution:
    """Solution of the master program, the linear program over patterns."""

    num_packs: float

    uses: FloatArray
    """Number of uses of each pattern; shape (num_patterns,)."""

    duals: FloatArray
    """Number of packs that one more sample of each size would add, for sizes that have samples."""


def solve_master(patterns: list[Pattern], *, counts: IntArray) -> MasterSolution | None:
    """
    Solve the master program: the fewest fractional uses of *patterns* that cover all samples.

    A sample may use the place of a longer sample.

    Args:
        patterns: Patterns of lengths that have samples.
        counts: Number of samples of each length, longest length first; may be 0.

    Returns: The solution, or None if the solver fails.
    """
    # These imports take half a second, and most plans need no linear program.
    from scipy.optimize import linprog  # noqa: PLC0415
    from scipy.sparse import csc_array  # noqa: PLC0415

    (alive,) = counts.nonzero()
    num, num_sizes = len(patterns), alive.size
    rows = np.searchsorted(alive, [index for pattern in patterns for index in pattern])
    columns = np.repeat(np.arange(num), [len(pattern) for pattern in patterns])
    values = np.fromiter((per_bin for pattern in patterns for per_bin in pattern.values()), dtype=np.float64)
    swaps = np.arange(num_sizes - 1)  # a place of size i, for a sample of size i + 1
    entries = np.concatenate([values, -np.ones(num_sizes - 1), np.ones(num_sizes - 1)])
    place = (np.concatenate([rows, swaps, swaps + 1]), np.concatenate([columns, num + swaps, num + swaps]))
    matrix = csc_array((entries, place), shape=(num_sizes, num + num_sizes - 1))
    cost = np.concatenate([np.ones(num), np.zeros(num_sizes - 1)])
    solved = linprog(cost, A_ub=-matrix, b_ub=-counts[alive], method="highs-ipm")
    if solved.status:
        return None
    return MasterSolution(float(solved.fun), solved.x[:num], -solved.ineqlin.marginals)


@attrs.frozen
class SolvedKnapsack:
    """
    Solved knapsack problem: the patterns with the highest total price, for given prices of samples.
    """

    sizes: IntArray
    prices: IntArray
    """Price of a sample of each size; shape (num_sizes,)."""

    worth: IntArray
    """Highest price of a pattern of at most n tokens, for each n; shape (capacity + 1,)."""

    first: IntArray
    """
    Index of one size in the best pattern of at most n tokens; shape (capacity + 1,). The index is
    -1 if n - 1 tokens give the same price.
    """

    @property
    def best_price(self) -> int:
        """Highest price of any pattern."""
        return int(self.worth[-1])

    def worth_with_each_size(self) -> IntArray:
        """
        Return, for each size, the highest price of a pattern that contains it; shape (num_sizes,).
        """
        return self.prices + self.worth[self.worth.size - 1 - self.sizes]

    def patterns_with(self, indices: list[int]) -> Iterator[Pattern]:
        """For each size in *indices*, yield the pattern with the highest price that contains it."""
        used = np.maximum.accumulate(np.where(self.first >= 0, np.arange(self.first.size), 0)).tolist()
        first, sizes = self.first.tolist(), self.sizes.tolist()
        for index in indices:
            pattern = {index: 1}
            room = used[len(first) - 1 - sizes[index]]
            while room:
                pattern[first[room]] = pattern.get(first[room], 0) + 1
                room = used[room - sizes[first[room]]]
            yield pattern


def solve_knapsack(sizes: IntArray, prices: IntArray, capacity: int) -> SolvedKnapsack:
    """
    Solve the unbounded knapsack problem exactly, with integers.

    Args:
        sizes: Number of tokens of each kind of item, longest first; shape (num_kinds,).
        prices: Integer price of an item of each kind; shape (num_kinds,).
        capacity: Maximum number of tokens in the knapsack.
    """
    worth = np.zeros(capacity + 1, dtype=np.int64)
    kinds, other = list(zip(range(sizes.size), sizes.tolist(), prices.tolist(), strict=True)), np.empty_like(worth)
    for _, size, price in kinds:
        left, copies = capacity // size, 1
        while left:  # 1, 2, 4, … copies and the rest reach every number of them
            copies = min(copies, left)
            np.add(worth[: -size * copies], price * copies, out=other[size * copies :])
            np.maximum(worth[size * copies :], other[size * copies :], out=worth[size * copies :])
            left -= copies
            copies *= 2
    first = np.full(capacity + 1, -1, dtype=np.int64)
    for kind, size, price in kinds:  # of equal ones, the shortest
        first[size:][worth[size:] == worth[:-size] + price] = kind
    first[1:][worth[1:] == worth[:-1]] = -1
    return SolvedKnapsack(sizes, prices, worth, first)


def _add_patterns(pool: dict[PatternKey, Pattern], knapsack: SolvedKnapsack, duals: FloatArray) -> int:
    """
    For each size, add the best pattern that contains it to *pool* if the pattern would improve the
    master program. Stop after `MAX_NEW_PATTERNS`; return the number of new patterns.
    """
    before = len(pool)
    dual = duals.tolist()
    dearest = np.argsort(-knapsack.worth_with_each_size(), kind="stable").tolist()
    for pattern in knapsack.patterns_with(dearest):
        if sum(dual[index] * per_bin for index, per_bin in pattern.items()) > 1 + 1e-7:
            pool.setdefault(pattern_key(pattern), pattern)
            if len(pool) == before + MAX_NEW_PATTERNS:
                break
    return len(pool) - before
