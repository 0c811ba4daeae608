"""Plan the stored lengths again, with other packing lengths and numbers of ranks."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import attrs
from rich.box import SIMPLE_HEAD
from rich.table import Table

from packplan.adapters.progress import progress
from packplan.app.cli.command import add_config_arguments, parse_positives, parse_rank_counts, plain_console
from packplan.app.opening.commands import read_run_or_command
from packplan.app.opening.policies import policy_of_split, work_of_run
from packplan.app.plan.stored import open_stored_lengths, yield_stale_inputs
from packplan.app.planning.epochs import lengths_of_records, plan_first_epoch, works_of_records
from packplan.app.planning.schedule import refuse_stream, schedule_of_split
from packplan.app.planning.split import align_measured, align_options
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError, UserError, counted
from packplan.core.inspection import PlanSummary, ScheduleSummary, summarise, summarise_schedule
from packplan.core.plan import refuse_dropped, refuse_longer
from packplan.core.ports import StoredLengths

COLUMNS: Mapping[str, Callable[[PlanSummary, ScheduleSummary], str]] = MappingProxyType(
    {
        "packs": lambda plan, _: f"{plan.num_packs:,}",
        "fill": lambda plan, _: f"{plan.fill_mean:.4f}",
        "long": lambda plan, _: f"{plan.long_samples + plan.skipped_samples:,}",
        "longest": lambda plan, _: f"{plan.longest_pack:,}",
        "a rank's\nmost": lambda _, schedule: f"{schedule.rank_tokens:,}",
        "over\n110 %": lambda plan, _: f"{plan.oversized_packs:,}",
        "dropped\ntokens": lambda plan, _: f"{plan.dropped_tokens + plan.skipped_tokens:,}",
        "steps": lambda _, schedule: f"{schedule.total_steps:,}",
        "work a\nstep": lambda _, schedule: f"{schedule.work_per_step:.3g}",
        "imbalance": lambda _, schedule: f"{schedule.work_imbalance:.3f}",
    }
)
"""Column of the table -> function that returns the text of a cell, from a combination's figures."""


@attrs.frozen
class Alternative:
    """Figures for one packing length and one number of ranks."""

    packing_length: int
    world_size: int

    plan: PlanSummary | None = None
    """Figures with a quick lower bound; None without a plan."""

    schedule: ScheduleSummary | None = None

    problem: str | None = None
    """Reason why the combination has no figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "--max-length", type=parse_positives, metavar="N,N", help="template.max_length (default: the run's)"
    )
    parser.add_argument(
        "--world-size", type=parse_rank_counts, metavar="N,N",
        help="numbers of ranks (a group that shares rows counts as one; default: 1, or as in the command)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(options: argparse.Namespace) -> None:
    """Plan every combination of packing length and number of ranks, and print the figures."""
    config = read_run_or_command(options.config, options.overrides, world_size=(options.world_size or [None])[0])
    refuse_stream(config)
    if not config.training.packing:
        raise ConfigError.for_key("training.packing", "is false: nothing is packed, so there is nothing to vary")
    lengths, recipe, _ = open_stored_lengths(config, "train")
    if recipe is not None:
        print("train: figures and steps assume that all epochs have the plan of the first epoch", file=sys.stderr)
    for line in yield_stale_inputs(config, lengths):
        print(f"warning: train: {line}", file=sys.stderr)
    ranks = options.world_size or [config.count_ranks() or 1]
    packing_lengths = options.max_length or [config.packing_length]
    _refuse_other_truncation(lengths, packing_lengths)
    found = _alternatives(config, lengths, packing_lengths, ranks, recipe=recipe)
    alternatives = list(progress(found, total=len(packing_lengths) * len(ranks), desc="planning", unit=" combinations"))
    if options.json:
        print(json.dumps({"alternatives": [attrs.asdict(one) for one in alternatives]}, indent=2))
    else:
        _print(config, alternatives)


def _refuse_other_truncation(lengths: StoredLengths, packing_lengths: list[int]) -> None:
    """
    Raise ConfigError if stored lengths are truncated to a packing length, and another one is
    requested.
    """
    cut_to = lengths.origin.key.inputs.get("packing_length")
    if cut_to is not None and packing_lengths != [cut_to]:
        reason = (
            f"truncates to the packing length, so stored lengths hold only for {cut_to:,}: build a run with its own "
            "template.max_length and training.output_dir, or remove the key"
        )
        raise ConfigError.for_key("template.truncation_strategy", reason)


def _alternatives(
    config: RunConfig,
    stored: StoredLengths,
    packing_lengths: list[int],
    world_sizes: list[int],
    *,
    recipe: EpochRecipe | None,
) -> Iterator[Alternative]:
    """Plan every combination, and yield its figures, or the reason why it has none."""
    lengths, table = stored.tokens, stored.rows.table
    works, options = works_of_records(work_of_run(config)[0], table), align_options(config, "train")
    for packing_length in packing_lengths:
        other = attrs.evolve(config, template=attrs.evolve(config.template, max_length=packing_length))
        policy, name = policy_of_split(other, "train"), f"packs of {packing_length:,}"
        try:
            refuse_longer(lengths, policy)
            samples = lengths_of_records(policy, table, stored.origin.files)
            raw = plan_first_epoch(name, policy, samples, recipe=recipe, quick_bound=True)
            refuse_dropped(raw, lengths, policy)
        except UserError as error:
            yield from (Alternative(packing_length, ranks, problem=str(error)) for ranks in world_sizes)
            continue
        summary = summarise(raw, lengths)
        for ranks in world_sizes:
            try:
                aligned = align_measured(raw, lengths, world_size=ranks, **options)
                schedule = schedule_of_split(config, "train", aligned, raw.packs.sums(works.flops))
                over = summarise_schedule(raw, lengths, schedule, works=works)
            except UserError as error:
                yield Alternative(packing_length, ranks, problem=str(error))
            else:
                yield Alternative(packing_length, ranks, summary, over)


def _print(config: RunConfig, alternatives: list[Alternative]) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("max_\nlength", "ranks", *COLUMNS):
        table.add_column(name, justify="right")
    for one in alternatives:
        cells = ["-"] * len(COLUMNS)
        if one.plan is not None and one.schedule is not None:
            cells = [text(one.plan, one.schedule) for text in COLUMNS.values()]
        table.add_row(f"{one.packing_length:,}", f"{one.world_size:,}", *cells)
    console = plain_console()
    # A terminal that is too narrow wraps the lines, but all digits are there.
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table, soft_wrap=False)
    if any(one.plan and one.plan.oversized_packs for one in alternatives):
        text = (
            "over 110 %: packs that exceed max_length by more than 10 %, each a long sample; "
            "training.packing_allow_single_long: false skips long samples"
        )
        console.print(config.name_settings(text))
    for one in alternatives:
        if one.problem:
            where = f"max_length {one.packing_length:,}, {counted(one.world_size, 'rank')}"
            console.print(config.name_settings(f"not planned: {where}: {one.problem}"))
