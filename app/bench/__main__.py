"""Measure what this project claims, beside what else can be installed: `python -m app.bench planner --help`."""

from __future__ import annotations

import argparse
import sys

from app.bench import lengths, loss, planner, shard, stream, training
from app.command import program, run_command


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog=program("bench"), description=__doc__)
    benchmarks = parser.add_subparsers(required=True, metavar="benchmark")
    planner.add_arguments(benchmarks.add_parser("planner", help="packing algorithms", description=planner.__doc__))
    lengths.add_arguments(benchmarks.add_parser("lengths", help="measuring samples", description=lengths.__doc__))
    stream.add_arguments(benchmarks.add_parser("stream", help="dynamic packing", description=stream.__doc__))
    training.add_arguments(benchmarks.add_parser("train", help="packed against padded", description=training.__doc__))
    loss.add_arguments(benchmarks.add_parser("loss", help="losses on packed logits", description=loss.__doc__))
    shard.add_arguments(benchmarks.add_parser("shard", help="microbatches of RL batches", description=shard.__doc__))
    options = parser.parse_args(arguments)
    return run_command(lambda: options.run(options), verbose=False)


if __name__ == "__main__":
    sys.exit(main())
