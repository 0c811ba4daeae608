"""
Looking at stored plans: seconds of whole processes, on lengths stored for it, beside planning them
in memory.

Each command starts again, verifies what it reads, and ends. Ratios are to `build_raw_plan` on the
same lengths in the same run, since machines differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import attrs
import numpy as np

from packplan.adapters.progress import progress
from packplan.app.bench.distributions import DISTRIBUTIONS, Distribution
from packplan.app.bench.table import aligned
from packplan.app.cli.command import positive_number
from packplan.app.wiring.stores import open_stores, read_config
from packplan.core.align import align_plan
from packplan.core.config import configured_inputs, plan_policy
from packplan.core.fingerprint import Fingerprint
from packplan.core.lengths import IntArray
from packplan.core.plan import build_raw_plan
from packplan.core.policy import PlanPolicy
from packplan.core.samples import COLUMNS, IMAGE_COLUMNS

RANKS = 8

T = TypeVar("T")

DEFAULT = ("chat-8192", "detcap-8192", "vlm-4096")


@attrs.frozen
class Row:
    """One command on one data set."""

    distribution: str
    command: str

    seconds: float
    """Median over the runs."""

    times_plan: float
    """Over the seconds of planning the same lengths in memory."""

    num_bytes: int
    """That it printed or wrote."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--samples", type=positive_number, default=1_000_000, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--distributions", nargs="+", choices=list(DISTRIBUTIONS), metavar="NAME", default=list(DEFAULT),
        help=f"of {', '.join(DISTRIBUTIONS)} (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=positive_number, default=3, metavar="R", help="runs each (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    rows = []
    for name in progress(options.distributions, desc="looking", leave=False):
        with TemporaryDirectory() as folder:
            rows += _measured(DISTRIBUTIONS[name], Path(folder), options)
    if options.json:
        document = {"cores": os.cpu_count(), "samples": options.samples, "rows": [attrs.asdict(row) for row in rows]}
        print(json.dumps(document, indent=1))
        return
    head = ("lengths", "command", "seconds", "x planning", "KB")
    cells = [
        (row.distribution, row.command, f"{row.seconds:.2f}", f"{row.times_plan:.2f}", f"{row.num_bytes / 1000:,.0f}")
        for row in rows
    ]
    print("\n".join(aligned([head, *cells], left={0, 1})))


def _measured(distribution: Distribution, folder: Path, options: argparse.Namespace) -> list[Row]:
    lengths = distribution.lengths(options.samples, seed=0)
    config, policy = store(folder, lengths, packing_length=distribution.capacity)
    planning, _ = _timed(lambda: build_raw_plan(lengths, policy), options.repeat)
    page, capacity = folder / "plan.html", distribution.capacity
    longer = ",".join(str(capacity * part // 4) for part in (3, 4, 5, 6, 7, 8))
    commands = {
        "show": ["show", config, "--json"],
        "whatif, 12 combinations": ["whatif", config, "--max-length", longer, "--world-size", "4,8", "--json"],
        "diff": ["diff", config, config, "--json"],
        "report": ["report", config, "-o", page],
    }
    rows = []
    for name, words in commands.items():
        call = partial(
            subprocess.run,
            [sys.executable, "-m", "packplan.app.plan", *map(str, words)],
            check=True,
            capture_output=True,
        )
        seconds, ended = _timed(call, options.repeat)
        size = page.stat().st_size if name == "report" else len(ended.stdout)
        rows.append(Row(distribution.name, name, seconds, seconds / planning, size))
    return rows


def _timed(call: Callable[[], T], repeat: int) -> tuple[float, T]:
    """Return the median seconds of a call, and what it returned last."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        returned = call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), returned


def store(folder: Path, lengths: IntArray, *, packing_length: int) -> tuple[Path, PlanPolicy]:
    """
    Store lengths and their plan as building would; return the run's YAML, and how it plans.

    Args:
        folder: Where YAML and plan are written.

        lengths: Tokens of each sample; shape (num_samples,).

        packing_length: Tokens of a pack.
    """
    path = folder / "run.yaml"
    sections = {
        "model": {"model": "none"},
        "template": {"max_length": packing_length},
        "custom": {"train_jsonl": str(folder / "data.jsonl")},
        "training": {"output_dir": str(folder / "run"), "effective_batch_size": 4 * RANKS},
    }
    path.write_text(json.dumps(sections), encoding="utf-8")  # which is YAML too
    config = read_config(path)
    stores, policy = open_stores(config, "train"), plan_policy(config, "train")
    key = Fingerprint(configured_inputs(config.template, config.custom, packing_length=packing_length))
    rows = np.zeros((lengths.size, len(COLUMNS)), dtype=np.int32)
    rows[:, COLUMNS.index("length")] = lengths
    rows[:, COLUMNS.index("images")] = 1
    number = np.arange(lengths.size)
    images = np.zeros((lengths.size, len(IMAGE_COLUMNS)), dtype=np.int64)
    images[:, :4] = np.column_stack([number, np.full_like(number, 28), np.full_like(number, 28), number])
    with stores.lock.held(timeout_s=60, report=lambda _: None):
        stores.lengths.resume(key, lengths.size, str)
        stores.lengths.append(rows, images, "data", in_full=False, probe={})
        raw, plan_key = build_raw_plan(lengths, policy), policy.fingerprint(stores.lengths.digest())
        stores.plans.save(plan_key, raw)
        aligned_plan = align_plan(raw, world_size=RANKS, dataloader_drop_last=False)
        stores.plans.save_aligned(plan_key, aligned_plan)
    return path, policy
