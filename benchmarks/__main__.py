"""
Measure the figures that the documentation quotes: `python -m benchmarks COMMAND --help`.

Run it in a checkout, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import epochs, forecast, lengths, memory, order, planner, policy, redraw, rl, rollouts, train, work
from packplan.app.cli.command import run_command, run_program

BENCHMARKS = {
    "planner": (planner, "packing algorithms beside other packages"),
    "redraw": (redraw, "packs drawn again for each epoch, beside the algorithm's own"),
    "epochs": (epochs, "epochs that have plans of their own"),
    "order": (order, "packs whose samples stay near their places"),
    "train": (train, "training on packs beside padded batches"),
    "forecast": (forecast, "seconds of steps that a calibration has not seen"),
    "lengths": (lengths, "measuring the lengths of samples"),
    "memory": (memory, "forecast peaks of memory beside measured ones"),
    "work": (work, "how even the work of ranks is"),
    "rl": (rl, "microbatches of RL batches"),
    "policy": (policy, "a policy trained on packed, dynamic and padded microbatches"),
    "rollouts": (rollouts, "answering prompts one at a time and in batches"),
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
