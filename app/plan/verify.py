"""
Check that what is stored is what training would use: exit status 0, or 3 with everything that is
wrong.

Every artefact against its digest, the plan against the laws of plans and made again, the lengths
against the data, the model and the configuration, copies of packed files and of Parquet against all
of the files, every image against its size, dimensions and first 64 KiB. With --samples K, K samples
are encoded again; with --decode, the pixels of every image and of every frame of a video are read.
"""

from __future__ import annotations

import argparse
import json

import attrs

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, whole_number
from packplan.app.plan.stored import splits_of
from packplan.app.plan.verification import Finding, verify
from packplan.app.wiring.commands import read_run
from packplan.core.errors import MismatchError, NotBuiltError, counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    parser.add_argument(
        "--samples", type=whole_number, default=0, metavar="K", help="of each split, encoded again (default: none)"
    )
    parser.add_argument("--decode", action="store_true", help="read the pixels of every image and frame")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Verify, print, and fail if anything is wrong."""
    config = read_run(options.config, options.overrides)
    splits = splits_of(config, options.split)

    with loading_libraries():
        from packplan.app.wiring.gather import gather

    gathered = gather(config).splits
    found: dict[str, list[Finding]] = {}
    absent: list[NotBuiltError] = []
    for split in splits:
        try:
            found[split] = list(verify(gathered[split], num_samples=options.samples, decode=options.decode))
        except NotBuiltError as error:
            found[split] = [Finding("artefacts", error.folder, f"{error.reason}: build measures and plans")]
            absent.append(error)
    if len(absent) == len(splits):
        raise absent[0]
    number = sum(map(len, found.values()))
    if options.json:
        rows = [{"split": split, **attrs.asdict(one)} for split, findings in found.items() for one in findings]
        print(json.dumps({"passed": not number, "findings": rows}, indent=2))
    else:
        for split, findings in found.items():
            for one in findings:
                print(f"{split}: {one}")
            if not findings:
                print(f"{split}: nothing is wrong with {counted(len(gathered[split].source), 'record')} and their plan")
    if number:
        raise MismatchError("unsound", f"{counted(number, 'finding')}: what is stored is not what training would use")
