"""
Measure the figures that the documentation quotes: `python -m benchmarks COMMAND --help`.

Run it in a checkout, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import lengths, planner, rl, train, work
from packplan.app.cli.command import run_command, run_program

BENCHMARKS = {
    "planner": (planner, "packing algorithms beside other packages"),
    "train": (train, "training on packs beside padded batches"),
    "lengths": (lengths, "measuring the lengths of samples"),
    "work": (work, "how even the work of ranks is"),
    "rl": (rl, "microbatches of RL batches"),
}
"""Command -> its module and a summary."""


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in BENCHMARKS.items():
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return run_command(lambda: options.run(options), verbose=False, kept="nothing is kept")


if __name__ == "__main__":
    sys.exit(run_program(main))
