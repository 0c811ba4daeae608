"""
Measure how full packs are whose samples stay near their places in the data: fill over displacement.

The lengths are those of recorded data, in their recorded order. `--samples` draws so many of them
instead. `fill` is tokens over what the packs may hold. `fill at most` is that of as many packs as
no plan goes below that moves no sample further. Above the last displacement is the packing that
may move samples anywhere.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import attrs
import numpy as np

from benchmarks.distributions import trace
from benchmarks.options import add_names
from benchmarks.table import Columns, show
from packplan.app.cli.command import positive_number, whole_number
from packplan.core.bounds import find_bound, usual_effort
from packplan.core.lengths import IntArray
from packplan.core.packers import pack

CAPACITIES = {"chat": 4096, "sft": 2048, "detcap": 8192}
"""Recorded lengths -> tokens of a pack."""

DISPLACEMENTS = (0, 1, 2, 4, 8, 16, 32, 64, 256, 1024)


@attrs.frozen
class OrderRow:
    """Packs of one data set under one displacement."""

    lengths: str
    samples: int
    displacement: int
    packs: int
    lower_bound: int
    fill: float
    fill_at_most: float
    seconds: float


COLUMNS: Columns = {
    "lengths": lambda row: row.lengths,
    "samples": lambda row: f"{row.samples:,}",
    "displacement": lambda row: "any" if row.displacement == row.samples else f"{row.displacement:,}",
    "packs": lambda row: f"{row.packs:,}",
    "no fewer than": lambda row: f"{row.lower_bound:,}",
    "fill": lambda row: f"{row.fill:.4f}",
    "fill at most": lambda row: f"{row.fill_at_most:.4f}",
    "seconds": lambda row: f"{row.seconds:.2f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_names(parser, "--lengths", CAPACITIES, CAPACITIES)
    parser.add_argument("--samples", type=positive_number, metavar="N", help="drawn of each (default: as recorded)")
    shown = " ".join(map(str, DISPLACEMENTS))
    parser.add_argument(
        "--displacements", type=whole_number, nargs="+", default=DISPLACEMENTS, metavar="D",
        help=f"samples that one may be from its place (default: {shown})",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    rows = [row for name in options.lengths for row in _rows_of(name, options)]
    show(rows, COLUMNS, left={"lengths"}, as_json=options.json)


def _rows_of(name: str, options: argparse.Namespace) -> Iterator[OrderRow]:
    capacity, recorded = CAPACITIES[name], trace(name).astype(np.int64)
    lengths = recorded[recorded <= capacity]
    if options.samples:
        lengths = np.random.default_rng(0).choice(lengths, options.samples)
    for displacement in (*options.displacements, lengths.size):
        yield _row(f"{name}-{capacity}", lengths, capacity=capacity, displacement=displacement)


def _row(name: str, lengths: IntArray, *, capacity: int, displacement: int) -> OrderRow:
    started = time.perf_counter()
    num_packs = len(pack(lengths, capacity=capacity, algorithm="ordered", max_displacement=displacement))
    seconds = time.perf_counter() - started
    effort = usual_effort(lengths.size)
    bound = find_bound(lengths, capacity=capacity, known=num_packs, effort=effort, max_displacement=displacement).packs
    filled = int(lengths.sum()) / capacity
    return OrderRow(
        name, lengths.size, displacement, num_packs, bound, filled / num_packs, filled / bound, seconds,
    )  # fmt: skip
