"""
Memory of a run over Parquet with images in its columns, or over chats: planned, and trained for
some steps.

Two runs, of all rows and of a tenth of them, each in processes of its own, whose memory is summed:
pages that several share count once (PSS). Anonymous memory is what they hold; pages of files that
are mapped are told apart, since the system takes them back when it needs them.

`--reading ROWS` measures processor time instead: starts, and shuffled reads, of records with images
in each format.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from packplan.app.bench.table import aligned
from packplan.core.errors import DataSetError

_EVERY_S = 0.2

_NUM_IMAGES = 64
"""Different images; rows share them."""


@attrs.frozen
class Memory:
    """What a run held at most, all its processes together."""

    num_rows: int
    seconds: float

    anonymous_bytes: int
    """Memory that is in no file."""

    total_bytes: int
    """With pages of files that are mapped: libraries, data."""

    num_processes: int
    """The most at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="of the larger file")
    parser.add_argument("--text", action="store_true", help="chats in JSON Lines instead of Parquet with images")
    parser.add_argument(
        "--reading", type=int, metavar="ROWS", help="time starts and shuffled reads of so many rows in each format"
    )
    parser.add_argument("--side", type=int, default=16, metavar="PIXELS", help="of each image")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of training")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that measure")
    parser.add_argument("--loaders", type=int, default=1, metavar="N", help="processes that load what is trained")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    if options.reading is not None:
        _run_reading(options.reading, options.side, as_json=options.json)
        return
    if options.rows < 640:
        message = "--rows has to be at least 640"
        raise DataSetError(message)
    from packplan.app.demo.tiny_models import write_model

    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", "qwen2_5_vl", ["What is it? A blue dot, on a hill."] * 9, seed=0)
        runs = [_measure(folder, rows, options) for rows in (options.rows // 10, options.rows)]
    growth = (runs[1].anonymous_bytes - runs[0].anonymous_bytes) / (runs[1].num_rows - runs[0].num_rows)
    if options.json:
        print(json.dumps({"runs": [attrs.asdict(one) for one in runs], "anonymous_bytes_a_row": growth}, indent=1))
        return
    head = ("rows", "seconds", "processes", "anonymous MB", "with files MB")
    cells = [
        (f"{one.num_rows:,}", f"{one.seconds:.0f}", str(one.num_processes), f"{one.anonymous_bytes / 1e6:.0f}",
         f"{one.total_bytes / 1e6:.0f}")
        for one in runs
    ]  # fmt: skip
    print("\n".join(aligned([head, *cells], left=set())))
    print(f"\nanonymous memory grows by {growth:.0f} bytes a row")


def _run_reading(num_rows: int, side: int, *, as_json: bool) -> None:
    """
    Time starts and shuffled reads in each format, then print.

    Args:
        num_rows: Rows of each file.

        side: Pixels of each image's sides.

        as_json: Print one document.
    """
    from packplan.app.bench.measuring.reading import measure_reading

    if num_rows < 1:
        message = "--reading has to be at least 1"
        raise DataSetError(message)
    with TemporaryDirectory() as name:
        costs = measure_reading(Path(name), num_rows, side=side)
    if as_json:
        print(json.dumps([attrs.asdict(one) for one in costs], indent=1))
        return
    head = ("format", "first start s", "later start s", "ratio", "fetch us", "ratio")
    cells = [
        (one.format, f"{one.first_start_s:.3f}", f"{one.later_start_s:.3f}",
         f"{one.first_start_s / one.later_start_s:.1f}", f"{one.fetch_us:.0f}", f"{one.fetch_ratio:.2f}")
        for one in costs
    ]  # fmt: skip
    print("\n".join(aligned([head, *cells], left={0})))


def _measure(folder: Path, num_rows: int, options: argparse.Namespace) -> Memory:
    """
    Plan and train on so many rows; DataSetError if the run fails.

    Args:
        folder: Holds the model; the data and the run's output go there.

        num_rows: Rows of the data.

        options: Of the command.
    """
    data, config, log = (
        folder / f"{num_rows}.{kind}" for kind in ("jsonl" if options.text else "parquet", "yaml", "log")
    )
    if options.text:
        _write_chats(data, num_rows)
    else:
        _write_rows(data, num_rows, options.side)
    sections: dict[str, dict[str, Any]] = {
        "model": {"model": str(folder / "model")},
        "template": {"max_length": 2048},
        "custom": {"train_jsonl": str(data)},
        "training": {
            "output_dir": str(folder / f"run-{num_rows}"), "max_steps": options.steps, "report_to": [],
            "learning_rate": 1e-3, "save_strategy": "no", "use_cpu": True, "gradient_checkpointing": False,
            "dataloader_num_workers": options.loaders, "packing_length_precompute_workers": options.workers,
        },
    }  # fmt: skip
    config.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    started = time.perf_counter()
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "packplan.app.sft", str(config)], stdout=said, stderr=said
        )  # this program
        try:
            peaks = _watch(process)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        end = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-300:]
        message = f"the run over {num_rows:,} rows failed: {end}"
        raise DataSetError(message)
    return Memory(num_rows, time.perf_counter() - started, *peaks)


def _write_rows(path: Path, num_rows: int, side: int) -> None:
    """
    Write rows with an image each.

    Args:
        path: The Parquet file.

        num_rows: Rows, in groups of 10,000.

        side: Pixels of each image's sides.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng = np.random.default_rng(0)
    images = []
    for _ in range(_NUM_IMAGES):
        held = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(held, format="PNG")
        images.append(held.getvalue())
    schema = pa.schema({"query": pa.string(), "response": pa.string(), "image": pa.binary()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 10_000):
            rows = range(start, min(start + 10_000, num_rows))
            columns = {
                "query": [f"<image>What is number {row}?" for row in rows],
                "response": ["A blue dot. " * (1 + row % 9) for row in rows],
                "image": [images[row % _NUM_IMAGES] for row in rows],
            }
            writer.write_table(pa.table(columns, schema=schema))


def _write_chats(path: Path, num_rows: int) -> None:
    """Write chats of 100 to 300 tokens."""
    with path.open("w", encoding="utf-8") as file:
        for row in range(num_rows):
            asked = f"What is number {row}? " * (1 + row % 10)
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "A blue dot. " * (10 + row % 50)},
            ]
            file.write(f"{json.dumps({'messages': messages})}\n")


def _watch(process: subprocess.Popen[bytes]) -> tuple[int, int, int]:
    """Return the most that a process and its children have: anonymous bytes, all, processes."""
    import psutil

    most = [0, 0, 0]
    own = psutil.Process(process.pid)
    while process.poll() is None:
        anonymous = total = number = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in (own, *own.children(recursive=True)):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    held = _shares(one.pid)
                    anonymous, total, number = anonymous + held[0], total + held[1], number + 1
        most = [max(pair) for pair in zip(most, (anonymous, total, number), strict=True)]
        time.sleep(_EVERY_S)
    return most[0], most[1], most[2]


def _shares(pid: int) -> tuple[int, int]:
    """Return a process's share of anonymous memory, and of all, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return found["Pss_Anon"] + found.get("Pss_Shmem", 0), found["Pss"]
