"""
Simulate the seconds of an epoch in which some samples are longer than a pack, or --measure a small
epoch.

Lengths come from the trace `chat`. A share of the samples (--tails) is longer than a pack: their
lengths are lognormal, up to --longest tokens. Steps are those of Packplan's schedules, with the
work of a 7B model. Each rank computes --tflops x 10^12 operations per second. Ranks that share a
pack start the pack together, and exchange its queries, keys, values and outputs. This exchange is
faster within a node of 8 ranks than between nodes. All other ranks wait only at the end of a step.

- `whole`: each rank computes whole packs.
- `fixed`: all packs are shared by as many ranks as the longest pack needs.
- `own`: each pack is shared by as many ranks as it needs (`sequence_parallel_size: auto`).

`tokens` is the maximum number of tokens that a rank computes at once. `ideal` is the time in which
all ranks would compute all packs, if work were even and nothing were exchanged.

--measure trains an epoch of a small Qwen2 on gloo ranks, which are processes of this machine. Packs
have --tokens tokens. For each degree above 1, one sample has as many tokens as this number of ranks
can hold. The way `short` has no such samples. Peaks count the tensors of a step, without weights
and gradients, on the rank with the largest peak.
"""

import argparse
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from benchmarks.distributions import TEXT_MODEL, trace
from benchmarks.options import add_number
from benchmarks.rows import build_qwen2, run_ranks
from benchmarks.table import Columns, show
from packplan.app.cli.command import parse_positives
from packplan.core.batch import IGNORED_LABEL
from packplan.core.lengths import IntArray
from packplan.core.surface import Plan, plan
from packplan.core.work.model import SampleWorks

EXCHANGED_BYTES = 3 * 28 * 2 * (2 * 3584 + 2 * 512)
"""
Bytes of a token's queries, keys, values and outputs in all layers, counted for the forward pass,
its recomputation and the backward pass.
"""

NODE, WITHIN, BETWEEN = 8, 200e9, 25e9
"""Ranks of a node; bytes per second that a rank exchanges within a node, and between nodes."""


@attrs.frozen
class DegreesRow:
    """Seconds of an epoch for one share of long samples, packing length and way to share packs."""

    tail: float
    packing_length: int
    way: str
    seconds: float
    ideal: float
    tokens: int

    @property
    def above(self) -> float:
        """Seconds above the ideal, as a share of the ideal."""
        return self.seconds / self.ideal - 1


COLUMNS: Columns = {
    "long samples": lambda row: f"{row.tail:.0%}",
    "packing length": lambda row: f"{row.packing_length:,}",
    "shared": lambda row: row.way,
    "tokens": lambda row: f"{row.tokens:,}",
    "seconds": lambda row: f"{row.seconds:,.1f}",
    "above the ideal": lambda row: f"{row.above:.1%}",
}


@attrs.frozen
class MeasuredRow:
    """Memory, time and loss of an epoch, for one way to share packs."""

    ranks: int
    way: str
    peak: int
    """Peak bytes without weights and gradients, on the rank with the largest peak."""

    of_short: float
    """Peak as a multiple of the peak of the way `short`."""

    seconds: float
    """Processor seconds, summed over all ranks."""

    loss: float
    """Mean loss of the epoch's supervised tokens."""


MEASURED: Columns = {
    "ranks": lambda row: str(row.ranks),
    "shared": lambda row: row.way,
    "peak (MB)": lambda row: f"{row.peak / 1e6:,.1f}",
    "of short packs": lambda row: f"{row.of_short:.2f}",
    "processor (s)": lambda row: f"{row.seconds:.2f}",
    "loss": lambda row: f"{row.loss:.6f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--tails", type=float, nargs="+", default=[0.01, 0.05, 0.2], metavar="SHARE",
        help="shares of long samples (default: 0.01 0.05 0.2)",
    )  # fmt: skip
    parser.add_argument(
        "--packing-lengths", type=parse_positives, default=[8192, 16384], metavar="N,N",
        help="tokens of a pack (default: 8192,16384)",
    )  # fmt: skip
    add_number(parser, "--samples", 40_000, "number of samples")
    add_number(parser, "--longest", 131_072, "tokens of the longest sample")
    add_number(parser, "--ranks", 64, "ranks, a power of two")
    add_number(parser, "--accumulation", 4, "packs of a rank in a step")
    add_number(parser, "--tflops", 400, "10**12 operations of a rank in a second")
    parser.add_argument("--measure", action="store_true", help="train on this machine, and simulate nothing")
    add_number(parser, "--measured-ranks", [2, 4], "ranks that train, powers of two")
    add_number(parser, "--tokens", 512, "tokens of a pack that is trained")
    add_number(parser, "--width", 128, "width of the model that is trained")
    add_number(parser, "--vocabulary", 4096, "vocabulary of the model that is trained")


def run(options: argparse.Namespace) -> None:
    """Simulate or measure, then print the results."""
    if options.measure:
        measured = [row for ranks in options.measured_ranks for row in measure(ranks, options)]
        show(measured, MEASURED, left={"shared"}, as_json=options.json, packages=("torch", "transformers"))
        return
    rows: list[DegreesRow] = []
    for tail, length in product(options.tails, options.packing_lengths):
        rows += simulate(draw_lengths(options.samples, tail, length, options.longest), tail, length, options)
    show(rows, COLUMNS, left={"shared"}, as_json=options.json)


def draw_lengths(num_samples: int, tail: float, packing_length: int, longest: int) -> IntArray:
    """
    Return lengths of samples, a share of which is longer than a pack.

    Args:
        num_samples: Number of samples.
        tail: Share of samples that are longer than a pack.
        packing_length: Tokens of a pack.
        longest: Maximum number of tokens of a sample.
    """
    rng = np.random.default_rng(0)
    lengths = rng.choice(trace("chat"), num_samples).astype(np.int64)
    chosen = rng.choice(num_samples, round(tail * num_samples), replace=False)
    drawn = packing_length * (1 + rng.lognormal(0, 1, chosen.size))
    lengths[chosen] = np.minimum(drawn.astype(np.int64), longest)
    return lengths


def simulate(lengths: IntArray, tail: float, packing_length: int, options: argparse.Namespace) -> Iterator[DegreesRow]:
    """
    Yield a row of the table for each way to share packs.

    Args:
        lengths: Tokens of each sample.
        tail: Share of long samples, for the rows.
        packing_length: Tokens of a pack.
        options: Options of the benchmark.
    """
    planned, ranks = plan(lengths, packing_length), options.ranks
    works = planned.packs.sums(SampleWorks.from_lengths(TEXT_MODEL.trained(), lengths).flops)
    needed = max(1, int(planned.schedule(world_size=ranks, degrees="auto").pack_degrees(0).max()))
    speed, tokens = options.tflops * 1e12, planned.packs.loads(lengths)
    for way, group, most in (("whole", 1, 1), (f"fixed {needed}", needed, 1), ("own", 1, ranks)):
        schedule = planned.schedule(
            world_size=ranks // group, packs_per_step=ranks * options.accumulation, works=works, degrees=most
        )
        sharing = schedule.pack_degrees(0) * group
        seconds = works / sharing / speed + _exchange_seconds(tokens, sharing)
        order = schedule.order(0).reshape(-1, ranks // group)
        took = _epoch_seconds(seconds[order], schedule.pack_degrees(0)[order], ranks * options.accumulation)
        most_tokens = int((-(-tokens // sharing)).max())
        yield DegreesRow(tail, packing_length, way, took, float(works.sum()) / speed / ranks, most_tokens)


def _exchange_seconds(tokens: IntArray, sharing: IntArray) -> NDArray[np.float64]:
    """Return, for each pack, the seconds in which the pack's ranks exchange its tensors."""
    sent: NDArray[np.float64] = EXCHANGED_BYTES * tokens / sharing * (1 - 1 / sharing)
    return sent / np.where(sharing <= NODE, WITHIN, BETWEEN)


def _epoch_seconds(seconds: NDArray[np.float64], degrees: IntArray, packs_per_step: int) -> float:
    """
    Return the seconds of all steps; ranks that share a pack start the pack together.

    Args:
        seconds: Seconds of each microbatch on each rank; shape (num_microbatches, ranks).
        degrees: Number of ranks that share each pack; same shape.
        packs_per_step: Packs of a step.
    """
    total, ranks = 0.0, seconds.shape[1]
    for first in range(0, len(seconds), packs_per_step // ranks):
        clock = np.zeros(ranks)
        for took, sizes in zip(
            *(part[first : first + packs_per_step // ranks] for part in (seconds, degrees)), strict=True
        ):
            for size in np.unique(sizes[sizes > 1]).tolist():
                together = np.repeat(clock.reshape(-1, size).max(axis=1), size)
                clock = np.where(sizes == size, together, clock)
            clock = clock + took
        total += float(clock.max())
    return total


def measure(ranks: int, options: argparse.Namespace) -> Iterator[MeasuredRow]:
    """Yield a row of the table for each way, measured on *ranks* ranks."""
    found = run_ranks(ranks, measure_ways, options)
    short = max(rank["short"][0] for rank in found)
    for way in found[0]:
        peaks, seconds, losses = zip(*(rank[way] for rank in found), strict=True)
        each = {pack: loss for rank in losses for pack, loss in rank.items()}  # a pack counts once
        loss, tokens = map(sum, zip(*each.values(), strict=True))
        yield MeasuredRow(ranks, way, max(peaks), max(peaks) / short, sum(seconds), loss / tokens)


def measure_ways(options: argparse.Namespace) -> dict[str, tuple[int, float, dict[int, tuple[float, int]]]]:
    """
    Return the results of `_train` on this rank, for each way.

    Args:
        options: Options of the benchmark.
    """
    import torch.distributed as dist

    from packplan.adapters.attention.shared_rows import RowGroups, share_rows, sharing_by

    ranks, tokens = dist.get_world_size(), options.tokens
    sizes = [2**power for power in range(1, ranks.bit_length())]
    samples = np.array([tokens - 1] * 2 * ranks + [size * tokens for size in sizes])
    groups = RowGroups.make(sizes, timedelta(minutes=10), packing_length=tokens)
    model = build_qwen2(ranks * tokens, options)
    assert groups is not None  # noqa: S101  # of 2 ranks or more
    share_rows(model, groups)
    found = {}
    for way, group, degrees in (("short", 1, 1), ("whole", 1, 1), ("fixed", ranks, 1), ("own", 1, ranks)):
        planned = plan(samples[: 2 * ranks] if way == "short" else samples, tokens)
        schedule = planned.schedule(world_size=ranks // group, degrees=degrees)
        packs = [pack for step in schedule.steps(rank=dist.get_rank() // group) for (pack,) in step.batches]
        with sharing_by(None if way == "own" else group):
            _train(model, planned, packs[:1], groups, options.vocabulary)  # libraries prepare themselves
            found[way] = _train(model, planned, packs, groups, options.vocabulary)
    return found


def _train(
    model: Any, planned: Plan, packs: list[int], groups: Any, vocabulary: int
) -> tuple[int, float, dict[int, tuple[float, int]]]:
    """Train packs; return peak bytes, processor seconds, and each pack's summed loss and tokens."""
    import torch

    from benchmarks.peak import PeakOfTensors

    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    peak, seconds, losses = 0, 0.0, {}
    for pack in packs:
        positions = torch.cat([torch.arange(planned.lengths[one]) for one in planned.packs[pack]])[None]
        ids = torch.randint(0, vocabulary, positions.shape, generator=torch.Generator().manual_seed(pack))
        labels, started = ids.masked_fill(positions == 0, IGNORED_LABEL), time.process_time()
        with PeakOfTensors(model) as mode:
            held = mode.peak
            loss = model(input_ids=ids, position_ids=positions, use_cache=False, labels=labels).loss
            (loss / groups.degree_of(positions.numel())).backward()
        seconds += time.process_time() - started
        peak, tokens = max(peak, mode.peak - held), int((positions > 0).sum())
        losses[pack] = float(loss.detach()) * tokens, tokens
    return peak, seconds, losses
