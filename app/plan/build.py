"""
Measure and plan a run before it; `packplan sft run.yaml` then starts training at once.

Under torchrun every rank measures a slice of the samples, into an output folder that all ranks see;
the result is the same, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, positive_number
from packplan.app.planning.schedule import require_static
from packplan.app.planning.split import GatheredSplit
from packplan.app.wiring import stores
from packplan.app.wiring.attention import keep_verdict
from packplan.app.wiring.mixes import write_records, writing_failures
from packplan.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    parser.add_argument(
        "--world-size", type=positive_number, metavar="N", help="ranks to align for (default: those that build)"
    )
    parser.add_argument(
        "--list-failures", action="store_true",
        help="encode every record in full, list those that cannot become samples, beyond 100 by reason, and store "
        "nothing",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --list-failures: print one JSON document")
    parser.add_argument(
        "--write-good", type=Path, metavar="FILE", help="with --list-failures: write the other records as JSON Lines"
    )
    parser.add_argument(
        "--write-failures", type=Path, metavar="FILE", help="with --list-failures: write all of them as JSON Lines"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Build, or list what cannot be built."""
    others = {"--write-good": options.write_good, "--write-failures": options.write_failures, "--json": options.json}
    if not options.list_failures and (given := [name for name, value in others.items() if value]):
        raise ConfigError.at(given[0], "goes with --list-failures: add it")
    if not options.list_failures:
        stores.require_ranks()
    config = stores.read_config(options.config, options.overrides)
    stores.require_inputs(config)

    with loading_libraries():
        from packplan.app.plan.building import build, list_failures
        from packplan.app.wiring.gather import gather
        from packplan.app.wiring.training import ask_before_measuring, joined_ranks, local_ranks

    if options.list_failures:
        gathered = gather(config)
        chosen = _chosen(gathered.splits, options.split)
        write_good = None
        if options.write_good:
            if len(chosen) > 1:
                raise ConfigError.at("--write-good", "writes one split: add --split train or --split eval")
            name = chosen[0].name
            paths = config.custom.train_jsonl if name == "train" else config.custom.val_jsonl
            write_good = partial(write_records, gathered.samples[name].records, options.write_good, paths)
        listed: dict[str, Any] = {}
        if options.write_failures:
            custom, good = config.custom, [str(options.write_good)] if options.write_good else []
            read = [*custom.train_jsonl, *custom.val_jsonl, *good]
            listed["open_file"] = partial(writing_failures, options.write_failures, read)
        list_failures(chosen, as_json=options.json, write_good=write_good, **listed)
        return
    together = {"--split": options.split, "--world-size": options.world_size}
    with joined_ranks(config, use_cpu=True, options=together) as group:
        require_static(config)
        verdict = ask_before_measuring(config)
        splits = _chosen(gather(config, measuring_ranks=local_ranks()).splits, options.split)
        build(config, group, splits=splits, world_size=options.world_size)
        if verdict is not None and group.rank == 0:
            keep_verdict(config, verdict)


def _chosen(splits: Mapping[str, GatheredSplit], wanted: str | None) -> list[GatheredSplit]:
    chosen = [split for name, split in splits.items() if wanted in (None, name)]
    if not chosen:
        raise ConfigError.at("custom.val_jsonl", "is not set, so there is no eval split")
    return chosen
