"""
Training by way: packed, padded, one by one; the same samples, as many in a step, through the same
trainer.

Text of real lengths (instruction tuning), and images with text. A padded batch holds as many
samples as a pack does on average, so all ways take about as many steps. Each way trains in a
process of its own, an epoch in each round, and is compared with the others round by round; shown
are medians, with the lowest and the highest round. Samples are encoded before, and that is reported
apart. With --scaling, the same samples in packs of growing length. With --overhead, what this
project's own parts add to a step of ms-swift's trainer. The output is Markdown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics

import attrs

from packplan.app.bench.training.ways import DEFAULT_WAYS, WAYS, Setting, scaling_table, ways_table
from packplan.app.cli.command import positive_number
from packplan.core.errors import DataSetError

PACKS = (512, 2048, 4096)

SCALING_PACKS = (1024, 2048, 4096, 8192, 16384, 32768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--packs", type=positive_number, nargs="+", metavar="TOKENS",
        help="budgets of a pack (default: 512 2048 4096; with --scaling 1024 to 32768; with --overhead 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--kinds", nargs="+", choices=["text", "images"], default=["text", "images"], help="samples (default: both)"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), metavar="WAY",
        help=f"of {', '.join(WAYS)} (default: {' '.join(DEFAULT_WAYS)}; with --scaling packed). "
        "packed-flex needs a GPU, "
        "packed-flash the package flash-attn too. On a GPU each way holds a model and optimizer of its own",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=positive_number, default=320, metavar="N", help="of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=positive_number, default=7, metavar="R", help="rounds that count (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument(
        "--shape", choices=["tiny", "3b"], help="random weights of a tiny model, or of Qwen2.5-VL-3B's layout in bf16 "
        "(default: tiny on a CPU, else 3b)",
    )  # fmt: skip
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--scaling", action="store_true", help="measure packs of growing length of the same samples instead"
    )
    instead.add_argument(
        "--overhead", action="store_true", help="measure what is added to a step of ms-swift's own trainer instead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    # Ten seconds to load, for this benchmark alone.
    from packplan.app.bench.training.cost import find_device

    shape = options.shape or ("tiny" if options.device == "cpu" else "3b")
    setting = Setting(device=options.device, shape=shape, num_samples=options.samples, repeat=options.repeat)
    device = find_device(options.device)
    if options.device == "cuda" and device.name is None:
        message = "--device cuda: torch sees no GPU on this machine"
        raise DataSetError(message)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ms-swift")}
    machine = {
        "cores": os.cpu_count(),
        "threads": device.threads,
        "processor": platform.machine(),
        "device": device.name or "cpu",
        "versions": versions,
    }
    document, lines = _overhead(options, setting) if options.overhead else _rows(options, setting)
    if options.json:
        print(json.dumps({**machine, **document}, indent=1))
        return
    print("\n".join(lines))
    print(
        f"\n{machine['cores']} cores of {machine['processor']}, {machine['threads']} threads, device "
        f"{machine['device']}; "
        f"{shape} Qwen2.5-VL; {options.samples} samples of each kind; {options.repeat} rounds; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def _rows(options: argparse.Namespace, setting: Setting) -> tuple[dict[str, object], list[str]]:
    """
    Measure ways, or packs of growing length; return what JSON says, and the lines of the table.
    """
    from packplan.app.bench.training.cost import measure_training

    rows = measure_training(
        setting,
        kinds=options.kinds,
        budgets=options.packs or (SCALING_PACKS if options.scaling else PACKS),
        ways=options.ways or (["packed"] if options.scaling else DEFAULT_WAYS),
        together=options.scaling,
    )
    encoding = statistics.median(row.encode_ms for row in rows)
    lines = [
        *(scaling_table if options.scaling else ways_table)(rows),
        "",
        f"encoding a sample, left out above: {encoding:.1f} ms of CPU time (median over the rows)",
    ]
    return {"rows": [row.document() for row in rows]}, lines


def _overhead(options: argparse.Namespace, setting: Setting) -> tuple[dict[str, object], list[str]]:
    """Measure what our parts add; return what JSON says, and the lines of text."""
    from packplan.app.bench.training.overhead import measure_overhead

    overhead = measure_overhead(setting, packing_length=max(options.packs or PACKS))
    more, least, most = (100 * (ratio - 1) for ratio in (overhead.ratio, min(overhead.ratios), max(overhead.ratios)))
    text = (
        f"a step of {overhead.step_s:.2f} s takes {more:+.2f} % CPU time more than in ms-swift's own trainer on "
        "packs encoded "
        f"before, under the same attention, {overhead.attention} (median of {len(overhead.ratios)} pairs, "
        f"{least:+.2f} to "
        f"{most:+.2f} %);\nencoding, left out of both, takes {overhead.encode_s_per_step:.3f} s of CPU time a step"
    )
    return {**attrs.asdict(overhead), "ratio": overhead.ratio}, [text]
