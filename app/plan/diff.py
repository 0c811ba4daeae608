"""
Compare two plans: their inputs, packs and steps, and which samples are in different packs. The exit
status is 3 if anything differs.

A and B may each be a run.yaml that has a plan, the output folder of a run, or a checkpoint. B
may also be an ms-swift command. Samples are compared by their index in the data. The packs of a
checkpoint are compared if the folder of its run still stores them.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from packplan.app.cli.command import add_overrides, parse_ranks, plain_console
from packplan.app.opening.commands import read_run_or_command
from packplan.app.opening.stores import find_stored_plan, read_resume_state
from packplan.app.plan.show import schedule_summary
from packplan.app.plan.stored import open_split, selected_splits, yield_stale_inputs
from packplan.app.planning.log_lines import SHOWN
from packplan.core.config.identity import PATH_KEYS, run_identity
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, MismatchError, NotBuiltError, counted, format_ranges
from packplan.core.fingerprint import Fingerprint, RunIdentity
from packplan.core.inspection import compare_packs
from packplan.core.packs import Packs, plan_checksum
from packplan.core.ports import StoredLengths, StoredPlan

KINDS = {"new": "only in a pack of B", "gone": "only in a pack of A", "moved": "in a pack with other samples"}
"""Kind of samples that two plans pack differently -> its meaning."""

_COUNTS = ("num_samples", "num_tokens", "planned_samples", "dropped_samples", "lower_bound", "fill")


Facts = dict[str, Mapping[str, Any]]
"""Inputs and counts of a plan by group, such as `data`, `lengths` and `plan`."""

Side = tuple[Facts, Packs | None]
"""
Facts about a plan, and its packs; None instead of packs if a checkpoint's packs are no longer
stored.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("first", metavar="A", help="a run.yaml, an output folder or a checkpoint")
    parser.add_argument("second", metavar="B", help="a path as A, or a command; overrides change its keys")
    add_overrides(parser)
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="split (default: train)")
    parser.add_argument("--world-size", type=parse_ranks, metavar="N", help="ranks (default: as in plan show)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def run(options: argparse.Namespace) -> None:
    """Print the differences of A and B; MismatchError if there are any."""
    facts, packs = _open_side(options.first, (), options.split, options.world_size)
    others, other_packs = _open_side(options.second, options.overrides, options.split, options.world_size)
    rows = [
        {"key": f"{group}.{one.key}", "first": one.stored, "second": one.current}
        for group in facts
        if group in others
        for one in Fingerprint(facts[group]).differences(Fingerprint(others[group]))
    ]
    known = packs is not None and other_packs is not None
    changed = compare_packs(packs, other_packs) if packs is not None and other_packs is not None else {}
    samples = {kind: found.tolist() for kind, found in changed.items() if found.size}
    if options.json:
        print(json.dumps({"facts": rows, "samples": samples if known else None}, indent=2))
    else:
        table = Table("differs", f"A: {options.first}", f"B: {options.second}")
        for row in rows:
            table.add_row(str(row["key"]), *(_value_text(row[side]) for side in ("first", "second")))
        if rows:
            plain_console(width=1000).print(table, soft_wrap=False)
        for kind, found in samples.items():
            print(f"{counted(len(found), 'sample')} {kind}, {KINDS[kind]}: {format_ranges(found, most=SHOWN)}")
        if not samples:
            print("all samples are in the same packs" if known else "samples are not compared: packs are not stored")
    if rows or samples:
        counts = f"{counted(len(rows), 'fact')} and {counted(sum(map(len, samples.values())), 'sample')}"
        raise MismatchError("plans_differ", f"{options.first} and {options.second} differ in {counts}")


def _value_text(value: Any) -> str:
    """Return a value as short text: 12 characters of a digest, and 6 digits of a float."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "unset" if value is None else str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{64}", text) else text


def _open_side(name: str, words: Sequence[str], split: str, world_size: int | None) -> Side:
    """Open a run, with *words* as overrides, or the folder of a run or a checkpoint."""
    folder = Path(name)
    if not folder.is_dir():
        return _run_side(read_run_or_command(name, words, world_size=world_size), split, world_size)
    if words:
        raise ConfigError.for_key(words[0], f"overrides a key of a YAML, but {name} is a folder: leave it out")
    state = read_resume_state(folder)
    if state is None:
        return _stored_side(*find_stored_plan(folder, split))
    if split != "train":
        raise ConfigError.for_key("--split", f"is {split}, but a checkpoint has only the plan of the training data")
    known: Facts = {"packs": {"checksum": state.plan}, "plan": state.inputs, "run": _settings(state.identity)}
    known |= {"data": {"sha256": state.data}, "order": {"seed": state.seed, "shuffle": state.shuffle}}
    facts = {group: held for group, held in known.items() if held}  # a plan of the library has no inputs
    with suppress(NotBuiltError):
        stored, packs = _stored_side(*find_stored_plan(folder.parent, split))
        if stored["packs"] == facts["packs"]:
            return {**stored, **facts}, packs
    return facts, None


def _run_side(config: RunConfig, split: str, world_size: int | None) -> Side:
    opened = open_split(config, *selected_splits(config, split), world_size=world_size)
    stale = opened.plan.key.differences(opened.split.plan_key(opened.lengths.digest))
    again = (f"training would plan again, since a setting has changed: {one}" for one in stale)
    for line in (*yield_stale_inputs(config, opened.lengths), *again):
        print(f"warning: {config.source}: {line}", file=sys.stderr)
    facts, packs = _stored_side(opened.plan, opened.lengths)
    schedule = schedule_summary(opened)
    facts["order"] = {"seed": opened.schedule.seed, "shuffle": opened.schedule.shuffle}
    facts["run"] = _settings(run_identity(config, files={}, model={}))
    facts["steps"] = {key: getattr(schedule, key) for key in ("world_size", "steps_per_epoch", "total_steps")}
    return facts, packs


def _stored_side(stored: StoredPlan, lengths: StoredLengths | None) -> Side:
    plan, checksum = stored.plan, stored.key.digest if stored.epochs else plan_checksum(stored.plan.packs)
    counts = {"num_packs": len(plan.packs), **{name: getattr(plan, name) for name in _COUNTS}}
    facts: Facts = {"plan": stored.key.inputs, "packs": {"checksum": checksum}, "counts": counts}
    if lengths is not None:
        facts |= {"data": {"sha256": lengths.origin.data_digest}, "lengths": lengths.origin.key.inputs}
    return facts, plan.packs


def _settings(identity: RunIdentity) -> dict[str, Any]:
    """
    Return the settings of training. The content of settings files is left out, since only a
    checkpoint has this content.
    """
    held, files = {**identity.fixed.inputs, **identity.changeable.inputs}, tuple(PATH_KEYS)
    return {key: held[key] for key in held if key.startswith("training.") and not key.startswith(files)}
