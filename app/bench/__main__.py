"""
Measure what this project claims, beside what else can be installed: `python -m app.bench planner
--help`.
"""

from __future__ import annotations

import argparse
import sys

from packplan.app.bench import inspection, lengths, loss, planner, shard, stream
from packplan.app.bench.measuring import records
from packplan.app.bench.training import command as training
from packplan.app.bench.work import command as work
from packplan.app.cli.command import run_command, run_program

BENCHMARKS = {
    "planner": (planner, "packing algorithms"),
    "lengths": (lengths, "measuring samples"),
    "records": (records, "memory of a run over many rows"),
    "inspect": (inspection, "looking at stored plans"),
    "stream": (stream, "dynamic packing"),
    "train": (training, "packed against padded"),
    "shard": (shard, "microbatches of RL batches"),
    "work": (work, "equal work in every step"),
    "loss": (loss, "losses on packed logits"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="packplan bench", description=__doc__)
    benchmarks = parser.add_subparsers(required=True, metavar="benchmark")
    for name, (module, summary) in BENCHMARKS.items():
        module.add_arguments(benchmarks.add_parser(name, help=summary, description=module.__doc__))
    options = parser.parse_args(arguments)
    return run_command(lambda: options.run(options), verbose=False)


if __name__ == "__main__":
    sys.exit(run_program(main))
