"""
Starts and shuffled reads of records in each format: processor time, beside JSON Lines that name
image files.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from packplan.adapters.samples.files import open_records
from packplan.adapters.samples.formats.kept import SETTLED_NS
from packplan.core.ports import Records
from packplan.core.samples import to_images

REFERENCE = "JSON Lines, image files"

_GROUP = 1000
"""Rows of a row group of Parquet, and of a batch of Arrow."""

_STARTS = 3
"""A copy is made on the first; what its records are is kept on the second."""

_PASSES = 3


@attrs.frozen
class ReadingCost:
    """What reading a file of one format costs, in processor time."""

    format: str

    first_start_s: float
    """Opened and digested; what cannot be read in any order is copied."""

    later_start_s: float

    fetch_us: float
    """A record in shuffled order, and the bytes of its image."""

    fetch_ratio: float
    """To that of a record of JSON Lines that names an image file."""


def measure_reading(folder: Path, num_rows: int, *, side: int) -> list[ReadingCost]:
    """
    Write the same rows in each format, start on each, and fetch all rows in shuffled order.

    Args:
        folder: Where files are written.

        num_rows: Rows of each file.

        side: Pixels of each image's sides.
    """
    files = _write(folder, num_rows, side)
    starts: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(_STARTS):
        # A file, or a copy, that was just written might change unseen: nothing is kept of it yet.
        time.sleep(1.5 * SETTLED_NS / 1e9)
        for name, path in files.items():
            starts[name].append(_timed(partial(_start, path, folder / f"cache of {path.name}"))[0])
    order = np.random.default_rng(0).permutation(num_rows).tolist()
    fetches: dict[str, float] = {}
    for name, path in files.items():
        records = _start(path, folder / f"cache of {path.name}")
        fetches[name] = 1e6 / num_rows * min(_timed(partial(_fetch, records, order))[0] for _ in range(_PASSES))
    return [
        ReadingCost(name, starts[name][0], starts[name][-1], fetches[name], fetches[name] / fetches[REFERENCE])
        for name in files
    ]


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def _start(path: Path, cache: Path) -> Records:
    records = open_records((str(path),), cache=cache)
    records.digest(len(records))
    return records


def _fetch(records: Records, order: Sequence[int]) -> int:
    """Read records and their images, and return how many bytes those have."""
    num_bytes = 0
    for index in order:
        for image in to_images(records[index]["images"]):
            held = image if isinstance(image, bytes) else Path(records.folder(index), image).read_bytes()
            num_bytes += len(held)
    return num_bytes


def _write(folder: Path, num_rows: int, side: int) -> dict[str, Path]:
    """Return the files by what they are; the first is the one that others are compared with."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = _images(num_rows, side)
    (folder / "images").mkdir()
    for number, image in enumerate(images):
        (folder / "images" / f"{number}.png").write_bytes(image)
    texts = [{"query": f"<image>What is number {row}?", "response": "A blue dot. " * 20} for row in range(num_rows)]
    named = [{**text, "images": [f"images/{row}.png"]} for row, text in enumerate(texts)]
    coded = [{**text, "images": [base64.b64encode(images[row]).decode()]} for row, text in enumerate(texts)]
    table = pa.table({
        "query": [text["query"] for text in texts], "response": [text["response"] for text in texts],
        "images": [[{"bytes": image, "path": None}] for image in images],
    })  # fmt: skip

    paths = {
        REFERENCE: folder / "named.jsonl",
        "JSON Lines, base64": folder / "coded.jsonl",
        "JSON array, image files": folder / "named.json",
        "gzip, base64": folder / "coded.jsonl.gz",
        "Parquet": folder / "rows.parquet",
        "Arrow": folder / "rows.arrow",
    }
    paths[REFERENCE].write_bytes(_lines(named))
    paths["JSON Lines, base64"].write_bytes(_lines(coded))
    paths["JSON array, image files"].write_text(json.dumps(named), encoding="utf-8")
    paths["gzip, base64"].write_bytes(gzip.compress(_lines(coded), compresslevel=1))
    pq.write_table(table, paths["Parquet"], row_group_size=_GROUP)
    with pa.ipc.new_stream(str(paths["Arrow"]), table.schema) as writer:
        writer.write_table(table, max_chunksize=_GROUP)
    return paths


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _images(number: int, side: int) -> list[bytes]:
    """Return different images; noise, so that none is smaller than its pixels."""
    from PIL import Image

    rng, images = np.random.default_rng(0), []
    for _ in range(number):
        held = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(held, format="PNG")
        images.append(held.getvalue())
    return images
