"""
Measure and plan a run before it; `app.sft run.yaml` then starts training at once.

Under torchrun every rank measures a slice of the samples, into an output folder that all ranks see;
the result is the same, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from app.cli.command import add_config_arguments, positive_number
from app.training.schedule import require_static
from app.wiring import stores
from core.errors import ConfigError
from core.ports import LengthSource


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

    from app.plan.building import build, list_failures
    from app.wiring import training

    splits = [options.split] if options.split else ["train", "eval"]
    if options.list_failures:
        list_failures(_chosen(training.open_samples(config), splits))
        return
    with training.joined_ranks({"use_cpu": True}) as group:
        require_static(config)
        verdict = training.ask_before_measuring(config)
        samples = _chosen(training.open_samples(config, measuring_ranks=training.local_ranks()), splits)
        build(config, group, samples=samples, world_size=options.world_size)
        if verdict is not None and group.rank == 0:
            training.keep_verdict(config, verdict)


def _chosen(samples: Mapping[str, LengthSource], splits: list[str]) -> dict[str, LengthSource]:
    chosen = {split: source for split, source in samples.items() if split in splits}
    if not chosen:
        raise ConfigError.of("custom.val_jsonl", "is not set, so there is no eval split")
    return chosen
