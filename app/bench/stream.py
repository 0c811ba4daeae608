"""
Dynamic packing: lengths a second through the buffer, beside planning all of them at once, on the
planner's distributions.

What packing as samples come costs in packs is shown too: packs that were emitted against those of
best fit over everything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np

from packplan.app.bench.distributions import DISTRIBUTIONS
from packplan.app.bench.table import aligned
from packplan.app.cli.command import positive_number
from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.stream import Carry, CarryOptions, advance, finish

CHUNK = 4096
"""Lengths that come at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--samples", type=positive_number, default=1_000_000, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--distributions", nargs="+", choices=list(DISTRIBUTIONS), metavar="NAME",
        default=["chat-8192", "sft-2048", "detcap-12288", "vlm-16384", "vlm-4096"],
        help=f"of {', '.join(DISTRIBUTIONS)} (default: five of them)",
    )  # fmt: skip
    parser.add_argument(
        "--buffer", type=positive_number, default=512, metavar="N", help="samples (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=positive_number, default=3, metavar="R", help="runs each (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    rows = [_measured(name, options) for name in options.distributions]
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))
        return
    head = ("lengths", "samples/s", "argsorts", "packs", "dropped samples", "packs over best fit")
    cells = [
        (str(row["distribution"]), f"{row['samples_per_s']:,.0f}", f"{row['argsorts']:.0f}", f"{row['packs']:,}",
         f"{row['dropped_samples']:,}", f"{row['gap']:+.2%}") for row in rows
    ]  # fmt: skip
    print("\n".join(aligned([head, *cells], left={0})))


def _measured(name: str, options: argparse.Namespace) -> dict[str, float | int | str]:
    distribution = DISTRIBUTIONS[name]
    lengths = distribution.lengths(options.samples, seed=0)
    chosen = CarryOptions(packing_length=distribution.capacity, packing_buffer=options.buffer)
    seconds, sorts = [], []
    for _ in range(options.repeat):
        start = time.perf_counter()
        packs, dropped = _streamed(lengths, chosen)
        middle = time.perf_counter()
        np.argsort(lengths, kind="stable")
        seconds.append(middle - start)
        sorts.append(time.perf_counter() - middle)
    best = len(pack(lengths, capacity=distribution.capacity, algorithm="best_fit_decreasing"))
    return {
        "distribution": name,
        "samples_per_s": lengths.size / statistics.median(seconds),
        "argsorts": statistics.median(spent / sort for spent, sort in zip(seconds, sorts, strict=True)),
        "packs": packs,
        "dropped_samples": dropped,
        "gap": packs / best - 1,
    }


def _streamed(lengths: IntArray, options: CarryOptions) -> tuple[int, int]:
    """Stream lengths; return how many packs came out, and how many samples were dropped."""
    carry, packs, dropped = Carry(), 0, 0
    indices = np.arange(lengths.size)
    for start in range(0, lengths.size, CHUNK):
        part = slice(start, start + CHUNK)
        carry, emitted = advance(carry, indices[part], lengths[part], options=options)
        packs, dropped = packs + len(emitted.packs), dropped + emitted.underfilled.num_samples
    last = finish(carry, options=options)
    return packs + len(last.packs), dropped + last.underfilled.num_samples
