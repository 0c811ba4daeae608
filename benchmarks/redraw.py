"""
Compare packs that are drawn again for each epoch with an algorithm's own packs. The figures are the
number of packs, the pairs of samples that share a pack again, and time.

For each algorithm, its own packing and a draw are timed in turn in one process, and medians are
reported. Pairs of samples that share a pack in two draws are compared with the number of pairs that
random packs would have.
"""

import argparse
import statistics
import time
from typing import Any

import attrs
import numpy as np

from benchmarks.child import NotMeasuredError, run_in_child
from benchmarks.distributions import DISTRIBUTIONS, Distribution
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from packplan.core.lengths import IntArray
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packers.drawing import redraw
from packplan.core.packs import Packs

PLANNERS = tuple(name for name, one in ALGORITHMS.items() if not one.keeps_order)


@attrs.frozen
class Meetings:
    """
    Pairs of samples that share a pack in two plans.

    Samples that are in only one of the plans are left out. A sample that occurs more than once in a
    plan counts once, in its first pack.
    """

    pairs: int
    """Pairs that share a pack in the first plan."""

    pairs_again: int
    """Pairs that share a pack in both plans."""

    expected: float
    """
    Expected number of pairs that share a pack in both plans, if the second plan's packs kept their
    sizes and got random samples.
    """


def meetings(first: Packs, second: Packs) -> Meetings:
    """
    Count the pairs of samples that share a pack in both plans.

    >>> meetings(Packs.from_lists([[0, 1, 2], [3]]), Packs.from_lists([[0, 1], [2, 3]]))
    Meetings(pairs=3, pairs_again=1, expected=1.0)
    """
    num_records = 1 + int(max(packs.indices.max(initial=-1) for packs in (first, second)))
    packs_of = np.stack([_first_owners(packs, num_records) for packs in (first, second)])
    one, other = packs_of[:, (packs_of >= 0).all(axis=0)]
    pairs, pairs_of_second = _num_pairs(one), _num_pairs(other)
    possible = one.size * (one.size - 1) // 2
    return Meetings(
        pairs=pairs,
        pairs_again=_num_pairs(one * len(second) + other),
        expected=pairs * pairs_of_second / possible if possible else 0.0,
    )


def _first_owners(packs: Packs, num_records: int) -> IntArray:
    """Return the first pack of each record, -1 for none; shape (num_records,)."""
    owners = np.full(num_records, -1, dtype=np.int64)
    # Assigned back to front: the first of several packs is written last, and stays.
    owners[packs.indices[::-1]] = np.repeat(np.arange(len(packs)), packs.sizes())[::-1]
    return owners


def _num_pairs(labels: IntArray) -> int:
    """Return the number of pairs of equal labels."""
    counts = np.unique(labels, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


@attrs.frozen
class RedrawRow:
    """Figures of one algorithm on one data set, or the problem that prevented them."""

    distribution: str
    samples: int
    planner: str
    problem: str | None = None
    more_packs: float = 0.0
    """Additional packs of a draw, divided by the packs of the algorithm's own packing."""

    meetings_over_expected: float = 0.0
    """Pairs that share a pack in two draws, divided by their expected number in random packs."""

    again_share: float = 0.0
    """Share of a draw's pairs that also share a pack in the next draw."""

    own_seconds: float = 0.0
    times_own: float = 0.0
    """Time of a draw, divided by the time of the algorithm's own packing."""


COLUMNS: Columns = {
    "lengths": lambda row: row.distribution,
    "samples": lambda row: f"{row.samples:,}",
    "planner": lambda row: row.planner,
    "problem": lambda row: row.problem or "",
    "more packs": lambda row: "" if row.problem else f"{row.more_packs:.2%}",
    "pairs again": lambda row: "" if row.problem else f"{row.again_share:.3%}",
    "x random": lambda row: "" if row.problem else f"{row.meetings_over_expected:.3g}",
    "pack s": lambda row: "" if row.problem else f"{row.own_seconds:.3g}",
    "x pack": lambda row: "" if row.problem else f"{row.times_own:.2f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_number(parser, "--samples", 1_000_000, "samples of each data set")
    add_names(parser, "--distributions", DISTRIBUTIONS, DISTRIBUTIONS, "; the number in a name is the capacity")
    add_names(parser, "--planners", PLANNERS, PLANNERS)
    add_number(parser, "--repeat", 5, "runs of each algorithm")
    add_number(parser, "--limit-s", 120, "limit of seconds for all runs of an algorithm", metavar="S")


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    rows = [_row(DISTRIBUTIONS[name], one, options) for name in options.distributions for one in options.planners]
    show(rows, COLUMNS, left={"lengths", "planner", "problem"}, as_json=options.json)


def _row(distribution: Distribution, planner: str, options: argparse.Namespace) -> RedrawRow:
    row = RedrawRow(distribution.name, options.samples, planner)
    try:
        found = run_in_child(lambda: _measured(distribution, planner, options), limit_s=options.limit_s)
    except NotMeasuredError as error:
        return attrs.evolve(row, problem=str(error))
    return attrs.evolve(row, **found)


def _measured(distribution: Distribution, planner: str, options: argparse.Namespace) -> dict[str, Any]:
    lengths, capacity = distribution.lengths(options.samples, seed=0), distribution.capacity
    seconds: dict[str, list[float]] = {"own": [], "draw": []}
    for _ in range(options.repeat):
        start = time.perf_counter()
        own = pack(lengths, capacity=capacity, algorithm=planner)
        middle = time.perf_counter()
        first = redraw(lengths, capacity=capacity, algorithm=planner, seed=0, epoch=1)
        seconds["draw"].append(time.perf_counter() - middle)
        seconds["own"].append(middle - start)
    met = meetings(first, redraw(lengths, capacity=capacity, algorithm=planner, seed=0, epoch=2))
    own_seconds = statistics.median(seconds["own"])
    return {
        "more_packs": len(first) / len(own) - 1,
        "meetings_over_expected": met.pairs_again / met.expected,
        "again_share": met.pairs_again / met.pairs,
        "own_seconds": own_seconds,
        "times_own": statistics.median(seconds["draw"]) / own_seconds,
    }
