"""
Cut RL batches into microbatches, and measure the time of cutting, the balance of workers, and the
computed positions.

Batches of random lengths are cut in three ways: into balanced packs, into packs that go to the
workers in turn, and by dynamic batching. Time is processor time. Balance is the work of the busiest
worker divided by the mean work of all workers. Balance is computed for whole global batches, and
for microbatches that run at the same time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import attrs
import numpy as np

from benchmarks.distributions import DISTRIBUTIONS, TEXT_MODEL
from benchmarks.options import add_number
from benchmarks.table import Columns, show
from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.packs import Packs
from packplan.core.shard import Sharding, shard_dynamic, shard_packed
from packplan.core.work.assignment import SyncPoint
from packplan.core.work.model import WorkModel


@attrs.frozen
class RlRow:
    """Figures of one way to cut batches; medians over batches."""

    way: str
    cpu_ms: float
    microbatches: float
    """Number of microbatches of each worker."""

    utilisation: float
    computed_share: float
    """Computed positions, divided by those of padding each sequence to the batch's longest."""

    work_imbalance: float
    """Work of the busiest worker in a global batch, divided by the mean work of all workers."""

    microbatch_imbalance: float
    """Work of the busiest worker over the mean worker's, both summed over microbatches."""


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
    add_number(parser, "--sequences", 512, "sequences of a batch")
    add_number(parser, "--global-batch", 512, "sequences of an optimizer step")
    add_number(parser, "--workers", 8, "data-parallel learners")
    add_number(parser, "--budget", 16384, "tokens of a microbatch")
    add_number(parser, "--batches", 20, "batches to cut")
    parser.add_argument(
        "--work", choices=("model", "attention"), default="model",
        help="count FLOPs of a 7B model, or squares of lengths (default: model)",
    )  # fmt: skip
    parser.add_argument(
        "--sync-at", choices=get_args(SyncPoint), default="microbatch",
        help="where workers wait for each other (default: microbatch)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    work = TEXT_MODEL.trained() if options.work == "model" else None
    workers = {"shards": options.workers, "batch_size": options.global_batch, "work": work}
    budget = {"max_tokens_per_microbatch": options.budget}
    ways: dict[str, Callable[[IntArray], Sharding]] = {
        "packed, balanced": partial(shard_packed, **workers, **budget, sync_at=options.sync_at),
        "dynamic": partial(shard_dynamic, **workers, **budget, sequence_length_round=64),
    }
    distribution = DISTRIBUTIONS[options.distribution]
    batches = [distribution.lengths(options.sequences, seed=seed) for seed in range(options.batches)]
    rows = [_cut(way, cut, batches) for way, cut in ways.items()]
    rows.insert(1, _cut_in_turn(batches, options, work))
    show(rows, COLUMNS, left={"cut"}, as_json=options.json)


def imbalances(sharding: Sharding) -> tuple[float, float]:
    """
    Return the work of the busiest worker over the mean work of all workers: for global batches, and
    for microbatches.
    """
    works = sharding.by_worker(sharding.works)
    ends = np.cumsum((0, *sharding.num_microbatches[:-1]))
    mean = float(works.mean(axis=0).sum())
    return float(np.add.reduceat(works, ends, axis=1).max(axis=0).sum()) / mean, float(works.max(axis=0).sum()) / mean


def imbalances_in_turn(packs: Packs, lengths: IntArray, *, shards: int, work: WorkModel | None) -> tuple[float, float]:
    """
    Return `imbalances` of one global batch whose packs go to the workers in turn.

    Args:
        packs: Microbatches of the batch.
        lengths: Tokens of each sequence.
        shards: Number of workers.
        work: Work of the model; None counts squares of lengths.
    """
    works = lengths.astype(float) ** 2 if work is None else work.sample_flops(lengths)
    of_packs = np.add.reduceat(works[packs.indices], packs.offsets[:-1])
    rounds = np.pad(of_packs, (0, -len(packs) % shards)).reshape(-1, shards)
    mean = float(rounds.sum()) / shards
    return float(rounds.sum(axis=0).max()) / mean, float(rounds.max(axis=1).sum()) / mean


def _cut_in_turn(batches: list[IntArray], options: argparse.Namespace, work: WorkModel | None) -> RlRow:
    found = []
    for lengths in batches:
        start, shards = time.process_time(), options.workers
        parts = [lengths[at : at + options.global_batch] for at in range(0, len(lengths), options.global_batch)]
        packed = [pack(one, capacity=options.budget, algorithm="modified_first_fit_decreasing") for one in parts]
        cpu_ms, rounds = 1000 * (time.process_time() - start), sum(-(-len(packs) // shards) for packs in packed)
        utilisation = int(lengths.sum()) / (shards * rounds * options.budget)
        even = [imbalances_in_turn(*one, shards=shards, work=work) for one in zip(packed, parts, strict=True)]
        share = int(lengths.sum()) / (lengths.size * int(lengths.max()))
        found.append((cpu_ms, rounds, utilisation, share, *np.mean(even, axis=0).tolist()))
    return RlRow("packed, in turn", *map(statistics.median, zip(*found, strict=True)))


def _cut(way: str, cut: Callable[[IntArray], Sharding], batches: list[IntArray]) -> RlRow:
    found = []
    for lengths in batches:
        start = time.process_time()
        sharding = cut(lengths)
        cpu_ms, positions = 1000 * (time.process_time() - start), int(sharding.positions.sum())
        padded = sum(map(len, sharding.slots)) * int(lengths.max())
        utilisation = int(lengths.sum()) / (len(sharding.slots) * sharding.capacity)
        numbers = (cpu_ms, sum(sharding.num_microbatches), utilisation, positions / padded, *imbalances(sharding))
        found.append(numbers)
    return RlRow(way, *map(statistics.median, zip(*found, strict=True)))
