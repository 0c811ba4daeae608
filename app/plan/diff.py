"""
Compare two runs: which inputs differ, which samples moved between packs, and which figures changed.

Each is a run.yaml, or the output folder of a run; the second may be the words of a command. Folders
have no figures of training. Overrides are of each that is a YAML. Samples are compared by their
place in the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from packplan.app.cli.command import add_overrides, positive_number
from packplan.app.cli.console import plain_console
from packplan.app.plan.stored import StoredSplit, inspect_plan, open_split
from packplan.app.wiring import stores
from packplan.app.wiring.commands import is_program, read_run
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError, Difference
from packplan.core.fingerprint import field_differences
from packplan.core.inspection import PlanDifference, plan_difference

SHOWN = 20
"""Samples of each kind that people see; programs see all."""

MEANINGS = {
    "moved": "in a pack of both, but with other samples",
    "lost": "in a pack of the first alone",
    "gained": "in a pack of the second alone",
    "resized": "of another length",
}


@attrs.frozen
class Side:
    """One of the two runs that are compared."""

    name: str
    output_dir: str
    config: RunConfig | None

    @classmethod
    def from_name(cls, name: str, overrides: Sequence[str]) -> Side:
        """Open a YAML, some of its keys overridden, or an output folder."""
        if Path(name).is_dir():
            return cls(name, name, None)
        config = read_run(name, overrides)
        return cls(name, config.training.output_dir, config)

    def open(self, split: str) -> StoredSplit:
        """Return the stored lengths and plan of a split; NotBuiltError if one is missing."""
        return open_split(split, stores.stores_in(self.output_dir, split))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("first", metavar="A", help="a run.yaml, or an output folder")
    parser.add_argument("second", metavar="B", help="another one")
    add_overrides(parser)
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that both have)")
    parser.add_argument(
        "--world-size",
        type=positive_number,
        metavar="N",
        help="ranks of both (default: the most that each was built for)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Compare, then print."""
    overrides = [] if is_program(options.second) else options.overrides
    first, second = Side.from_name(options.first, overrides), Side.from_name(options.second, options.overrides)
    if options.overrides and first.config is second.config is None:
        raise ConfigError.at(options.overrides[0], "overrides a key of a YAML, but A and B are folders: remove it")
    both_have_eval = all(stores.has_split(side.output_dir, "eval") for side in (first, second))
    splits = [options.split] if options.split else ["train", *(["eval"] if both_have_eval else [])]
    compared = {split: _compare(first, second, split, options.world_size) for split in splits}
    if options.json:
        print(json.dumps({"first": first.name, "second": second.name, "splits": compared}, indent=2))
        return
    console = plain_console()
    for split, document in compared.items():
        _print(console, split, document)


def _compare(first: Side, second: Side, split: str, world_size: int | None) -> dict[str, Any]:
    one, other = first.open(split), second.open(split)
    samples = plan_difference(one.plan.plan, other.plan.plan, one.lengths.tokens, other.lengths.tokens)
    figures = field_differences(one.summary(), other.summary())
    if first.config is not None and second.config is not None:
        views = [inspect_plan(config, split, world_size=world_size) for config in (first.config, second.config)]
        figures += field_differences(*(view.schedule_summary for view in views))
    return {
        "inputs": _as_rows(_input_differences(one, other)),
        "samples": {field.name: getattr(samples, field.name).tolist() for field in attrs.fields(PlanDifference)},
        "figures": _as_rows(figures),
    }


def _input_differences(one: StoredSplit, other: StoredSplit) -> Iterable[Difference]:
    yield from one.lengths.origin.key.differences(other.lengths.origin.key)
    for name in ("num_records", "data_digest"):
        values = getattr(one.lengths.origin, name), getattr(other.lengths.origin, name)
        if values[0] != values[1]:
            yield Difference(f"data.{name}", *values)
    yield from (
        attrs.evolve(difference, key=f"plan.{difference.key}")
        for difference in one.plan.key.differences(other.plan.key)
    )


def _as_rows(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    return [{"key": one.key, "first": one.stored, "second": one.current} for one in differences]


def _print(console: Console, split: str, document: dict[str, Any]) -> None:
    console.print(f"{split}:", style="bold")
    for part in ("inputs", "figures"):
        rows = [f"    {row['key']}: {_format(row['first'])} -> {_format(row['second'])}" for row in document[part]]
        console.print("\n".join([f"  {part}{'' if rows else ': the same'}", *rows]))
    moved = {name: found for name, found in document["samples"].items() if found}
    console.print(f"  samples{'' if moved else ': each in the same pack'}")
    for name, found in moved.items():
        places = ", ".join(map(str, found[:SHOWN])) + (", …" if len(found) > SHOWN else "")
        console.print(f"    {len(found):,} {name} ({MEANINGS[name]}): {places}")


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
