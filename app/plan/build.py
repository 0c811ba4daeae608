"""
Measure and plan a run before it; `app.sft run.yaml` then starts training at once.

Under torchrun every rank measures a slice of the samples, into an output folder that all ranks see;
the result is the same, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from app.cli.command import add_config_arguments, positive_number
from app.planning.split import GatheredSplit
from app.training.schedule import require_static
from app.wiring import stores
from core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    parser.add_argument(
        "--world-size", type=positive_number, metavar="N", help="ranks to align for (default: those that build)"
    )
    parser.add_argument(
        "--list-failures", action="store_true",
        help="encode every record in full, list all that cannot become samples, and store nothing",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Build, or list what cannot be built."""
    config = stores.read_config(options.config, options.overrides)
    stores.require_inputs(config)

    from app.plan.building import build, list_failures
    from app.wiring.gather import gather
    from app.wiring.training import ask_before_measuring, joined_ranks, keep_verdict, local_ranks

    if options.list_failures:
        list_failures(_chosen(gather(config).splits, options.split))
        return
    with joined_ranks({"use_cpu": True}) as group:
        require_static(config)
        verdict = ask_before_measuring(config)
        splits = _chosen(gather(config, measuring_ranks=local_ranks()).splits, options.split)
        build(config, group, splits=splits, world_size=options.world_size)
        if verdict is not None and group.rank == 0:
            keep_verdict(config, verdict)


def _chosen(splits: Mapping[str, GatheredSplit], wanted: str | None) -> list[GatheredSplit]:
    chosen = [split for name, split in splits.items() if wanted in (None, name)]
    if not chosen:
        raise ConfigError.of("custom.val_jsonl", "is not set, so there is no eval split")
    return chosen
