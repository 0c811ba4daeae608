"""
Cut RL batches into microbatches: the time it takes, how even the workers are, and positions saved.

Balanced, in turn, by dynamic batching and by padding, the same batches of drawn lengths are cut.
Time is processor time. Work is that of the busiest worker over the mean worker's, for whole global
batches, and for microbatches that run at the same time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import attrs

from benchmarks.distributions import DISTRIBUTIONS, TEXT_MODEL
from benchmarks.options import add_number
from benchmarks.table import Columns, show
from packplan.core.lengths import IntArray
from packplan.core.shard import Sharding, batch_metrics, pooled, shard_dynamic, shard_packed, shard_plain
from packplan.core.work import Meeting


@attrs.frozen
class RlRow:
    """Figures of one way; medians over batches."""

    way: str
    cpu_ms: float
    microbatches: float
    """Microbatches of each worker."""

    utilisation: float
    computed_share: float
    """Positions over those of padding every sequence to the longest of its global batch."""

    work_imbalance: float
    """Work of the busiest worker of a global batch over the mean worker's."""

    microbatch_imbalance: float
    """Work of the busiest worker of each microbatch over the mean worker's, all together."""


COLUMNS: Columns = {
    "cut": lambda row: row.way,
    "CPU ms": lambda row: f"{row.cpu_ms:.1f}",
    "microbatches of a worker": lambda row: f"{row.microbatches:.0f}",
    "utilisation": lambda row: f"{row.utilisation:.3f}",
    "positions": lambda row: f"{row.computed_share:.1%}",
    "by global batch": lambda row: f"{row.work_imbalance:.4f}",
    "by microbatch": lambda row: f"{row.microbatch_imbalance:.4f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--distribution", choices=list(DISTRIBUTIONS), default="chat-8192", metavar="NAME",
        help=f"any of {', '.join(DISTRIBUTIONS)} (default: chat-8192)",
    )  # fmt: skip
    add_number(parser, "--sequences", 512, "of a batch")
    add_number(parser, "--global-batch", 512, "sequences of an optimizer step")
    add_number(parser, "--workers", 8, "data-parallel learners")
    add_number(parser, "--budget", 16384, "tokens of a microbatch")
    add_number(parser, "--batches", 20, "to cut")
    parser.add_argument(
        "--work", choices=("model", "attention"), default="model",
        help="count FLOPs of a 7B model, or squares of lengths (default: model)",
    )  # fmt: skip
    parser.add_argument(
        "--meeting", choices=get_args(Meeting), default="microbatch",
        help="where workers wait for each other (default: microbatch)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    work = TEXT_MODEL.trained() if options.work == "model" else None
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
    show([_cut(way, cut, batches) for way, cut in ways.items()], COLUMNS, left={"cut"}, as_json=options.json)


def _cut(way: str, cut: Callable[[IntArray], Sharding], batches: list[IntArray]) -> RlRow:
    times, metrics = [], []
    for lengths in batches:
        start = time.process_time()
        sharding = cut(lengths)
        times.append(time.process_time() - start)
        metrics.append(pooled(batch_metrics(sharding)))
    shares = ("computed_share", "work_imbalance", "microbatch_imbalance")
    return RlRow(
        way=way,
        cpu_ms=1000 * statistics.median(times),
        microbatches=statistics.median(one.works.shape[1] for one in metrics),
        utilisation=statistics.median(one.packing.utilisation for one in metrics),
        **{name: statistics.median(getattr(one, name) for one in metrics) for name in shares},
    )
