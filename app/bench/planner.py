"""
Packing algorithms beside what else can be installed: time, packs above the lower bound, peak
memory.

Every planner runs in a process of its own, several times; the median counts. Times are also given
as multiples of a stable argsort of the same lengths in the same run, and of the fastest peer, since
machines differ. A planner that takes longer than the limit is ended, and not asked for more samples
of that distribution.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import scipy

from packplan.adapters.progress import progress
from packplan.app.bench.distributions import DISTRIBUTIONS, Distribution
from packplan.app.bench.measure import Measured, NotMeasured, measure
from packplan.app.bench.peers import PEERS
from packplan.app.bench.table import aligned
from packplan.core.bounds import lower_bound
from packplan.core.errors import DataSetError
from packplan.core.lengths import IntArray
from packplan.core.packers import ALGORITHMS, pack

WARM_UP = 500
"""Samples packed before the clock starts, so that what is loaded late is loaded."""

DEFAULT_SAMPLES = (10_000, 100_000, 1_000_000, 10_000_000)


@attrs.frozen
class Row:
    """One planner on one data set."""

    distribution: str
    samples: int
    planner: str
    ours: bool
    problem: str | None = None
    """Why there are no figures."""

    seconds: float | None = None
    runs: int | None = None
    times_argsort: float | None = None
    times_fastest_peer: float | None = None
    packs: int | None = None
    lower_bound: int | None = None
    gap: float | None = None
    """Packs above the lower bound, over the bound."""

    peak_bytes: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--samples", type=int, nargs="+", default=DEFAULT_SAMPLES, metavar="N", help="(default: 10^4 to 10^7)"
    )
    parser.add_argument(
        "--distributions", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS), metavar="NAME",
        help=f"of {', '.join(DISTRIBUTIONS)}; the number is the capacity (default: all)",
    )  # fmt: skip
    planners = [*ALGORITHMS, *PEERS]
    parser.add_argument(
        "--planners", nargs="+", choices=planners, default=planners, metavar="NAME",
        help=f"of {', '.join(planners)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each (default: %(default)s)")
    parser.add_argument(
        "--limit-s", type=float, default=60.0, metavar="S", help="seconds a planner may take (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw time and gap against samples (svg, png)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    _check(options)
    rows: list[Row] = []
    for name in options.planners:
        if name in PEERS:
            PEERS[name].load()
    for name in options.distributions:
        rows += _measure_distribution(DISTRIBUTIONS[name], options)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [attrs.asdict(row) for row in rows]}, indent=1))
    else:
        print("\n".join(aligned([HEAD, *(tuple(_cells(row)) for row in rows)], left={0, 2})))
    if options.plot:
        draw(rows, options.plot)


def _check(options: argparse.Namespace) -> None:
    for key, least in (("repeat", 1), ("limit_s", 0.001), ("seed", 0)):
        if getattr(options, key) < least:
            message = f"--{key.replace('_', '-')} has to be at least {least}"
            raise DataSetError(message)
    if min(options.samples) < 1:
        message = "--samples has to be at least 1"
        raise DataSetError(message)
    if options.plot and not options.plot.parent.is_dir():
        message = f"--plot: there is no folder {options.plot.parent}"
        raise DataSetError(message)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "peers": [peer.title for peer in PEERS.values()],
    }


def _measure_distribution(distribution: Distribution, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each number of samples and planner."""
    given_up: dict[str, str] = {}
    for num_samples in sorted(options.samples):
        lengths = distribution.lengths(num_samples, seed=options.seed)
        names = list(dict.fromkeys(options.planners))
        bar = progress(names, desc=f"{distribution.name}, {num_samples:,}", leave=False)
        outcomes: dict[str, Measured | NotMeasured] = {}
        for name in bar:
            bar.set_postfix_str(name)
            outcome = (
                NotMeasured(given_up[name])
                if name in given_up
                else measure(
                    preparation(name, lengths, distribution.capacity),
                    PEERS[name].num_packs if name in PEERS else len,
                    repeat=options.repeat,
                    limit_s=options.limit_s,
                )
            )
            if isinstance(outcome, NotMeasured):
                given_up.setdefault(name, f"{outcome.reason} at {num_samples:,}")
            outcomes[name] = outcome
        yield from _rows(distribution, lengths, outcomes)


def preparation(name: str, lengths: IntArray, capacity: int) -> Callable[[], Callable[[], Any]]:
    """
    Return what makes a planner's input, and warms it up.

    Args:
        name: A planner of ours, or of `PEERS`.

        lengths: Tokens of each sample; shape (num_samples,).

        capacity: Tokens of a pack.
    """

    def prepare() -> Callable[[], Any]:
        if name in PEERS:
            PEERS[name].call(lengths[:WARM_UP], capacity)()
            return PEERS[name].call(lengths, capacity)
        if name == "certified":
            import scipy.optimize  # noqa: F401  # half a second that is not its own
        pack(lengths[:WARM_UP], capacity=capacity, algorithm=name)
        return lambda: pack(lengths, capacity=capacity, algorithm=name)

    return prepare


def _rows(distribution: Distribution, lengths: IntArray, outcomes: dict[str, Measured | NotMeasured]) -> Iterator[Row]:
    argsort = measure(lambda: lambda: np.argsort(lengths, kind="stable"), lambda _: None, repeat=5, limit_s=600)
    assert isinstance(argsort, Measured)  # noqa: S101  # numpy sorts
    done = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Measured)}
    fastest_peer = min((done[name].seconds for name in done if name in PEERS), default=None)
    bound = lower_bound(
        lengths, capacity=distribution.capacity, known=min((one.result for one in done.values()), default=None)
    )
    for name, outcome in outcomes.items():
        row = Row(distribution.name, lengths.size, name, name not in PEERS)
        if isinstance(outcome, NotMeasured):
            yield attrs.evolve(row, problem=outcome.reason)
            continue
        yield attrs.evolve(
            row,
            seconds=outcome.seconds,
            runs=outcome.num_runs,
            times_argsort=outcome.seconds / argsort.seconds,
            times_fastest_peer=outcome.seconds / fastest_peer if fastest_peer else None,
            packs=outcome.result,
            lower_bound=bound,
            gap=(outcome.result - bound) / bound,
            peak_bytes=outcome.peak_bytes,
        )


HEAD = (
    "lengths",
    "samples",
    "planner",
    "seconds",
    "x argsort",
    "x fastest peer",
    "packs",
    "gap",
    "peak MB",
    "B/sample",
)


def _cells(row: Row) -> Iterator[str]:
    yield from (row.distribution, f"{row.samples:,}", row.planner)
    if row.seconds is None or row.times_argsort is None or row.gap is None or row.peak_bytes is None:
        yield from (str(row.problem), *[""] * (len(HEAD) - 4))
        return
    yield f"{row.seconds:.3g}"
    yield f"{row.times_argsort:.3g}"
    yield f"{row.times_fastest_peer:.3g}" if row.times_fastest_peer else ""
    yield f"{row.packs:,}"
    yield f"{100 * row.gap:.3f} %" if row.gap else "0"
    yield f"{row.peak_bytes / 1e6:,.0f}"
    # What a process holds anyway moves by megabytes: only many samples make a share of each.
    yield f"{row.peak_bytes / row.samples:.0f}" if row.samples >= 1_000_000 else ""


def draw(rows: list[Row], path: Path) -> None:
    """Draw seconds and gap against samples, a column for each distribution."""
    from matplotlib.figure import Figure  # a second to load, for this option alone

    names = list(dict.fromkeys(row.distribution for row in rows))
    figure = Figure(figsize=(4 * len(names), 7), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True)
    for column, name in enumerate(names):
        for planner in dict.fromkeys(row.planner for row in rows):
            points = [r for r in rows if r.distribution == name and r.planner == planner and r.seconds is not None]
            style = "-" if planner in ALGORITHMS else ":"
            samples = [point.samples for point in points]
            axes[0, column].loglog(samples, [point.seconds for point in points], style, marker="o", label=planner)
            axes[1, column].semilogx(samples, [100 * (point.gap or 0) for point in points], style, marker="o")
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("samples")
        axes[1, column].set_yscale("symlog", linthresh=0.001)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("packs above the lower bound, %")
    axes[0, -1].legend(fontsize="x-small")
    figure.savefig(path)
