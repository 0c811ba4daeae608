"""
Measure the figures that the documentation quotes: `python -m benchmarks COMMAND --help`.

Run a benchmark in a checkout, on a machine that runs nothing else.
"""

import argparse
import sys
from importlib import import_module

from packplan.app.cli.command import run_command, run_program

BENCHMARKS = {
    "planner": "compare packing algorithms with other packages",
    "redraw": "compare packs drawn again for each epoch with an algorithm's own packs",
    "epochs": "time the planning of epochs that have plans of their own",
    "train": "compare training on packs with padded batches",
    "forecast": "compare predicted with measured seconds of steps",
    "lengths": "time how lengths of samples are measured",
    "loader": "measure the processor time in which a loader makes a pack",
    "memory": "compare predicted with measured peaks of memory",
    "rows": "measure memory and time of ranks that share rows",
    "degrees": "simulate or measure packs, each shared by as many ranks as it needs",
    "unpad": "compare trainers with and without padding",
    "work": "count how evenly work is spread over ranks",
    "rl": "compare ways to cut RL batches into microbatches",
}
"""Command, which is also the name of its module in this folder -> summary."""


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    chosen = sys.argv[1:] if arguments is None else arguments
    for name, summary in BENCHMARKS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name not in chosen[:1]:
            continue  # each needs packages of its own
        module = import_module(f"benchmarks.{name}")
        command.description = module.__doc__
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return run_command(lambda: options.run(options), verbose=False, kept="nothing is kept")


if __name__ == "__main__":
    sys.exit(run_program(main))
