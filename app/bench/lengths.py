"""
Measuring lengths: samples per second and CPU time of a sample, on data made for it.

Text, small images and photographs, each measured from the images' headers and by encoding in full, in one process and in
two (which take seconds to start). Then what a run with a million stored lengths pays: seconds to load and verify them, and memory on the other ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import attrs
import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from app import wiring
from app.bench.distributions import DISTRIBUTIONS
from app.bench.measure import Measured, measure
from app.bench.table import aligned
from app.demo.tiny_models import write_model
from app.measuring import measure as measure_lengths
from app.planning import Knobs, Stores, plan_split
from core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from core.fingerprint import Fingerprint
from core.ports import LengthSource
from core.samples import COLUMNS, ImageFacts

MODEL_TYPE = "qwen2_5_vl"

MAX_PIXELS = 1_280 * 28 * 28
"""The limit that Qwen2.5-VL's users mostly set: 1,280 tokens an image."""

STORED = 1_000_000
"""Lengths of the warm start, and of the plan that another rank receives."""

KNOBS = Knobs(
    packing=True,
    packing_length=8192,
    algorithm="constant_volume",
    min_fill_ratio="0.65",
    drop_last=True,
    allow_single_long=True,
    dataloader_drop_last=False,
    seed=0,
    refuse_longer=False,
)


@attrs.frozen
class Kind:
    """One kind of sample."""

    name: str
    num_samples: int
    size: tuple[int, int] | None
    """Width and height of its image, in pixels."""


KINDS = (Kind("text", 400, None), Kind("small image", 200, (160, 120)), Kind("photograph", 24, (4032, 3024)))


@attrs.frozen
class Row:
    """One kind, measured in one way."""

    kind: str
    way: str
    """`headers` or `full`."""

    workers: int
    samples_per_s: float
    cpu_ms: float
    """CPU time of a sample, of all processes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N", help="(default: 1 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    # One core a process, as in workers; and processes forked from one that has used more threads may hang in them.
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", MODEL_TYPE, ["a photograph of the sea, seen from a hill"] * 9, seed=0)
        cases = [(kind, way, workers) for kind in KINDS for way in ("headers", "full") for workers in options.workers]
        rows: list[Row] = []
        for kind, way, workers in tqdm(cases, desc="measuring", leave=False, disable=None):
            config = _config(folder, _write_records(folder, kind), workers)
            rows.append(_measure(kind, way, config))
        stores = wiring.open_stores(config, "train")
        warm_start = _warm_start(stores)
        rank_bytes = _rank_memory(stores)
    cpu = {(row.kind, row.way): row.cpu_ms for row in rows if row.workers == min(options.workers)}
    ratio = cpu["photograph", "full"] / cpu["photograph", "headers"]
    if options.json:
        document = {
            "rows": [attrs.asdict(row) for row in rows],
            "photo_full_over_header_cpu_ratio": ratio,
            "warm_start_s": warm_start,
            "rank_memory_bytes": rank_bytes,
            "stored_samples": STORED,
            "cores": os.cpu_count(),
        }
        print(json.dumps(document, indent=1))
        return
    head = ("sample", "from", "workers", "samples/s", "CPU ms/sample")
    cells = [(r.kind, r.way, str(r.workers), f"{r.samples_per_s:,.0f}", f"{r.cpu_ms:.2f}") for r in rows]
    print("\n".join(aligned([head, *cells], left={0, 1})))
    print(f"\na photograph's full encode costs {ratio:.1f} times the CPU time of its header")
    print(f"loading and verifying {STORED:,} stored lengths and as many images: {warm_start:.2f} s")
    print(f"memory that a rank other than 0 takes for their plan: {rank_bytes / 1e6:.0f} MB")


def _write_records(folder: Path, kind: Kind) -> Path:
    """Write the records of a kind, with an image each where it has one; return the data file."""
    path = folder / f"{kind.name}.jsonl"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    lines = []
    for number in range(kind.num_samples):
        said = "the sea " * int(rng.integers(1, 60))
        record: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}]}
        record["messages"].append({"role": "assistant", "content": said})
        if kind.size:
            image = f"{kind.name}-{number}.jpg"
            # Smooth blotches: a JPEG of noise would cost more to read than any photograph.
            blotches = rng.integers(0, 256, (kind.size[1] // 40, kind.size[0] // 40, 3), dtype=np.uint8)
            Image.fromarray(blotches).resize(kind.size, Image.Resampling.BICUBIC).save(folder / image, quality=90)
            record |= {"images": [image]}
            record["messages"][0]["content"] = "<image>What is it?"
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _config(folder: Path, data: Path, workers: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(model=str(folder / "model")),
        template=TemplateConfig(max_length=4096, max_pixels=MAX_PIXELS),
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(output_dir=str(folder / "run"), packing_length_precompute_workers=workers),
    )


def _measure(kind: Kind, way: str, config: RunConfig) -> Row:
    def prepare() -> Callable[[], float]:
        samples = wiring.open_samples(config, pool_start_s=0.0)["train"]
        samples.measure(0)
        return partial(_cpu_of, lambda: list(samples.measure_many(range(len(samples)), in_full=way == "full")))

    outcome = measure(prepare, float, repeat=1, limit_s=600)
    assert isinstance(outcome, Measured), outcome  # noqa: S101  # its data is our own
    return Row(
        kind.name,
        way,
        config.training.packing_length_precompute_workers,
        kind.num_samples / outcome.seconds,
        1000 * outcome.result / kind.num_samples,
    )


def _cpu_of(call: Callable[[], object]) -> float:
    """Return the CPU seconds that a call takes, with those of the processes it starts and ends."""

    def spent() -> float:
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    before = spent()
    call()
    return spent() - before


class _StoredSamples:
    """A source whose samples are all stored: what a warm start asks of one."""

    def __len__(self) -> int:
        return STORED

    def fingerprint(self) -> Fingerprint:
        return Fingerprint({})

    def data_digest(self, count: int) -> str:
        return str(count)

    def images(self, index: int) -> tuple[ImageFacts, ...]:
        return (ImageFacts(index, 28, 28, index),)


def _warm_start(stores: Stores) -> float:
    """Store lengths; return the seconds until a run that finds them there may plan."""
    rows = np.ones((STORED, len(COLUMNS)), dtype=np.int32)
    rows[:, COLUMNS.index("length")] = DISTRIBUTIONS["chat-8192"].lengths(STORED, seed=0)
    number = np.arange(STORED)
    images = np.column_stack([number, np.full(STORED, 28), np.full(STORED, 28), number])
    with stores.lock.held(timeout_s=60, tell=lambda _: None):
        stores.lengths.resume(Fingerprint({}), STORED, str)
        stores.lengths.append(rows, images, str(STORED), probe={})
    start = time.perf_counter()
    measure_lengths(
        "train", cast("LengthSource", _StoredSamples()), stores.lengths, flush_every=None, tell=lambda _: None
    )
    return time.perf_counter() - start


def _rank_memory(stores: Stores) -> int:
    """Plan what is stored on rank 0 of two; return the bytes that this takes on rank 1, beyond what it held before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def join(rank: int) -> Callable[[], int]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        joined = ExitStack()
        group = joined.enter_context(wiring.joined_ranks({"use_cpu": True}))
        source = cast("LengthSource", _StoredSamples())

        def plan() -> int:
            with joined:
                planned = plan_split(
                    "train", KNOBS, source=source, stores=stores, group=group, flush_every=None, timeout_s=600
                )
                return len(planned.aligned.packs)

        return plan

    planning = multiprocessing.get_context("fork").Process(target=lambda: join(0)())  # noqa: PLW0108  # not here, there
    planning.start()
    outcome = measure(lambda: join(1), int, repeat=1, limit_s=600)
    planning.join()
    assert isinstance(outcome, Measured), outcome  # noqa: S101  # its data is our own
    return outcome.peak_bytes
