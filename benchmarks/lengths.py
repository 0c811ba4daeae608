"""
Compare measuring the lengths of samples with encoding samples in full, by samples per second and
CPU time.

The option --parts selects:

- `kinds`: generated text, small images and photographs, from texts and image headers, and by full
  encodes
- `chats`: chats, compared with the bare tokenizer on the same rows
- `videos`: lengths of videos from their containers, compared with full encodes, and the time of a
  clip of 30 s at 720p
- `beside`: chats, images and videos, compared with ms-swift's `AddLengthPreprocessor`, and chats
  also with TRL's tokenisation
- `slope`: `packplan measure` on growing numbers of chats with images, for its time and memory of a
  record

In `chats` and `videos`, samples/s means samples per second of CPU time.
"""

import argparse

import attrs

from benchmarks.child import NotMeasuredError
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from packplan.app.cli.command import parse_positive

OURS = "packplan measure"

PARTS = ("kinds", "chats", "videos", "beside", "slope")


@attrs.frozen
class LengthsRow:
    """One kind of sample, measured in one way."""

    sample: str
    way: str
    workers: int
    samples_per_s: float
    cpu_ms: float
    """CPU milliseconds of a sample, summed over all processes."""


COLUMNS: Columns = {
    "sample": lambda row: row.sample,
    "from": lambda row: row.way,
    "workers": lambda row: str(row.workers),
    "samples/s": lambda row: f"{row.samples_per_s:,.1f}",
    "CPU ms/sample": lambda row: f"{row.cpu_ms:.2f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_names(parser, "--parts", PARTS, PARTS)
    add_number(parser, "--workers", [1, 2], "kinds, beside: numbers of processes; slope: uses the largest")
    parser.add_argument(
        "--samples", type=parse_positive, metavar="N",
        help="kinds, beside: samples of each kind (default: 1600 texts to 128 photographs; 4096 chats to 48 videos)",
    )  # fmt: skip
    add_number(parser, "--rows", 4096, "chats: number of chats")
    parser.add_argument("--model", metavar="FOLDER", help="chats: model with the tokenizer and template to use")
    add_number(parser, "--videos", 200, "videos: number of compared videos")
    add_number(parser, "--records", [2000, 8000, 32000], "slope: numbers of records")
    add_number(parser, "--widths", [336, 640, 1280], "slope: widths of images, in pixels")
    add_number(parser, "--rounds", 2, "slope: runs of each case")


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    # Seconds to load, for this benchmark alone.
    from benchmarks import measuring

    rows: list[LengthsRow] = []
    notes: list[str] = []
    differences: list[str] = []
    if "kinds" in options.parts:
        rows += measuring.measure_kinds(options.workers, options.samples)
    if "chats" in options.parts:
        found, tokens = measuring.measure_chats(options.rows, options.model)
        rows += found
        notes.append(f"a chat has {tokens:.0f} tokens on average")
    if "videos" in options.parts:
        found, decoded, differences = measuring.measure_videos(options.videos)
        rows += found
        notes.append(
            f"{options.videos:,} videos, {len(measuring.VIDEO_MODELS)} models: {len(differences):,} lengths differ "
            f"from full encodes; {decoded:,} videos were decoded to be measured"
        )
    if "beside" in options.parts:
        from benchmarks import beside

        rows += beside.measure_beside(options.samples, options.workers)
    if "slope" in options.parts:
        from benchmarks import slope

        pixels = [(width, width * 3 // 4) for width in options.widths]
        found, said = slope.measure_slope(options.records, pixels, workers=max(options.workers), rounds=options.rounds)
        rows += found
        notes += said
    packages = ("torch", "transformers", "ms-swift", "pillow")
    show(rows, COLUMNS, left={"sample", "from"}, as_json=options.json, notes=notes, packages=packages)
    if differences:
        raise NotMeasuredError("\n".join(differences[:20]))
