"""
Plan the stored lengths again with other packing lengths and on other numbers of ranks.

For each number of ranks the best is marked: the highest coverage x fill / imbalance (tokens planned
within the packing length, over all tokens; planned tokens over what the packs of all ranks hold;
the busiest rank's work over the mean rank's).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import attrs
from rich.table import Table

from packplan.adapters.progress import progress
from packplan.app.cli.command import add_config_arguments, positive_numbers, world_sizes
from packplan.app.cli.console import plain_console
from packplan.app.plan.stored import splits_of
from packplan.app.planning.schedule import split_schedule
from packplan.app.planning.split import Alignment, plan_table
from packplan.app.planning.stored_lengths import open_lengths, stale_inputs
from packplan.app.wiring import stores
from packplan.app.wiring.commands import ranks_of, read_run
from packplan.app.wiring.works import policy_of, work_of
from packplan.core.config import RunConfig, with_remedy
from packplan.core.errors import ConfigError, counted
from packplan.core.inspection import Alternative, PlanSummary, ScheduleSummary, best_of, what_if
from packplan.core.plan import RawPlan, refuse_dropped, refuse_longer
from packplan.core.ports import StoredLengths
from packplan.core.schedule import EpochSchedule

RULE = "coverage x fill / imbalance"

COLUMNS: Mapping[str, Callable[[PlanSummary, ScheduleSummary], str]] = MappingProxyType(
    {
        "packs": lambda plan, _: f"{plan.num_packs:,}",
        "fill": lambda plan, _: f"{plan.fill_mean:.4f}",
        "long": lambda plan, _: f"{plan.long_samples + plan.skipped_samples:,}",
        "longest": lambda plan, _: f"{plan.longest_pack:,}",
        "over 110 %": lambda plan, _: f"{plan.oversized_packs:,}",
        "dropped tokens": lambda plan, _: f"{plan.dropped_tokens + plan.skipped_tokens:,}",
        "steps": lambda _, schedule: f"{schedule.total_steps:,}",
        "work a step": lambda _, schedule: f"{schedule.work_per_step:.3g}",
        "imbalance": lambda _, schedule: f"{schedule.work_imbalance:.3f}",
    }
)
"""Column of the table -> text of a planned alternative."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="(default: %(default)s)")
    parser.add_argument(
        "--max-length", type=positive_numbers, metavar="N,N", help="template.max_length (default: the run's)"
    )
    parser.add_argument(
        "--world-size", type=world_sizes, metavar="N,N", help="ranks (default: 1, or those of a command)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Plan every combination, then print."""
    config = read_run(options.config, options.overrides)
    (split,) = splits_of(config, options.split)
    if not policy_of(config, split).packing:
        raise ConfigError.at(
            "training.packing", f"is false for {split}: nothing is packed, so there is nothing to vary"
        )
    lengths = open_lengths(stores.open_stores(config, split).lengths)
    for line in stale_inputs(config, lengths):
        print(f"warning: {split}: {line}", file=sys.stderr)
    ranks = options.world_size or [ranks_of(config) or 1]
    packing_lengths = options.max_length or [config.packing_length]
    _refuse_other_cuts(lengths, packing_lengths)
    alternatives = list(
        progress(
            _alternatives(config, split, lengths, packing_lengths, ranks),
            total=len(packing_lengths) * len(ranks), desc="planning", unit=" combinations",
        )
    )  # fmt: skip
    best = best_of(alternatives)
    if options.json:
        rows = [
            {**attrs.asdict(one), "score": one.score, "best": best.get(one.world_size) is one} for one in alternatives
        ]
        print(json.dumps({"split": split, "rule": RULE, "alternatives": rows}, indent=2))
    else:
        _print(alternatives, best)


def _refuse_other_cuts(lengths: StoredLengths, packing_lengths: list[int]) -> None:
    """Refuse packing lengths that samples were not truncated to: their lengths would differ."""
    cut_to = lengths.origin.key.inputs.get("packing_length")
    if cut_to is not None and packing_lengths != [cut_to]:
        reason = (
            f"truncates samples to the packing length, so the stored lengths are of {cut_to:,} alone: build a run with "
            "another template.max_length in a training.output_dir of its own, or remove the strategy"
        )
        raise ConfigError.at("template.truncation_strategy", reason)


def _alternatives(
    config: RunConfig, split: str, stored: StoredLengths, packing_lengths: list[int], world_sizes: list[int]
) -> Iterator[Alternative]:
    lengths, alignment = stored.tokens, Alignment.from_config(config, split)
    works = work_of(config, stored.rows.table).samples
    samples = works.flops

    def plan(packing_length: int) -> RawPlan:
        other = attrs.evolve(config, template=attrs.evolve(config.template, max_length=packing_length))
        policy = policy_of(other, split)
        refuse_longer(lengths, policy)
        raw = plan_table(f"packs of {packing_length:,}", policy, stored.rows.table, quick_bound=True)
        refuse_dropped(raw, lengths, policy)
        return raw

    def schedule(raw: RawPlan, world_size: int) -> EpochSchedule:
        aligned = alignment.align(raw, world_size=world_size)
        return split_schedule(config, split, aligned, raw.packs.sums(samples))

    return what_if(
        lengths, packing_lengths=packing_lengths, world_sizes=world_sizes, plan=plan, schedule=schedule, works=works,
        explain=with_remedy,
    )  # fmt: skip


def _print(alternatives: list[Alternative], best: dict[int, Alternative]) -> None:
    table = Table()
    for name in ("max_length", "ranks", *COLUMNS, "score", ""):
        table.add_column(name, justify="right" if name else "left")
    for one in alternatives:
        cells = ["-"] * (len(COLUMNS) + 1)
        if one.plan is not None and one.schedule is not None:
            cells = [*(text(one.plan, one.schedule) for text in COLUMNS.values()), f"{one.score:.4f}"]
        mark = "best" if best.get(one.world_size) is one else ""
        table.add_row(f"{one.packing_length:,}", f"{one.world_size:,}", *cells, mark)
    console = plain_console()
    # A terminal that is too narrow wraps the lines, but all digits are there.
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table, soft_wrap=False)
    console.print(f"best, for each number of ranks: the highest {RULE}")
    if any(one.plan and one.plan.oversized_packs for one in alternatives):
        console.print(
            "over 110 %: packs that exceed max_length by more than 10 %, each a long sample; "
            "training.packing_allow_single_long: false skips long samples"
        )
    for one in alternatives:
        if one.problem:
            where = f"max_length {one.packing_length:,}, {counted(one.world_size, 'rank')}"
            console.print(f"not planned: {where}: {one.problem}")
