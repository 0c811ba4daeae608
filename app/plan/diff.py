"""
Compare two plans: which inputs differ, which samples are in another pack, and the packs and steps.
The exit status is 3 if anything differs.

A and B are each a run.yaml that is built, the output folder of a run, or a checkpoint; B may also
be the words of a command. Samples are compared by their place in the data. The packs of a
checkpoint are known as long as the folder of its run has them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from packplan.app.cli.command import add_overrides, parse_ranks
from packplan.app.plan.show import schedule_summary
from packplan.app.plan.stored import open_split, selected_splits
from packplan.app.planning.log_lines import SHOWN
from packplan.app.planning.stored_lengths import yield_stale_inputs
from packplan.app.wiring.commands import read_run_or_command
from packplan.app.wiring.stores import find_stored_plan, read_resume_state
from packplan.core.checksum import plan_checksum
from packplan.core.config.identity import PATH_KEYS, run_identity
from packplan.core.errors import ConfigError, MismatchError, NotBuiltError, counted, format_ranges
from packplan.core.fingerprint import Fingerprint, RunIdentity
from packplan.core.inspection import compare_packs
from packplan.core.packs import Packs
from packplan.core.ports import StoredLengths, StoredPlan

KINDS = {"new": "in a pack of B alone", "gone": "in a pack of A alone", "moved": "in a pack with other samples"}
"""Kind of samples that two plans pack differently -> its meaning."""

_COUNTS = ("num_samples", "num_tokens", "planned_samples", "dropped_samples", "lower_bound", "fill")


@attrs.frozen(eq=False)
class Side:
    """One of two plans that are compared, as far as it is known."""

    facts: Mapping[str, Mapping[str, Any]]
    """Inputs and counts by group, such as `data`, `lengths` and `plan`."""

    packs: Packs | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("first", metavar="A", help="a run.yaml, an output folder or a checkpoint")
    parser.add_argument("second", metavar="B", help="another one, whose keys may be overridden")
    add_overrides(parser)
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="split (default: train)")
    parser.add_argument("--world-size", type=parse_ranks, metavar="N", help="ranks (default: most that each is for)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def run(options: argparse.Namespace) -> None:
    """Print the differences of A and B; MismatchError if there are any."""
    one = _open_side(options.first, (), options.split, options.world_size)
    other = _open_side(options.second, options.overrides, options.split, options.world_size)
    facts = [
        {"key": f"{group}.{found.key}", "first": found.stored, "second": found.current}
        for group in sorted(one.facts.keys() & other.facts.keys())
        for found in Fingerprint(one.facts[group]).differences(Fingerprint(other.facts[group]))
    ]
    samples = None
    if one.packs is not None and other.packs is not None:
        changed = compare_packs(one.packs, other.packs)
        samples = {kind: found.tolist() for kind, found in changed.items() if found.size}
    number = len({sample for found in (samples or {}).values() for sample in found})
    print(
        json.dumps({"facts": facts, "samples": samples}, indent=2)
        if options.json
        else "\n".join(_lines(facts, samples))
    )
    if facts or number:
        counts = f"{counted(len(facts), 'fact')} and {counted(number, 'sample')}"
        raise MismatchError("plans_differ", f"{options.first} and {options.second} differ in {counts}")


def _lines(facts: Sequence[Mapping[str, Any]], samples: Mapping[str, Sequence[int]] | None) -> Iterator[str]:
    yield from (f"{row['key']}: {row['first']!r} -> {row['second']!r}" for row in facts)
    if samples is None:
        yield "samples are not compared: the packs of a checkpoint are no longer stored"
    elif not samples:
        yield "all samples are in the same packs"
    for kind, found in (samples or {}).items():
        yield f"{counted(len(found), 'sample')} {kind}, {KINDS[kind]}: {format_ranges(found, most=SHOWN)}"


def _open_side(name: str, words: Sequence[str], split: str, world_size: int | None) -> Side:
    """Open a run, of which *words* are overrides, or a folder of a run or a checkpoint."""
    folder = Path(name)
    if not folder.is_dir():
        config = read_run_or_command(name, words, world_size=world_size)
        opened = open_split(config, *selected_splits(config, split), world_size=world_size)
        stale = opened.plan.key.differences(opened.split.plan_key(opened.lengths.digest))
        for line in (*yield_stale_inputs(config, opened.lengths), *stale):
            print(
                f"warning: {name}: compared is what is stored, and training would plan again: {line}", file=sys.stderr
            )
        schedule = schedule_summary(opened)
        side = _stored_side(opened.plan, opened.lengths)
        facts: dict[str, Mapping[str, Any]] = {
            "order": {"seed": opened.schedule.seed, "shuffle": opened.schedule.shuffle},
            "run": _settings(run_identity(config, files={}, model={})),
            "steps": {key: getattr(schedule, key) for key in ("world_size", "steps_per_epoch", "total_steps")},
        }
        return attrs.evolve(side, facts={**side.facts, **facts})
    if words:
        raise ConfigError.for_key(words[0], f"overrides a key of a YAML, but {name} is a folder: leave it out")
    state = read_resume_state(folder)
    if state is None:
        return _stored_side(*find_stored_plan(folder, split))
    if split != "train":
        raise ConfigError.for_key("--split", f"is {split}, but a checkpoint is of the training data alone")
    known: dict[str, Mapping[str, Any]] = {
        "data": {"sha256": state.data},
        "order": {"seed": state.seed, "shuffle": state.shuffle},
        "packs": {"checksum": state.plan},
        "plan": state.inputs,
        "run": _settings(state.identity),
    }
    facts = {group: held for group, held in known.items() if held}  # a plan of the library has no inputs
    with suppress(NotBuiltError):
        side = _stored_side(*find_stored_plan(folder.parent, "train"))
        if side.facts["packs"]["checksum"] == state.plan:
            return attrs.evolve(side, facts={**side.facts, **facts})
    return Side(facts)  # whose packs are no longer stored


def _stored_side(stored: StoredPlan, lengths: StoredLengths | None) -> Side:
    plan = stored.plan
    facts: dict[str, Mapping[str, Any]] = {
        "plan": stored.key.inputs,
        "packs": {"checksum": stored.key.digest if stored.epochs else plan_checksum(plan.packs)},
        "counts": {"num_packs": len(plan.packs), **{name: getattr(plan, name) for name in _COUNTS}},
    }
    if lengths is not None:
        facts |= {"data": {"sha256": lengths.origin.data_digest}, "lengths": lengths.origin.key.inputs}
    return Side(facts, plan.packs)


def _settings(identity: RunIdentity) -> dict[str, Any]:
    """Return the settings of training, without files: only a checkpoint has their content."""
    held, files = {**identity.fixed.inputs, **identity.told.inputs}, tuple(PATH_KEYS)
    return {key: held[key] for key in held if key.startswith("training.") and not key.startswith(files)}
