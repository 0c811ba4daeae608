"""
Measure the figures that the documentation quotes: `python -m benchmarks COMMAND --help`.

Run it in a checkout, on a machine that does nothing else.
"""

import argparse
import sys
from importlib import import_module

from packplan.app.cli.command import run_command, run_program

BENCHMARKS = {
    "planner": "packing algorithms beside other packages",
    "redraw": "packs drawn again for each epoch, beside the algorithm's own",
    "epochs": "epochs that have plans of their own",
    "train": "training on packs beside padded batches",
    "forecast": "seconds of steps that a calibration has not seen",
    "lengths": "measuring the lengths of samples",
    "loader": "processor time of a loader for a pack",
    "memory": "forecast peaks of memory beside measured ones",
    "rows": "rows that ranks share: memory and time",
    "degrees": "packs that as many ranks share as each needs, simulated or measured",
    "unpad": "TRL's trainers without padding, beside themselves",
    "work": "how even the work of ranks is",
    "rl": "microbatches of RL batches",
}
"""Command, which is a module here -> its summary."""


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
