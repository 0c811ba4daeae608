"""A mix of data sets for one epoch -> one data file, which a static plan takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from packplan.app.cli.command import add_config_arguments, whole_number
from packplan.app.wiring.mixes import materialise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser, "mix", metavar="mix.yaml", about="sources and their shares; see docs/mixing.md")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="mix.jsonl", help="what to write")
    parser.add_argument("--seed", type=whole_number, default=42, metavar="N", help="of draw and order (default: 42)")
    parser.add_argument(
        "--epoch", type=whole_number, default=0, metavar="N", help="from 0; each is mixed again (default: 0)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the mix."""
    materialise(options.mix, options.output, overrides=options.overrides, seed=options.seed, epoch=options.epoch)
