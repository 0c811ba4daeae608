"""
Show what is stored: which samples the plan leaves out, how full its packs are, and how many steps
training takes. With --all, every figure.

Reads the artefacts of build alone: no data, no model, neither torch nor ms-swift. Whether they
still fit the data is what verify finds. With --pack or --sample, one pack or sample is explained.
"""

import argparse
import json
import os
from typing import Any

from rich.console import Console
from rich.table import Table

from packplan.app.cli.command import add_config_arguments, whole_number, world_size
from packplan.app.cli.console import plain_console
from packplan.app.cli.forecasts import add_price
from packplan.app.plan.explain import as_text, explain_pack, explain_sample
from packplan.app.plan.figures import deciding, epoch_lines, epoch_rows, figures
from packplan.app.plan.stored import PlanView, as_document, inspect_plan, splits_of
from packplan.app.wiring.commands import read_run
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError, DataSetError, counted

SHOWN = 10
"""Epochs that are printed without --all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", help="ranks (default: the most that were built for)"
    )
    parser.add_argument(
        "--epoch", type=whole_number, metavar="N", help="where epochs have plans of their own: this one (default: 0)"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--pack", type=whole_number, metavar="N", help="explain this pack of the plan, from 0")
    one.add_argument("--sample", type=whole_number, metavar="N", help="explain this sample, from 0")
    parser.add_argument(
        "--text", action="store_true", help="with --sample: its text as the model gets it, and which of it is trained"
    )
    add_price(parser)
    parser.add_argument("--all", action="store_true", help="every figure and digest, and each source")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Open the plans, then print."""
    if options.text and options.sample is None:
        raise ConfigError.at("--text", "is of one sample: name it by --sample")
    config = read_run(options.config, options.overrides, world_size=options.world_size)
    explained = options.pack is not None or options.sample is not None
    splits = splits_of(config, options.split or ("train" if explained else None))
    views = [
        # An evaluation has one epoch.
        inspect_plan(
            config,
            split,
            world_size=options.world_size,
            epoch=options.epoch if split == "train" else None,
            price=options.price,
        )
        for split in splits
    ]
    if explained:
        explain, number = (explain_pack, options.pack) if options.sample is None else (explain_sample, options.sample)
        document = explain(config, views[0], number)
        if options.text:
            document["text"] = _text_of(config, views[0], options.sample)
        print(json.dumps(document, indent=2) if options.json else "\n".join(as_text(document, emphasise=in_green)))
    elif options.json:
        print(json.dumps({"splits": {one.stored.name: as_document(one) for one in views}}, indent=2))
    else:
        for one in views:
            _print(one, everything=options.all)


def in_green(text: str) -> str:
    """Return a text in green, where a terminal shows colours; NO_COLOR wants none."""
    # datasets replaces the environment where it maps rows in processes, and rich keeps the former.
    console = Console(_environ=os.environ)
    return text if console.color_system is None or console.no_color else f"\x1b[32m{text}\x1b[39m"


def _text_of(config: RunConfig, view: PlanView, sample: int) -> list[dict[str, Any]]:
    """Return a sample's runs of tokens that are trained or not, decoded."""
    # ms-swift takes seconds to import, which no other look at a plan needs.
    from packplan.app.wiring.splits import open_encoders

    encoder = open_encoders(config)[view.stored.name]
    measured, parts = view.stored.lengths.origin.num_records, encoder.num_parts
    if len(encoder) != measured * parts:
        message = (
            f"the data have {counted(len(encoder) // parts, 'record')} now, but {measured:,} were measured: build again"
        )
        raise DataSetError(message)
    runs = (run for part in range(parts) for run in encoder.decoded(sample * parts + part))
    return [{"trained": trained, "text": text} for trained, text in runs]


def _print(view: PlanView, *, everything: bool) -> None:
    console = plain_console(100)
    console.print(f"{view.stored.name}: {view.stored.where}", style="bold")
    for line in view.warnings:
        console.print(f"warning: {line}", style="yellow")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for group in figures(view) if everything else [deciding(view)]:
        for row in group:
            table.add_row(*row)
        table.add_section()
    console.print(table, soft_wrap=False)
    if view.epochs is not None:
        _print_epochs(console, view, most=None if everything else SHOWN)
    checksums = as_document(view)["checksums"]
    if not everything:
        console.print(f"raw_plan {checksums['raw_plan']}; --all prints every figure")
        return
    for name, digest in checksums.items():
        console.print(f"{name} {digest}")
    for name, key in (("lengths", view.stored.lengths.origin.key), ("plan", view.stored.plan.key)):
        console.print(f"fingerprint of the {name} {key.digest}")


def _print_epochs(console: Console, view: PlanView, *, most: int | None) -> None:
    """Print a line for each epoch, at most so many, and what the one that is shown draws."""
    head, *rows = epoch_rows(view)
    table = Table()
    for name in head:
        table.add_column(name, justify="left" if name == "sources" else "right", overflow="fold")
    for row in rows[:most]:
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    if most is not None and len(rows) > most:
        console.print(f"… and {counted(len(rows) - most, 'epoch')}; --all prints each")
    for line in epoch_lines(view):
        console.print(line)
