"""
Compare the time of planning another epoch with the time of only packing its lengths.

Both are timed in turn in one process, and medians are reported. Planning an epoch draws its
samples, packs them, drops underfilled packs, sorts packs, and computes a quick bound. The time of
making the epoch's record, with its digests, is reported separately.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import attrs
import numpy as np

from benchmarks.child import NotMeasuredError, run_in_child
from benchmarks.distributions import DISTRIBUTIONS
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from packplan.core.epochs import EpochRecipe, RecordLengths, epoch_selection, plan_epoch, record_epoch
from packplan.core.lengths import IntArray
from packplan.core.mixes import Mix, Mixes, Source
from packplan.core.packers import pack
from packplan.core.policy import PlanPolicy


def _mix(*, replacement: bool = False, **keys: Any) -> Mixes:
    """Return a mix of three sources, with shares of 40, 30 and 30 %."""
    ratios = zip("abc", (4, 3, 3), strict=True)
    sources = [Source(jsonl=name, ratio=Decimal(ratio), replacement=replacement) for name, ratio in ratios]
    return Mixes((Mix(sources=tuple(sources), **keys),))


KINDS: Mapping[str, Callable[[IntArray], tuple[EpochRecipe, dict[str, Any]]]] = {
    "replanned": lambda _: (EpochRecipe(), {"replanned": True}),
    "mix": lambda lengths: (EpochRecipe(mixes=_mix(replacement=True, samples_per_epoch=lengths.size)), {}),
    "mix by tokens": lambda lengths: (
        EpochRecipe(mixes=_mix(replacement=True, by="tokens", tokens_per_epoch=int(lengths.sum()))),
        {},
    ),
}
"""Kind of epochs -> function of lengths that returns the recipe and fields of the policy."""


@attrs.frozen
class EpochRow:
    """Figures of one kind of epochs, or the problem that prevented them."""

    distribution: str
    samples: int
    kind: str
    problem: str | None = None
    pack_seconds: float = 0.0
    """Seconds of packing an epoch's lengths."""

    times_pack: float = 0.0
    """Time of planning another epoch, divided by `pack_seconds`."""

    record_times_pack: float = 0.0
    """Time of making the epoch's record, divided by `pack_seconds`."""


COLUMNS: Columns = {
    "lengths": lambda row: row.distribution,
    "samples": lambda row: f"{row.samples:,}",
    "epochs": lambda row: row.kind,
    "pack s": lambda row: row.problem or f"{row.pack_seconds:.3g}",
    "an epoch x pack": lambda row: "" if row.problem else f"{row.times_pack:.2f}",
    "its record x pack": lambda row: "" if row.problem else f"{row.record_times_pack:.2f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_number(parser, "--samples", 1_000_000, "samples of the data set")
    add_names(parser, "--distributions", DISTRIBUTIONS, ["chat-4096"], "; the number in a name is the capacity")
    add_number(parser, "--repeat", 7, "runs of each kind")
    add_number(parser, "--limit-s", 300, "limit of seconds for all runs of a kind", metavar="S")


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    rows = []
    for name in options.distributions:
        for kind in KINDS:
            row = EpochRow(name, options.samples, kind)
            try:
                found = run_in_child(partial(_measured, name, kind, options), limit_s=options.limit_s)
                rows.append(attrs.evolve(row, **found))
            except NotMeasuredError as error:
                rows.append(attrs.evolve(row, problem=str(error)))
    show(rows, COLUMNS, left={"lengths", "epochs"}, as_json=options.json)


def _measured(name: str, kind: str, options: argparse.Namespace) -> dict[str, float]:
    distribution = DISTRIBUTIONS[name]
    lengths = distribution.lengths(options.samples, seed=0)
    recipe, fields = KINDS[kind](lengths)
    thirds = lengths.size * np.array([4, 3, 3]) // 10
    sizes = (*thirds[:2].tolist(), lengths.size - int(thirds[:2].sum()))
    policy = PlanPolicy(packing_length=distribution.capacity, **fields)
    samples = RecordLengths(lengths=lengths, sizes=sizes)
    seconds: dict[str, list[float]] = {"pack": [], "plan": [], "record": []}
    for epoch in range(options.repeat):
        selection = epoch_selection(recipe, policy, samples, epoch)
        drawn = np.minimum(lengths[selection], policy.packing_length)
        started = time.perf_counter()
        pack(drawn, capacity=policy.packing_length)
        packed = time.perf_counter()
        plan = plan_epoch(recipe, policy, samples, epoch, quick_bound=True)
        planned = time.perf_counter()
        record_epoch(plan, samples)
        seconds["record"].append(time.perf_counter() - planned)
        seconds["plan"].append(planned - packed)
        seconds["pack"].append(packed - started)
    middle = {part: statistics.median(values) for part, values in seconds.items()}
    return {
        "pack_seconds": middle["pack"],
        "times_pack": middle["plan"] / middle["pack"],
        "record_times_pack": middle["record"] / middle["pack"],
    }
