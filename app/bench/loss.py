"""
A loss on packed logits: fused over the row, beside a loop over its sequences.

The clipped policy loss, forward and backward, on a row of sequences of equal length: as it is
commonly written, run on each part of `torch.split`; and as a loss on tokens, in one pass. Both run
in turn, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform

import attrs

from packplan.app.bench.table import aligned
from packplan.app.cli.command import positive_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--vocabulary", type=positive_number, nargs="+", default=[512, 32768], metavar="V",
        help="entries of a row of logits (default: 512 32768)",
    )  # fmt: skip
    parser.add_argument(
        "--sequences", type=positive_number, default=64, metavar="N", help="in the row (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=positive_number, default=64, metavar="TOKENS", help="of each (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=positive_number, default=7, metavar="R", help="pairs of runs (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    # Seconds to load, for this benchmark alone.
    from packplan.app.bench.loss_cost import measure_loss

    rows = [
        measure_loss(size, num_sequences=options.sequences, length=options.length, repeat=options.repeat)
        for size in options.vocabulary
    ]
    if options.json:
        machine = {"cores": os.cpu_count(), "processor": platform.machine()}
        print(json.dumps({**machine, "rows": [attrs.asdict(row) for row in rows]}, indent=1))
        return
    head = (
        "vocabulary",
        "sequences",
        "tokens each",
        "loop ms",
        "fused ms",
        "faster",
        "loop keeps MB",
        "fused keeps MB",
    )
    cells = [
        (f"{row.vocabulary:,}", str(row.num_sequences), str(row.length), f"{row.loop_ms:.1f}", f"{row.fused_ms:.1f}",
         f"{row.ratio:.1f}", f"{row.loop_kept_bytes / 1e6:.1f}", f"{row.fused_kept_bytes / 1e6:.1f}")
        for row in rows
    ]  # fmt: skip
    print("\n".join(aligned([head, *cells], left=set())))
