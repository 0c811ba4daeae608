"""
Measure the processor time in which a loader makes a pack of tokenized rows, and compare this time
with that of transformers' own collator.

All ways read the same rows in turn. `RowsOfPacks` with `PackInputs` checks the form and length of
each row, and compares the row's digest with the digest of the first reading.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import attrs

from benchmarks.options import add_number
from benchmarks.table import show

FLATTENING = "DataCollatorWithFlattening"
"""Name of the way with which the others are compared."""


@attrs.frozen
class LoaderRow:
    """Processor time of one way to make packs."""

    way: str

    seconds: float
    """Processor seconds of a pack; the median over rounds."""

    over_flattening: float
    """Ratio to the time of transformers' collator in the same rounds; the median over rounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_number(parser, "--packs", 100, "packs of a round")
    add_number(parser, "--samples", 40, "samples of a pack")
    add_number(parser, "--tokens", 100, "tokens of a sample, half of which are supervised")
    add_number(parser, "--rounds", 5, "rounds that count", metavar="R")


def run(options: argparse.Namespace) -> None:
    """Measure each way, and print a table."""
    ways = _ways(options)
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds + 1):
        rounds.append({})
        for name, make in ways.items():
            start = time.process_time()
            for pack in range(options.packs):
                make(pack)
            rounds[-1][name] = (time.process_time() - start) / options.packs
    del rounds[0]  # it warms up
    rows = [
        LoaderRow(
            name,
            statistics.median(one[name] for one in rounds),
            statistics.median(one[name] / one[FLATTENING] for one in rounds),
        )
        for name in ways
    ]
    columns = {
        "way": lambda row: row.way,
        "us/pack": lambda row: f"{1e6 * row.seconds:,.0f}",
        "of flattening": lambda row: f"{row.over_flattening:.2f}",
    }
    show(rows, columns, left={"way"}, as_json=options.json, packages=("torch", "transformers"))


def _ways(options: argparse.Namespace) -> dict[str, Callable[[int], Any]]:
    """Return a function for each way, by name, which makes the pack with a given index."""
    import torch
    from transformers import DataCollatorWithFlattening

    import packplan as pp
    from packplan.hf import PackInputs, RowsOfPacks

    torch.set_num_threads(1)
    draw = random.Random(0)  # noqa: S311  # no secret
    rows = []
    for _ in range(options.packs * options.samples):
        ids = [draw.randrange(32_000) for _ in range(options.tokens)]
        rows.append({"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]})
    plan = pp.plan([options.tokens] * len(rows), options.samples * options.tokens)
    packs, collate, flatten = RowsOfPacks(rows, plan), PackInputs(), DataCollatorWithFlattening()
    packs.inspect()

    def join(pack: int) -> list[list[int]]:
        samples = [rows[index] for index in plan.packs[pack]]
        return [[*chain.from_iterable(row[name] for row in samples)] for name in ("input_ids", "labels")]

    return {
        "RowsOfPacks, PackInputs": lambda pack: collate([packs[pack]]),
        FLATTENING: lambda pack: flatten([rows[index] for index in plan.packs[pack]]),
        "lists joined": join,
    }
