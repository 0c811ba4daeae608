"""
Measure the exact lengths of records, for any tool: `packplan measure DATA... --model M -o
lengths.parquet`.

The command writes a Parquet table with a row for each record. A row has the index and a digest of
the record, and its numbers of tokens, supervised tokens, images, videos, patches and frames. After
an interruption, run the command again: it measures only the remaining records.
"""

import argparse
import logging
import re
from functools import partial
from pathlib import Path

import attrs
import numpy as np

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_logging_options, add_ray_option, command_parser, run_command, run_program
from packplan.app.opening import length_tables
from packplan.app.opening.runs import measured_by_ray, raising_on_all_ranks, require_inputs
from packplan.app.planning.measure import measure
from packplan.app.planning.plan import Ranks
from packplan.app.planning.split import Split
from packplan.core.errors import ConfigError, counted
from packplan.core.ports import Arrays, ReportProgress
from packplan.core.samples.tables import column, sample_indices

log = logging.getLogger(__name__)

KEPT_NOTE = "measured lengths are kept: run again to continue"

_OVERRIDE = re.compile(r"(?:model|template|custom|training)\.\w+=")
"""Start of an argument that sets a key, and is not a data file."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("measure", __doc__)
    parser.add_argument(
        "data", nargs="*", metavar="DATA",
        help="data files, patterns or folders, as in custom.train_jsonl; and key=value, which overrides the YAML "
        "or a default, such as template.max_pixels=200704",
    )  # fmt: skip
    parser.add_argument("--model", metavar="M", help="folder of the model, or its id in a local cache")
    parser.add_argument("--config", metavar="run.yaml", help="YAML of a run, whose model, template and data are used")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="lengths.parquet",
        help="table to write; an existing table is continued",
    )  # fmt: skip
    add_ray_option(parser)
    add_logging_options(parser)
    options = parser.parse_intermixed_args(arguments)
    return run_command(partial(run, options), verbose=options.verbose, quiet=options.quiet, kept=KEPT_NOTE)


def run(options: argparse.Namespace) -> None:
    """Measure the records, and write the table of lengths."""
    overrides = [word for word in options.data if _OVERRIDE.match(word)]
    data = [word for word in options.data if not _OVERRIDE.match(word)]
    if options.config is None and not (data and options.model):
        missing = "DATA" if not data else "--model"
        raise ConfigError.for_key(missing, "is not given, and there is no --config that names it: add it")
    if options.config is not None and (data or options.model):
        raise ConfigError.for_key("--config", "names a model and data: leave out DATA and --model, or give key=value")
    output: Path = options.output
    with raising_on_all_ranks():
        length_tables.refuse_other_output(output)
        config = length_tables.config_to_measure(
            data, output, model=options.model, path=options.config, overrides=overrides
        )
        config = measured_by_ray(config, options.ray)
        require_inputs(config)

        with loading_libraries():
            from packplan.app.opening.ranks import hold_output_lock, join_ranks
            from packplan.app.opening.splits import open_splits

    with (
        length_tables.wrap_output_errors(output),
        join_ranks(config, use_cpu=True) as group,
        hold_output_lock(config, group, key="--output"),  # the writer that ends removes the folder
    ):
        split = attrs.evolve(open_splits(config)["train"], name="data")
        if output.exists():
            known = length_tables.open_known_lengths(output, split.source, key="--output")
            split = attrs.evolve(split, known=known)
        ranks = Ranks(group, timeout_s=config.training.packing_wait_timeout_s)
        ranks.build_on_rank_zero(split.stores.lock, partial(_write_table, split, output))


def _write_table(split: Split, output: Path, report: ReportProgress) -> Arrays:
    """Measure a split, and write its table; return no arrays, since other ranks need no result."""
    table = measure(split, report)
    report(f"writing {output}")
    length_tables.publish_table(split, split.stores.lengths.stored(), output)
    totals = {name: int(column(table, name).sum(dtype=np.int64)) for name in ("length", "images", "videos")}
    media = [counted(totals[kind], kind.removesuffix("s")) for kind in ("images", "videos") if totals[kind]]
    samples = counted(len(sample_indices(table)), "sample")
    log.info("%s: %s", output, ", ".join([samples, counted(totals["length"], "token"), *media]))
    return {}


if __name__ == "__main__":
    raise SystemExit(run_program(main))
