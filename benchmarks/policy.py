"""
Train the policy of a run on packed, dynamic and padded microbatches, from the same first answers.

Each way is a run of `packplan rl` on ranks of this machine. Draws are keyed, so the answers of the
first step are the same. Seconds are those of log-probabilities and updates, without generation.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from benchmarks.child import Child, NotMeasuredError
from benchmarks.options import add_number
from benchmarks.table import Columns, show
from packplan.adapters.progress import progress

LIMIT_S = 1800.0

WAYS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "packed": (),
        "dynamic": (
            "policy.sequence_packing.enabled=false",
            "policy.dynamic_batching.enabled=true",
            "policy.dynamic_batching.train_mb_tokens=1024",
        ),
        "padded": ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2"),
    }
)
"""Way -> values over those of the run's YAML."""


@attrs.frozen
class PolicyRow:
    """Figures of one way: sums of positions over all steps, and medians of the rest."""

    way: str
    positions: int
    """Positions that updates compute, padding included."""

    seconds: float
    """Seconds of a step's log-probabilities and updates."""

    generate_seconds: float
    """Seconds of a step's generation."""

    microbatch_imbalance: float
    """Work of the busiest worker of each microbatch over the mean worker's, all together."""

    answer_tokens: float
    """Mean tokens of an answer."""


COLUMNS: Columns = {
    "microbatches": lambda row: row.way,
    "positions": lambda row: f"{row.positions:,}",
    "seconds a step": lambda row: f"{row.seconds:.2f}",
    "generation beside it": lambda row: f"{row.generate_seconds:.2f}",
    "imbalance by microbatch": lambda row: f"{row.microbatch_imbalance:.4f}",
    "tokens an answer": lambda row: f"{row.answer_tokens:.1f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", default="app/rl_count.yaml", help="the run's YAML (default: %(default)s)")
    add_number(parser, "--steps", 6, "steps of each way")
    add_number(parser, "--workers", 2, "ranks")


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            _row(way, _steps(options, [*values, f"training.output_dir={Path(folder) / way}"], Path(folder) / way))
            for way, values in progress(WAYS.items(), desc="training")
        ]
    show(rows, COLUMNS, left={"microbatches"}, as_json=options.json, packages=("torch", "transformers"))


def _steps(options: argparse.Namespace, values: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Train one way, and return what was logged of each step."""
    words = [options.config, *values, f"grpo.num_steps={options.steps}", "--quiet"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    with ExitStack() as stack, ThreadPoolExecutor(options.workers) as threads:
        ranks = [
            stack.enter_context(Child(partial(_trained, words, rank, options.workers, port)))
            for rank in range(options.workers)
        ]
        if any(threads.map(lambda rank: rank.next(LIMIT_S), ranks)):
            message = "a run ended with an error"
            raise NotMeasuredError(message)
    return [json.loads(line) for line in (folder / "rl.jsonl").read_text(encoding="utf-8").splitlines()]


def _trained(words: Sequence[str], rank: int, num_ranks: int, port: int) -> Iterator[int]:
    """Yield the exit status of one rank of a run."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from packplan.app.rl.__main__ import main

    yield main(list(words))


def _row(way: str, steps: Sequence[Mapping[str, Any]]) -> PolicyRow:
    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    return PolicyRow(
        way=way,
        positions=round(sum(step["train"]["computed_tokens"] for step in steps)),
        seconds=median([step["logprob_s"] + step["train_s"] for step in steps]),
        generate_seconds=median([step["generate_s"] for step in steps]),
        microbatch_imbalance=median([step["train"]["microbatch_imbalance"] for step in steps]),
        answer_tokens=median([step["answer_tokens"] for step in steps]),
    )
