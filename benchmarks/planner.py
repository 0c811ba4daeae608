"""
Compare packing algorithms with those of other packages.

The figures are time, packs above the lower bound, work of the busiest pack over the mean work, and
peak memory.

Every planner runs several times in a process of its own, and medians are reported. Since machines
differ, times are also given as multiples of a stable argsort of the same lengths, and of the
fastest other package. A planner that takes longer than the limit is ended, and does not run on
larger data of the same distribution.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import attrs
import numpy as np

from benchmarks.child import Cost, NotMeasuredError, measure
from benchmarks.distributions import DISTRIBUTIONS, Distribution
from benchmarks.options import add_names, add_number
from benchmarks.peers import PEERS
from benchmarks.table import Columns, show
from packplan.adapters.progress import progress
from packplan.app.cli.command import parse_number
from packplan.core.bounds import lower_bound
from packplan.core.lengths import IntArray
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packs import Packs
from packplan.core.work.model import WorkModel

WARM_UP = 500
"""Number of samples that are packed before the clock starts, so that imports are not timed."""

_BOUND_STEPS = 100_000_000
"""Maximum number of steps of the search for the bound that gaps are measured against."""

DEFAULT_SAMPLES = (10_000, 100_000, 1_000_000, 10_000_000)

PLANNERS = (*ALGORITHMS, *PEERS)


@attrs.frozen
class PlannerRow:
    """Figures of one planner on one data set, or the problem that prevented them."""

    distribution: str
    samples: int
    planner: str
    problem: str | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor seconds of the planner's own process; another package may start more processes."""

    times_argsort: float = 0.0
    times_fastest_peer: float | None = None
    packs: int = 0
    lower_bound: int = 0
    gap: float = 0.0
    """Number of packs above the lower bound, divided by the bound."""

    busiest: float | None = None
    """Work of the busiest pack over the mean, in an ordinary model; None for other packages."""

    peak_bytes: int = 0


COLUMNS: Columns = {
    "lengths": lambda row: row.distribution,
    "samples": lambda row: f"{row.samples:,}",
    "planner": lambda row: row.planner,
    "seconds": lambda row: row.problem or f"{row.seconds:.3g}",
    "cpu s": lambda row: "" if row.problem else f"{row.cpu_seconds:.3g}",
    "x argsort": lambda row: "" if row.problem else f"{row.times_argsort:.3g}",
    "x fastest peer": lambda row: f"{row.times_fastest_peer:.3g}" if row.times_fastest_peer else "",
    "packs": lambda row: "" if row.problem else f"{row.packs:,}",
    "gap": lambda row: "" if row.problem else f"{100 * row.gap:.3f} %" if row.gap else "0",
    "busiest": lambda row: f"{row.busiest:.4f}" if row.busiest else "",
    "peak MB": lambda row: "" if row.problem else f"{row.peak_bytes / 1e6:,.0f}",
    # The memory of a process moves by megabytes anyway, so few samples say nothing of each.
    "B/sample": lambda row: f"{row.peak_bytes / row.samples:.0f}" if row.samples >= 10**6 and row.packs else "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_number(parser, "--samples", DEFAULT_SAMPLES, "samples of each data set")
    add_names(parser, "--distributions", DISTRIBUTIONS, DISTRIBUTIONS, "; the number in a name is the capacity")
    add_names(parser, "--planners", PLANNERS, PLANNERS)
    add_number(parser, "--repeat", 5, "runs of each planner")
    add_number(parser, "--limit-s", 60, "limit of seconds for a run", metavar="S")
    parser.add_argument("--seed", type=parse_number, default=0, help="seed of the lengths (default: 0)")


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    absent = {name for name, peer in PEERS.items() if name in options.planners and not peer.is_installed}
    options.planners = [name for name in options.planners if name not in absent]
    used = [PEERS[name] for name in options.planners if name in PEERS]
    for peer in used:
        import_module(peer.module)
    rows = [row for name in options.distributions for row in _rows_of(DISTRIBUTIONS[name], options)]
    packages = ("numpy", "scipy", *(peer.package for peer in used))
    notes = [f"not installed, and left out: {', '.join(sorted(absent))}"] if absent else []
    show(rows, COLUMNS, left={"lengths", "planner"}, as_json=options.json, notes=notes, packages=packages)


def _rows_of(distribution: Distribution, options: argparse.Namespace) -> Iterator[PlannerRow]:
    given_up: dict[str, str] = {}
    for num_samples in sorted(options.samples):
        lengths = distribution.lengths(num_samples, seed=options.seed)
        costs: dict[str, Cost] = {}
        names = list(dict.fromkeys(options.planners))
        for name in progress(names, desc=f"{distribution.name}, {num_samples:,}", leave=False):
            if name in given_up:
                continue
            prepare = _preparation(name, lengths, distribution.capacity)
            try:
                summarise = partial(_summary, lengths)
                costs[name] = measure(prepare, summarise, repeat=options.repeat, limit_s=options.limit_s)
            except NotMeasuredError as error:
                given_up[name] = f"{error} at {num_samples:,}"
        compared = _compared(distribution, lengths, costs)
        for name in names:
            row = PlannerRow(distribution.name, num_samples, name)
            yield attrs.evolve(row, **compared[name] if name in compared else {"problem": given_up[name]})


def _preparation(name: str, lengths: IntArray, capacity: int) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        if name in PEERS:
            PEERS[name].prepare(lengths[:WARM_UP], capacity)()
            return PEERS[name].prepare(lengths, capacity)
        if name == "certified":
            import scipy.optimize  # noqa: F401  # half a second that is not its own
        pack(lengths[:WARM_UP], capacity=capacity, algorithm=name)
        return lambda: pack(lengths, capacity=capacity, algorithm=name)

    return prepare


def _summary(lengths: IntArray, found: Any) -> tuple[int, float | None]:
    """Return the number of packs, and `PlannerRow.busiest`."""
    if not isinstance(found, Packs):
        return len(found), None
    works = found.sums(WorkModel.estimated({}).trained().sample_flops(lengths))
    return len(found), float(works.max() / works.mean())


def _compared(distribution: Distribution, lengths: IntArray, costs: dict[str, Cost]) -> dict[str, dict[str, Any]]:
    argsort = measure(lambda: lambda: np.argsort(lengths, kind="stable"), lambda _: None, repeat=5, limit_s=600)
    fastest = min((cost.seconds for name, cost in costs.items() if name in PEERS), default=None)
    fewest = min((cost.result[0] for cost in costs.values()), default=None)
    bound = lower_bound(lengths, capacity=distribution.capacity, known=fewest, effort=_BOUND_STEPS)
    return {
        name: {
            "seconds": cost.seconds,
            "cpu_seconds": cost.cpu_s,
            "times_argsort": cost.seconds / argsort.seconds,
            "times_fastest_peer": cost.seconds / fastest if fastest else None,
            "packs": cost.result[0],
            "lower_bound": bound,
            "gap": (cost.result[0] - bound) / bound,
            "busiest": cost.result[1],
            "peak_bytes": cost.peak_bytes,
        }
        for name, cost in costs.items()
    }
