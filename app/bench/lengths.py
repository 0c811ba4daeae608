"""
Measuring lengths: samples per second and CPU time of a sample, on data made for it.

Chats beside the bare tokenizer, on the same rows. Text, small images and photographs, each measured
by counting the template's texts and from images' headers, and by encoding in full, in one process
and in two, once they have started. Then what a run with a million stored lengths pays: seconds to
load and verify them, and memory on the ranks that receive their plan.

`--videos` compares lengths of made videos, from their containers, with full encodes.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

import attrs

from packplan.app.bench.table import aligned
from packplan.core.errors import DataSetError

WARM_UP = 32
"""Samples before the clock starts: as many as are measured at once."""

if TYPE_CHECKING:
    from packplan.app.bench.measuring.text import TextCost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], metavar="N", help="processes that measure (default: 1 2)"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="of each kind, at most (default: 1,600 texts to 128 photographs)"
    )
    parser.add_argument(
        "--videos", type=int, metavar="N", help="measure so many made videos instead, beside full encodes of all"
    )
    parser.add_argument("--text-rows", type=int, default=4096, metavar="N", help="chats beside the bare tokenizer")
    parser.add_argument(
        "--text-alone", action="store_true", help="measure chats beside the bare tokenizer, and no more"
    )
    parser.add_argument("--model", metavar="FOLDER", help="whose tokenizer and template measure the chats")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    if min(options.workers) < 1:
        message = "--workers has to be at least 1"
        raise DataSetError(message)
    if options.videos is not None:
        _run_videos(options.videos, as_json=options.json)
        return
    if options.text_rows <= WARM_UP or (options.samples is not None and options.samples <= WARM_UP):
        name = "--samples" if options.text_rows > WARM_UP else "--text-rows"
        message = f"{name} has to be more than the {WARM_UP} that warm up"
        raise DataSetError(message)
    # Ten seconds to load, for this benchmark alone.
    from packplan.app.bench.measuring.text import measure_text

    text = measure_text(options.text_rows, options.model)
    if options.text_alone:
        print(json.dumps(_as_document(text), indent=1) if options.json else _as_line(text))
        return
    from packplan.app.bench.measuring.cost import STORED, measure_costs

    costs = measure_costs(options.workers, options.samples)
    if options.json:
        document = {
            "rows": [attrs.asdict(row) for row in costs.rows],
            "photo_full_over_header_cpu_ratio": costs.photo_ratio,
            "warm_start_s": costs.warm_start_s,
            "rank_memory_bytes": costs.rank_memory_bytes,
            "text": _as_document(text),
            "stored_samples": STORED,
            "cores": os.cpu_count(),
        }
        print(json.dumps(document, indent=1))
        return
    head = ("sample", "from", "workers", "samples/s", "CPU ms/sample")
    cells = [(r.kind, r.way, str(r.workers), f"{r.samples_per_s:,.0f}", f"{r.cpu_ms:.2f}") for r in costs.rows]
    print("\n".join(aligned([head, *cells], left={0, 1})))
    print(f"\n{_as_line(text)}")
    print(f"a photograph's full encode costs {costs.photo_ratio:.0f} times the CPU time of its header")
    print(f"loading and verifying {STORED:,} stored lengths and as many images: {costs.warm_start_s:.2f} s")
    print(f"memory that a rank other than 0 takes for their plan: {costs.rank_memory_bytes / 1e6:.0f} MB")


def _run_videos(number: int, *, as_json: bool) -> None:
    """
    Compare lengths of made videos with full encodes, then print.

    Args:
        number: Of videos.

        as_json: Print one document.
    """
    from packplan.app.bench.measuring.videos import MODELS, measure_video_costs

    if number < 1:
        message = "--videos has to be at least 1"
        raise DataSetError(message)
    costs = measure_video_costs(number)
    if as_json:
        print(json.dumps(attrs.asdict(costs), indent=1))
    else:
        print(
            f"{costs.num_videos:,} videos, {len(MODELS)} models: {len(costs.differences):,} lengths differ from full "
            f"encodes; {costs.num_decoded:,} videos were decoded to be measured"
        )
        print(
            f"30 s of 720p: {costs.clip_container_ms:.1f} ms of CPU time from its container, "
            f"{costs.clip_decode_ms:.0f} to decode its sampled frames, {costs.clip_encode_ms:.0f} to encode"
        )
    if costs.differences:
        raise DataSetError("\n".join(costs.differences[:20]))


def _as_document(text: TextCost) -> dict[str, Any]:
    return {**attrs.asdict(text), "ratio": text.ratio, "library_ratio": text.library_ratio}


def _as_line(text: TextCost) -> str:
    measured, called, asked, encoded = (
        f"{text.num_rows / seconds:,.0f}"
        for seconds in (text.measured_s, text.tokenizer_s, text.library_s, text.full_s)
    )
    return (
        f"chats of {text.tokens_per_row:.0f} tokens, rows a CPU second: measured {measured}, the bare tokenizer "
        f"{called} (ratio {text.ratio:.2f}), its library in batches {asked} ({text.library_ratio:.2f}), full encodes "
        f"{encoded}"
    )
