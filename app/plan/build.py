"""
Measure and plan a run before it; `packplan sft run.yaml` then starts training at once.
"""

import argparse
import json
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, positive_number, to_type
from packplan.app.planning.bad import ReasonCounts
from packplan.app.planning.epochs import plan_epochs
from packplan.app.planning.log_lines import log_epochs, log_plan, log_schedule, steps_line
from packplan.app.planning.measure import failures
from packplan.app.planning.schedule import batch_of, require_static, split_schedule, warn_of_ignored
from packplan.app.planning.split import Ranks, Split, plan_split
from packplan.app.wiring import stores
from packplan.app.wiring.attention import keep_verdict
from packplan.app.wiring.commands import keep_command, ranks_of, read_run, require_inputs
from packplan.app.wiring.mixes import write_records, writing_failures
from packplan.app.wiring.works import work_of
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError, DataSetError, counted
from packplan.core.ports import RankGroup

log = logging.getLogger(__name__)

MOST_LISTED = 100
"""Failures that are printed one by one, and reasons that they are counted by, at most."""

WriteFailure = Callable[[Mapping[str, str]], None]
"""Function that takes a failure: its split, its place and its reason."""


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
    with nullcontext() if options.list_failures else stores.ranks_refuse_together():
        config = read_run(options.config, options.overrides, world_size=options.world_size)
        require_inputs(config)

        with loading_libraries():
            from packplan.app.wiring.splits import open_splits
            from packplan.app.wiring.training import ask_before_measuring, joined_ranks

    if options.list_failures:
        _list_failures(options, config)
        return
    together = {"--split": options.split, "--world-size": options.world_size}
    with joined_ranks(config, use_cpu=True, options=together) as group:
        require_static(config)
        world_size = ranks_of(config) or options.world_size or group.world_size
        batch_of(config, world_size=world_size)
        verdict = ask_before_measuring(config)
        splits = _choose_splits(open_splits(config), options.split)
        build(config, group, splits=splits, world_size=world_size)
        if group.rank == 0:
            if verdict is not None:
                keep_verdict(config, verdict)
            _log_next(config, [options.config, *options.overrides], world_size)


def _list_failures(options: argparse.Namespace, config: RunConfig) -> None:
    """List the records that cannot become samples, and write the files that the options name."""
    from packplan.app.wiring.splits import open_splits

    chosen = _choose_splits(open_splits(config), options.split)
    write_good = None
    open_file: Callable[[], AbstractContextManager[WriteFailure | None]] = nullcontext
    if options.write_good:
        if ranks_of(config) is not None:
            raise ConfigError.at("--write-good", "is for files: ms-swift leaves rows of a command out by itself")
        if len(chosen) > 1:
            raise ConfigError.at("--write-good", "writes one split: add --split train or --split eval")
        name = chosen[0].name
        paths = config.custom.train_jsonl if name == "train" else config.custom.val_jsonl
        records, columns = chosen[0].encoder.records, config.custom.columns
        write_good = partial(write_records, records, options.write_good, paths, columns=columns)
    if options.write_failures:
        good = [str(options.write_good)] if options.write_good else []
        read = [*config.custom.train_jsonl, *config.custom.val_jsonl, *good]
        open_file = partial(writing_failures, options.write_failures, read)
    list_failures(chosen, as_json=options.json, write_good=write_good, open_file=open_file)


def _log_next(config: RunConfig, words: list[str], world_size: int) -> None:
    """Log where the plan is, and the commands that show it and train it on so many ranks."""
    typed = config.training.output_dir if ranks_of(config) else shlex.join(words)
    train = f"torchrun --nproc-per-node {world_size} -m packplan.app.sft" if world_size > 1 else to_type("sft")
    train = f"{train} {typed}"
    if ranks_of(config):
        train = f"the command with --external_plugins plugin.py, which {to_type('plugin')} swift -o plugin.py writes"
    log.info(
        "the plan is in %s; to see it: %s %s; to train: %s",
        Path(config.training.output_dir) / "static_packing", to_type("plan show"), typed, train,
    )  # fmt: skip


def _choose_splits(splits: Mapping[str, Split], wanted: str | None) -> list[Split]:
    chosen = [split for name, split in splits.items() if wanted in (None, name)]
    if not chosen:
        raise ConfigError.at("custom.val_jsonl", "is not set, so there is no eval split")
    return chosen


def build(config: RunConfig, group: RankGroup, *, splits: Sequence[Split], world_size: int | None = None) -> None:
    """
    Measure and plan splits as training would.

    Args:
        config: The run.
        group: The ranks that measure.
        splits: Splits to build.
        world_size: Ranks to align for; None takes those that measure.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    if group.rank == 0:
        warn_of_ignored(config)
    ranks = Ranks(group, timeout_s=config.training.packing_wait_timeout_s)
    ranks.require_writable([split.stores.lock for split in splits])
    for split in splits:
        plan_split(split, ranks, world_size=world_size)
        if group.rank == 0:
            log_plan(split)
        if split.name != "train":
            continue
        schedule = split_schedule(config, split.name, split.aligned)
        if split.recipe is not None:
            split.works = work_of(config, split.table).samples
            schedule = plan_epochs(split, schedule, ranks)
        if group.rank == 0 and ranks_of(config):
            log.info("train: %s", steps_line(split, schedule))
        elif group.rank == 0:
            log_epochs(split, schedule)
            log_schedule(config, schedule)
    keep_command(config)


def list_failures(
    splits: Sequence[Split],
    *,
    as_json: bool = False,
    write_good: Callable[[list[int]], None] | None = None,
    open_file: Callable[[], AbstractContextManager[WriteFailure | None]] = nullcontext,
) -> None:
    """
    Print the first records that cannot become a sample, and count all by reason.

    Args:
        splits: Splits to look through.
        as_json: Print one JSON document instead of lines.
        write_good: Takes the other records of the only split.
        open_file: Opens what takes all failures.

    Raises:
        DataSetError: There is one.
    """
    reasons, first = ReasonCounts(), []
    with open_file() as write:
        for split in splits:
            bad = np.zeros(len(split.source), dtype=bool)
            for index, error in failures(split.name, split.source):
                bad[index] = True
                failure = {"split": split.name, "where": error.where, "reason": error.why}
                if write is not None:
                    write(failure)
                if reasons.total < MOST_LISTED:
                    first.append(failure)
                    if not as_json:
                        print(error)
                reasons.add(error.reason)
            if write_good is not None:
                write_good(np.flatnonzero(~bad).tolist())
        found, total = reasons.total, sum(len(split.source) for split in splits)
        by_reason = reasons.most_common(MOST_LISTED)
    if as_json:
        document = {"records": total, "num_failures": found, "failures": first, "reasons": by_reason}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif found > MOST_LISTED:
        print(f"… and {found - MOST_LISTED:,} more; all by reason, without what each record says:")
        print("\n".join(f"{count:>12,}  {reason}" for reason, count in by_reason.items()))
    if found:
        named = "what is named above" if found <= MOST_LISTED else "them (--write-failures FILE names all)"
        message = f"{found:,} of {counted(total, 'record')} cannot become samples: fix or remove {named}"
        raise DataSetError(message)
    log.info("all records can become samples")
