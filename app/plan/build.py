"""Measure and plan a run before training. `packplan sft run.yaml` then starts to train at once."""

import argparse
import logging
import shlex
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from math import ceil

import attrs

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, add_ray_option, parse_number, parse_ranks
from packplan.app.opening.commands import lacks_packing, read_run_or_command
from packplan.app.opening.policies import position_warning
from packplan.app.opening.runs import measured_by_ray, raising_on_all_ranks, require_inputs
from packplan.app.opening.stores import artefacts_folder
from packplan.app.planning.log_lines import log_run
from packplan.app.planning.measure import bad_records_line
from packplan.app.planning.plan import Ranks, measure_and_plan, plan_epochs
from packplan.app.planning.schedule import accumulation_of, refuse_stream, schedule_of_split
from packplan.app.planning.split import PlannedSplit, Split
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, DataSetError, counted, format_command
from packplan.core.inspection import failure_lines, format_table
from packplan.core.ports import RankGroup

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "--world-size", type=parse_ranks, metavar="N",
        help="number of ranks (a group that shares rows counts as one; default: the ranks of this command)",
    )  # fmt: skip
    add_left_out_option(parser)
    add_ray_option(parser)
    parser.add_argument(
        "--list-failures", action="store_true", help="do not stop at bad records; print all of them, grouped by reason"
    )


def add_left_out_option(parser: argparse.ArgumentParser) -> None:
    """Declare the option --allow-left-out, the limit of rows that ms-swift commands leave out."""
    parser.add_argument(
        "--allow-left-out", type=partial(parse_number, most=100), metavar="PERCENT",
        help="largest percentage of the training rows that an ms-swift command may leave out (default: 1)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure and plan the run, and log the commands that show the plan and train it."""
    with raising_on_all_ranks():
        config = read_run_or_command(options.config, options.overrides, world_size=options.world_size)
        if options.allow_left_out is not None and config.command is None:
            reason = "limits the rows of ms-swift commands: set custom.max_bad_share"
            raise ConfigError.for_key("--allow-left-out", reason)
        config = measured_by_ray(config, options.ray)
        require_inputs(config)

        with loading_libraries():
            from packplan.app.opening.ranks import join_ranks
            from packplan.app.opening.splits import open_splits
            from packplan.app.opening.verdicts import require_packing_model, store_verdict

    with join_ranks(config, use_cpu=True, options={"--world-size": options.world_size}) as group:
        refuse_stream(config)
        world_size = config.count_ranks(options.world_size)
        if world_size is None:  # one process plans for one rank, or group of ranks
            world_size = 1 if group.world_size == 1 else config.plan_world_size(group.world_size)
        accumulation_of(config, world_size=world_size)
        verdict = require_packing_model(config)
        splits = list(open_splits(config).values())
        if options.list_failures:
            splits = [attrs.evolve(split, max_bad_share=Decimal(1)) for split in splits]
        listed = splits if options.list_failures else []
        try:
            percent = 100 if options.list_failures else options.allow_left_out
            build(config, group, splits=splits, world_size=world_size, most_left_out=percent)
        finally:
            bad = {split.name: split.stores.lengths.bad_records() for split in listed if group.rank == 0}
            for name, records in bad.items():
                print("\n".join([f"{name}: {counted(len(records), 'bad record')}", *failure_lines(records)]))
        if any(bad.values()) and config.custom.on_bad_record == "stop":
            raise DataSetError("records cannot become samples: fix them, or set custom.on_bad_record: skip")
        if group.rank == 0:
            if verdict is not None:
                store_verdict(config, verdict)
            _log_next(config, [options.config, *options.overrides], world_size * config.training.row_ranks)


def _log_next(config: RunConfig, words: list[str], ranks: int) -> None:
    """
    Log the plan's folder, and the commands that show the plan and train it on *ranks* processes.
    """
    typed = [shlex.quote(word) for word in words]
    train = f"torchrun --nproc-per-node {ranks} -m packplan.app.sft" if ranks > 1 else "packplan sft"
    rows = {"to see it": format_command("packplan plan show", *typed), "to train": format_command(train, *typed)}
    if config.command is not None:
        rows["to see it"] = "packplan plan show, followed by the same command"
        added = "--packing true " * lacks_packing(config.command) + "--external_plugins plugin.py"
        rows["to train"] = f"the command with {added}, which packplan plugin swift writes"
    log.info("%s", format_table(f"the plan is in {artefacts_folder(config.training.output_dir)}", rows))


def build(
    config: RunConfig, group: RankGroup, *, splits: Sequence[Split], world_size: int | None = None,
    most_left_out: int | None = None,
) -> list[PlannedSplit]:  # fmt: skip
    """
    Measure and plan splits as training would, and return the planned splits.

    Args:
        config: The run.
        group: Ranks that run this command.
        splits: Splits to build, `train` first.
        world_size: Number of ranks to align for; if None, the size of *group*.
        most_left_out: Largest percentage of the training rows that an ms-swift command may leave
            out; None allows 1 %.

    Raises:
        PackplanError: The run has a fault, or a stored file is damaged.
    """
    ranks = Ranks(group, timeout_s=config.training.packing_wait_timeout_s)
    train, *others = (measure_and_plan(split, ranks, world_size=world_size) for split in splits)
    bad, num_rows = train.stores.lengths.bad_records(), len(train.source)
    if config.command is not None and 100 * len(bad) > num_rows * (1 if most_left_out is None else most_left_out):
        allow = f"--allow-left-out {ceil(100 * len(bad) / num_rows)} after packplan plan build, plugin swift or export"
        raise DataSetError(f"{bad_records_line(bad, num_rows)}. To leave them out, put {allow}")
    schedule = schedule_of_split(config, train.name, train.aligned)
    if train.recipe is not None:
        train, schedule = plan_epochs(train, train.recipe, schedule, ranks)
    if group.rank == 0:
        log_run(config, [train, *others], schedule)
        if text := position_warning(config, train.table):
            log.warning("train: %s", text)
    return [train, *others]


def build_command(config: RunConfig, *, most_left_out: int | None = None) -> list[PlannedSplit]:
    """Measure and plan all splits of an ms-swift command, `train` first; see `build`."""
    with loading_libraries():
        from packplan.app.opening.ranks import join_ranks
        from packplan.app.opening.splits import open_splits

    with join_ranks(config) as group:
        splits = list(open_splits(config).values())
        return build(config, group, splits=splits, world_size=config.count_ranks(), most_left_out=most_left_out)
