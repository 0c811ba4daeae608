"""
Training packed against padded: the same samples, the same tokens in a step, through the same trainer.

Text of real lengths (instruction tuning), and images with text. A padded batch holds as many samples as a pack does on
average, so both take about as many steps; what padding costs, and what a pack's mask costs, is then seen in useful tokens a
second. Samples are encoded before, and that is reported apart. With --overhead, what this project's own parts add
to a step of ms-swift's trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics

import attrs

from app.bench.table import aligned
from app.command import positive_number
from core.errors import DataSetError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--packs", type=positive_number, nargs="+", default=[512, 2048, 4096], metavar="TOKENS",
        help="budgets of a pack (default: 512 2048 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--kinds", nargs="+", choices=["text", "images"], default=["text", "images"], help="samples (default: both)"
    )
    parser.add_argument(
        "--samples", type=positive_number, default=320, metavar="N", help="of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=positive_number, default=3, metavar="R", help="epochs each (default: %(default)s)"
    )
    parser.add_argument("--attn", default="sdpa", metavar="NAME", help="attention backend (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument(
        "--shape", choices=["tiny", "3b"], help="random weights of a tiny model, or of Qwen2.5-VL-3B's layout in bf16 "
        "(default: tiny on a CPU, else 3b)",
    )  # fmt: skip
    parser.add_argument(
        "--overhead", action="store_true", help="measure what is added to a step of ms-swift's own trainer instead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    # Ten seconds to load, for this benchmark alone.
    from app.bench.training_cost import Setting, measure_overhead, measure_training

    shape = options.shape or ("tiny" if options.device == "cpu" else "3b")
    setting = Setting(
        device=options.device, shape=shape, attn_impl=options.attn, num_samples=options.samples, repeat=options.repeat
    )
    if options.device == "cuda" and not setting.has_gpu:
        message = "--device cuda: torch sees no GPU on this machine"
        raise DataSetError(message)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "device": setting.device_name}
    if options.overhead:
        overhead = measure_overhead(setting, packing_length=max(options.packs))
        if options.json:
            print(json.dumps({**machine, **attrs.asdict(overhead), "ratio": overhead.ratio}, indent=1))
        else:
            print(
                f"a step of {overhead.step_s:.2f} s takes {100 * (overhead.ratio - 1):+.2f} % CPU time more than in "
                f"ms-swift's own trainer on packs encoded before (median of {len(overhead.ratios)} pairs, "
                f"{100 * (min(overhead.ratios) - 1):+.2f} to {100 * (max(overhead.ratios) - 1):+.2f} %);\n"
                f"encoding, left out of both, takes {overhead.encode_s_per_step:.3f} s of CPU time a step"
            )
        return
    rows = measure_training(setting, kinds=options.kinds, budgets=options.packs)
    if options.json:
        print(json.dumps({**machine, "rows": [attrs.asdict(row) for row in rows]}, indent=1))
        return
    head = (
        "samples",
        "pack",
        "way",
        "batch",
        "steps",
        "padding",
        "useful tokens/s",
        "s/step",
        "peak MB",
        "packed/padded",
        "at most",
    )
    cells = []
    for row in rows:
        pair = {other.way: other for other in rows if (other.kind, other.budget) == (row.kind, row.budget)}
        packed, padded = pair["packed"], pair["padded"]
        gain = f"{packed.useful_tokens_per_s / padded.useful_tokens_per_s:.2f}" if row.way == "packed" else ""
        # Were time the number of positions alone, packing would gain what padding adds to the useful tokens.
        most = f"{(1 - packed.padding_share) / (1 - padded.padding_share):.2f}" if row.way == "packed" else ""
        cells.append(
            (row.kind, f"{row.budget:,}", row.way, str(row.batch_size), str(row.num_steps), f"{row.padding_share:.1%}",
             f"{row.useful_tokens_per_s:,.0f}", f"{row.step_s:.3f}", f"{row.peak_bytes / 1e6:,.0f}", gain, most)
        )  # fmt: skip
    print("\n".join(aligned([head, *cells], left={0, 2})))
    encoding = statistics.median(row.encode_ms for row in rows)
    print(f"\nencoding a sample, left out above: {encoding:.1f} ms of CPU time (median over the rows)")
