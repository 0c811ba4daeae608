"""
Measures how the processor time and memory of `packplan measure` grow with the number of records,
for `benchmarks.lengths`.

The command runs in a process of its own, on growing numbers of records, each with its own image
file. The slope of a straight line through the processor times is the time of a record, with its
uncertainty.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from scipy import stats

from benchmarks.child import peak_bytes, reset_peak, run_in_child
from benchmarks.lengths import OURS, LengthsRow
from benchmarks.measuring import LIMIT_S, PHOTOS, VOCABULARY
from benchmarks.records import MODEL_TYPE, chat, paragraphs, write_photos, write_records
from packplan.adapters.progress import progress
from packplan.app import measure
from tools.demo.tiny_models import write_model

CACHES = ("warm", "cold")
"""States of the page cache: it holds the files (`warm`), or they were dropped from it (`cold`)."""

ALL, CORES = 2_000_000, 8
"""Numbers of records and cores for which the time is predicted."""


@attrs.frozen
class Spent:
    """Cost of one run of the command."""

    num_records: int
    seconds: float
    cpu_s: float
    """Processor time of all processes."""

    main_s: float
    """Processor time of the process that writes the table."""

    peak_bytes: int
    """Peak memory of that process, without the memory that it had before the command."""

    read_bytes: int
    """Bytes read from the disk."""


@attrs.frozen
class Line:
    """Straight line through costs over the number of records."""

    slope: float
    intercept: float
    error: float
    """Half the width of the slope's 95 % confidence interval."""

    @classmethod
    def through(cls, runs: Sequence[Spent], cost: Callable[[Spent], float]) -> Line:
        """Return the least-squares line through the costs of some runs."""
        fitted = stats.linregress([run.num_records for run in runs], [cost(run) for run in runs])
        wide = stats.t.ppf(0.975, max(len(runs) - 2, 1)) * fitted.stderr
        return cls(float(fitted.slope), float(fitted.intercept), float(wide))


def measure_slope(
    sizes: Sequence[int], pixels: Sequence[tuple[int, int]], *, workers: int, rounds: int
) -> tuple[list[LengthsRow], list[str]]:
    """
    Run the command for each number of records and image size, with a warm and a cold page cache.

    Args:
        sizes: Numbers of records, at least two.
        pixels: Width and height of the images, for each size.
        workers: Number of processes that measure.
        rounds: Number of runs of each case.

    Returns:
        A row for each run, and a sentence for each size and cache about the fitted lines.
    """
    torch.set_num_threads(1)
    rows: list[LengthsRow] = []
    notes = []
    for width, height in pixels:
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_model(folder / "model", MODEL_TYPE, paragraphs(), seed=0, vocabulary=VOCABULARY)
            files = _write_files(folder, (width, height), max(sizes))
            found: dict[str, list[Spent]] = {cache: [] for cache in CACHES}
            cases = list(product(range(rounds), CACHES, sizes))
            random.Random(0).shuffle(cases)  # noqa: S311  # the order of runs: what slows the machine slows all alike
            for _, cache, number in progress(cases, desc=f"measuring {width}x{height}", leave=False):
                data = write_records(folder / "data.jsonl", _records(files[:number]))
                found[cache].append(_run(folder, data, files[:number], workers=workers, cold=cache == "cold"))
        for cache, runs in found.items():
            sample = f"image of {width}x{height}, {cache} cache"
            rows += [
                LengthsRow(
                    f"{run.num_records:,} x {sample}",
                    OURS,
                    workers,
                    run.num_records / run.seconds,
                    1000 * run.cpu_s / run.num_records,
                )
                for run in sorted(runs, key=lambda run: run.num_records)
            ]
            notes.append(f"{sample}: {_in_words(runs)}")
    return rows, notes


def _write_files(folder: Path, size: tuple[int, int], number: int) -> list[Path]:
    """Write image files that all differ; return their paths."""
    write_photos(folder, size, 1)
    photos = [path.read_bytes() for path in sorted(folder.glob(f"{size[0]}x{size[1]}-*.jpg"))]
    files = [folder / f"{place:07d}.jpg" for place in range(number)]
    for place, file in enumerate(files):
        # Behind the end of a JPEG, bytes are no part of it.
        file.write_bytes(photos[place % len(photos)] + place.to_bytes(8, "little"))
    return files


def _records(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a chat about each image, as in the data of LLaVA."""
    records = []
    for place, file in enumerate(files):
        messages = [one for one in chat(place)["messages"] if one["role"] != "system"]
        messages[0]["content"] = f"<image>\n{messages[0]['content']}"
        records.append({"messages": messages, "images": [file.name]})
    return records


def _run(folder: Path, data: Path, files: Sequence[Path], *, workers: int, cold: bool) -> Spent:
    """Run the command in a process of its own, and return its costs."""
    output = folder / "lengths.parquet"
    keys = [
        f"training.packing_length_precompute_workers={workers}",
        f"template.max_pixels={PHOTOS.max_pixels}",
        f"custom.records_cache={folder / 'cache'}",
    ]
    arguments = [str(data), "--model", str(folder / "model"), "-o", str(output), *keys]
    for file in (data, *files):
        _touch(file, cold=cold)
    spent = run_in_child(partial(_spend, arguments, len(files)), limit_s=LIMIT_S)
    output.unlink()
    return Spent(len(files), *spent)


def _touch(file: Path, *, cold: bool) -> None:
    """Bring a file into the page cache, or drop it from there."""
    with file.open("rb") as opened:
        if cold:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            opened.read()


def _spend(arguments: list[str], number: int) -> list[float]:
    before, started, cpu_s = reset_peak(), time.perf_counter(), time.process_time()
    if measure.main(arguments) != 0:
        message = f"the command failed on {number:,} records: {json.dumps(arguments)}"
        raise RuntimeError(message)
    main_s, seconds = time.process_time() - cpu_s, time.perf_counter() - started
    children, own = (resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    read = 512 * (children.ru_inblock + own.ru_inblock)
    return [seconds, main_s + children.ru_utime + children.ru_stime, main_s, peak_bytes() - before, read]


def _in_words(runs: Sequence[Spent]) -> str:
    """Return a sentence with the costs of a record, and the predicted time for `ALL` records."""
    cpu = Line.through(runs, lambda run: 1000 * run.cpu_s)
    main = Line.through(runs, lambda run: 1000 * run.main_s)
    memory = Line.through(runs, lambda run: run.peak_bytes)
    # The process that writes is one of those on the cores, and at most as fast as one.
    slowest = max((cpu.slope / CORES, cpu.error / CORES), (main.slope, main.error))
    minutes, error = (ALL * milliseconds / 60_000 for milliseconds in slowest)
    read = sum(run.read_bytes for run in runs) / sum(run.num_records for run in runs)
    return (
        f"{cpu.slope:.3f} ± {cpu.error:.3f} ms of processor time a record beyond {cpu.intercept / 1000:.1f} s, "
        f"{main.slope:.3f} ± {main.error:.3f} ms of it in the main process, which needs {memory.slope:,.0f} ± "
        f"{memory.error:,.0f} bytes for each record; {read / 1000:,.1f} kB a record were read from disk; "
        f"{ALL:,} records would take "
        f"{minutes:.1f} ± {error:.1f} minutes on {CORES} such cores"
    )
