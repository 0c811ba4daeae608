"""
RL batches cut into microbatches: how long it takes, how evenly the workers work, and how much less
is computed than by padding.

Balanced and round robin, dynamic batching and padding cut the same batches, of real lengths; time
is beside one stable argsort of the lengths. Work is that of the busiest worker over the mean
worker's: of whole global batches, and of microbatches that run at the same time, all together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import attrs
import numpy as np

from packplan.app.bench.distributions import DISTRIBUTIONS
from packplan.app.bench.table import aligned
from packplan.app.cli.command import positive_number
from packplan.core.lengths import IntArray
from packplan.core.shard import Sharding, batch_metrics, pooled, shard_dynamic, shard_packed, shard_plain
from packplan.core.work import Meeting, WorkModel

MODEL = WorkModel(per_position=14 * 10**9, per_pair=4 * 28 * 3584).trained()
"""A text model of 7B."""


@attrs.frozen
class Row:
    """What a way of cutting costs and gives; medians over batches."""

    way: str
    milliseconds: float
    argsorts: float
    microbatches: float
    """Microbatches of each worker."""

    utilisation: float
    computed_share: float
    """Share of what padding every sequence to the longest of its global batch would compute."""

    work_imbalance: float
    """The busiest worker's work over the mean, of whole global batches."""

    microbatch_imbalance: float
    """The work of the busiest worker of each microbatch over the mean worker's, all together."""

    excess: float
    """
    The first over the mean or the longest sequence's own work, whichever is more: what no cut can
    go below.
    """

    microbatch_excess: float
    """The second over the same."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--distribution", choices=list(DISTRIBUTIONS), default="chat-8192", metavar="NAME",
        help=f"of {', '.join(DISTRIBUTIONS)} (default: %(default)s)",
    )  # fmt: skip
    numbers = {"sequences": (512, "of a batch"), "global-batch": (512, "sequences of an optimizer step"),
     "workers": (8, ""),
               "budget": (16384, "tokens of a microbatch"), "batches": (20, "to cut")}  # fmt: skip
    for name, (default, what) in numbers.items():
        parser.add_argument(
            f"--{name}", type=positive_number, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--work", choices=("model", "attention"), default="model",
        help="count FLOPs of a 7B model, or squares of lengths (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--meeting", choices=get_args(Meeting), default="microbatch",
        help="where workers wait for each other (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    work = MODEL if options.work == "model" else None
    workers = {"shards": options.workers, "batch_size": options.global_batch, "work": work}
    budget = {"max_tokens_per_microbatch": options.budget}
    ways: dict[str, Callable[[IntArray], Sharding]] = {
        "packed, balanced": partial(shard_packed, **workers, **budget, meeting=options.meeting),
        "packed, round robin": partial(shard_packed, **workers, **budget, assignment="round_robin"),
        "dynamic": partial(shard_dynamic, **workers, **budget, sequence_length_round=64),
        "padded": partial(shard_plain, **workers, allow_uneven=True),
    }
    distribution = DISTRIBUTIONS[options.distribution]
    batches = [distribution.lengths(options.sequences, seed=seed) for seed in range(options.batches)]
    rows = [_measured(way, cut, batches, work=work) for way, cut in ways.items()]
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": [attrs.asdict(row) for row in rows]}, indent=1))
        return
    head = ("cut", "ms", "argsorts", "microbatches", "utilisation", "computed", "global batch",
            "over the least", "microbatch", "over the least")  # fmt: skip
    cells = [
        (row.way, f"{row.milliseconds:.1f}", f"{row.argsorts:.0f}", f"{row.microbatches:.0f}", f"{row.utilisation:.3f}",
         f"{row.computed_share:.1%}", f"{row.work_imbalance:.4f}", f"{row.excess:.4f}",
         f"{row.microbatch_imbalance:.4f}", f"{row.microbatch_excess:.4f}")
        for row in rows
    ]  # fmt: skip
    print("\n".join(aligned([head, *cells], left={0})))


def _measured(way: str, cut: Callable[[IntArray], Sharding], batches: list[IntArray], *, work: WorkModel | None) -> Row:
    """
    Cut every batch one way.

    Args:
        way: Its name.

        cut: Cuts a batch.

        batches: Lengths of their sequences.

        work: What a sequence costs; None: the square of its length.
    """
    times, sorts, excess, waited, metrics = [], [], [], [], []
    for lengths in batches:
        start = time.perf_counter()
        sharding = cut(lengths)
        middle = time.perf_counter()
        np.argsort(lengths, kind="stable")
        times.append(middle - start)
        sorts.append(time.perf_counter() - middle)
        global_batches = batch_metrics(sharding)
        metrics.append(pooled(global_batches))
        least = sum(
            max(float(batch.works.sum(axis=1).mean()), _heaviest(sharding, n, work))
            for n, batch in enumerate(global_batches)
        )
        excess.append(sum(float(batch.works.sum(axis=1).max()) for batch in global_batches) / least)
        waited.append(sum(float(batch.works.max(axis=0).sum()) for batch in global_batches) / least)
    return Row(
        way=way,
        milliseconds=1e3 * statistics.median(times),
        argsorts=statistics.median(spent / sort for spent, sort in zip(times, sorts, strict=True)),
        microbatches=statistics.median(one.works.shape[1] for one in metrics),
        utilisation=statistics.median(one.packing.utilisation for one in metrics),
        computed_share=statistics.median(one.computed_share for one in metrics),
        work_imbalance=statistics.median(one.work_imbalance for one in metrics),
        microbatch_imbalance=statistics.median(one.microbatch_imbalance for one in metrics),
        excess=statistics.median(excess),
        microbatch_excess=statistics.median(waited),
    )


def _heaviest(sharding: Sharding, batch: int, work: WorkModel | None) -> float:
    """Return the work of a global batch's longest sequence."""
    longest = max(int(sharding.lengths[worker[batch].indices].max()) for worker in sharding)
    return float(longest) ** 2 if work is None else float(work.of([longest])[0])
