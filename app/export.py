"""
Write the rows of an ms-swift command with their lengths:
`packplan export --cached-dataset FOLDER swift sft --model ...`.

`swift sft` with `--cached_dataset FOLDER`, not `--dataset`, then encodes no row before training.
The command first measures lengths as `packplan plan build` does. Rows that ms-swift leaves out are
not written.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from packplan.app.cli.command import add_logging_options, command_parser, parse_ranks, run_command, run_program
from packplan.app.opening.commands import resolve_command, split_command
from packplan.app.plan.build import add_left_out_option, build_command
from packplan.core.errors import ConfigError, counted


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("export", __doc__)
    parser.add_argument("source", metavar="swift sft ...", help="the ms-swift command, at the end")
    parser.add_argument("--cached-dataset", type=Path, required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument("--world-size", type=parse_ranks, metavar="N", help="ranks (default: as in the command)")
    add_left_out_option(parser)
    add_logging_options(parser)
    own, words = split_command(arguments)
    options = parser.parse_intermixed_args(own)

    return run_command(lambda: run(options, words), verbose=options.verbose, quiet=options.quiet, for_host=True)


def run(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Measure, plan and write rows; ConfigError if the folder exists, or rows cannot be written."""
    folder: Path = options.cached_dataset
    if folder.exists():
        raise ConfigError.for_key("--cached-dataset", f"is {folder}, which exists: name a new folder, or remove it")
    config = resolve_command([options.source, *words], world_size=options.world_size)
    if config.command and not config.command.sequences_per_row:
        reason = "holds no split texts, embeddings or rankings: write those by swift export --to_cached_dataset true"
        raise ConfigError.for_key("--cached-dataset", reason)
    splits = build_command(config, most_left_out=options.allow_left_out)
    from packplan.app.opening.command_rows import export_rows  # loads ms-swift

    numbers = export_rows(splits, folder)
    flags = [f"--cached_dataset {folder}", *([f"--cached_val_dataset {folder / 'val'}"] if "eval" in numbers else [])]
    rows = counted(numbers["train"], "row")
    print(f"{folder}: {rows} with their lengths; use {' '.join(flags)} instead of --dataset")


if __name__ == "__main__":
    raise SystemExit(run_program(main))
