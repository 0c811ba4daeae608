"""What measuring costs: the cases of `python -m app.bench lengths`, which load the whole stack."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import attrs
import numpy as np
import psutil
import torch
from PIL import Image

from packplan.adapters.lifeline import end_with_parent
from packplan.adapters.progress import progress
from packplan.app.bench.distributions import DISTRIBUTIONS
from packplan.app.bench.lengths import WARM_UP
from packplan.app.bench.measure import Measured, measure
from packplan.app.demo.tiny_models import write_model
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.measure import measure as measure_lengths
from packplan.app.planning.split import GatheredSplit, Planner, Stores
from packplan.app.wiring import training
from packplan.app.wiring.stores import open_stores
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.fingerprint import Fingerprint
from packplan.core.policy import PlanPolicy
from packplan.core.ports import LengthSource
from packplan.core.samples import COLUMNS, IMAGE_COLUMNS, DataFile, ImageFacts, Outcome

MODEL_TYPE = "qwen2_5_vl"

MAX_PIXELS = 1_280 * 28 * 28
"""The limit that Qwen2.5-VL's users mostly set: 1,280 tokens an image."""

STORED = 1_000_000
"""Lengths of the warm start, and of the plan that another rank receives."""

POLICY = PlanPolicy(packing_length=8192)


@attrs.frozen
class Kind:
    """One kind of sample."""

    name: str
    num_samples: int
    size: tuple[int, int] | None
    """Width and height of its image, in pixels."""


KINDS = (Kind("text", 1600, None), Kind("small image", 800, (160, 120)), Kind("photograph", 128, (4032, 3024)))

NUM_IMAGES = 8
"""Different images of a kind; samples share them."""

_FIRST_PORT, _PORTS = 19_000, 1000
"""Where two ranks meet: below the ports of tests, and below those of outgoing connections."""


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


@attrs.frozen
class Costs:
    """What was measured."""

    rows: list[Row]

    warm_start_s: float
    """To load and verify `STORED` lengths."""

    rank_memory_bytes: int
    """That a rank other than 0 takes for the plan of `STORED` samples."""

    @property
    def photo_ratio(self) -> float:
        """
        How many times the CPU time of its header a photograph's full encode takes, in the fewest
        processes.
        """
        workers = min(row.workers for row in self.rows)
        cpu = {row.way: row.cpu_ms for row in self.rows if (row.kind, row.workers) == ("photograph", workers)}
        return cpu["full"] / cpu["headers"]


def measure_costs(workers: list[int], most: int | None = None) -> Costs:
    """
    Measure all kinds of samples, *most* of each at most, with each number of worker processes.
    """
    kinds = [attrs.evolve(kind, num_samples=min(kind.num_samples, most or kind.num_samples)) for kind in KINDS]
    # One core a process, as in workers; and processes forked from one that has used more threads
    # may hang in them.
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", MODEL_TYPE, ["a photograph of the sea, seen from a hill"] * 9, seed=0)
        cases = [(kind, way, number) for kind in kinds for way in ("headers", "full") for number in workers]
        rows = []
        for kind, way, number in progress(cases, desc="measuring", leave=False):
            rows.append(_measure(kind, way, _config(folder, _write_records(folder, kind), number)))
        stores = open_stores(_config(folder, folder / "none", 1), "train")
        return Costs(rows, _warm_start(stores), _rank_memory(stores))


def _write_records(folder: Path, kind: Kind) -> Path:
    """Write the records of a kind, with an image each where it has one; return the data file."""
    path = folder / f"{kind.name}.jsonl"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    if kind.size:
        _write_images(folder, kind.name, kind.size, rng)
    lines = []
    for number in range(kind.num_samples):
        said = "the sea " * int(rng.integers(1, 60))
        record: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}]}
        record["messages"].append({"role": "assistant", "content": said})
        if kind.size:
            record |= {"images": [f"{kind.name}-{number % NUM_IMAGES}.jpg"]}
            record["messages"][0]["content"] = "<image>What is it?"
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _write_images(folder: Path, name: str, size: tuple[int, int], rng: np.random.Generator) -> None:
    for number in range(NUM_IMAGES):
        # Smooth blotches: a JPEG of noise would cost more to read than any photograph.
        blotches = rng.integers(0, 256, (size[1] // 40, size[0] // 40, 3), dtype=np.uint8)
        image = Image.fromarray(blotches).resize(size, Image.Resampling.BICUBIC)
        image.save(folder / f"{name}-{number}.jpg", quality=90)


def _config(folder: Path, data: Path, workers: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(model=str(folder / "model")),
        template=TemplateConfig(max_length=4096, max_pixels=MAX_PIXELS),
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(output_dir=str(folder / "run"), packing_length_precompute_workers=workers),
    )


def _measure(kind: Kind, way: str, config: RunConfig) -> Row:
    def prepare() -> Callable[[], tuple[float, float]]:
        samples = training.open_measurer(config, training.open_samples(config)["train"], pool_start_s=0.0)
        return lambda: _seconds_of(samples.measure_many(range(len(samples)), in_full=way == "full"), kind.num_samples)

    outcome = measure(prepare, list, repeat=1, limit_s=600)
    assert isinstance(outcome, Measured), outcome  # noqa: S101  # its data is our own
    (wall_s, cpu_s), num = outcome.result, kind.num_samples - WARM_UP
    workers = config.training.packing_length_precompute_workers
    return Row(kind.name, way, workers, num / wall_s, 1000 * cpu_s / num)


def _seconds_of(outcomes: Iterator[Outcome], total: int) -> tuple[float, float]:
    """
    Return the seconds, and the CPU seconds of all processes, that all samples but the first few
    take.
    """
    marks = []
    for done, _ in enumerate(outcomes, 1):
        if done in {WARM_UP, total}:
            # This process by its own clock: others are known in hundredths of a second.
            spent = time.process_time() + sum(map(_cpu_seconds, psutil.Process().children(recursive=True)))
            marks.append((time.perf_counter(), spent))
    (start, cpu_start), (end, cpu_end) = marks
    return end - start, cpu_end - cpu_start


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process; 0 if it has ended since it was listed."""
    try:
        spent = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(spent.user + spent.system)


class _StoredSamples:
    """A source whose samples are all stored: what a warm start asks of one."""

    mixes = False

    def __len__(self) -> int:
        return STORED

    def fingerprint(self) -> Fingerprint:
        return Fingerprint({})

    def data_digest(self, count: int) -> str:
        return str(count)

    def data_files(self) -> tuple[DataFile, ...]:
        return ()

    def leave_out(self, numbers: Sequence[int]) -> None:
        assert not numbers  # noqa: S101  # none of them is bad

    def images(self, index: int, *, decode: bool = False) -> tuple[ImageFacts, ...]:  # noqa: ARG002  # it has no files
        return (ImageFacts(index, 28, 28, index),)


def _warm_start(stores: Stores) -> float:
    """Store lengths; return the seconds until a run that finds them there may plan."""
    rows = np.zeros((STORED, len(COLUMNS)), dtype=np.int32)
    rows[:, COLUMNS.index("images")] = 1
    rows[:, COLUMNS.index("length")] = DISTRIBUTIONS["chat-8192"].lengths(STORED, seed=0)
    number = np.arange(STORED)
    images = np.zeros((STORED, len(IMAGE_COLUMNS)), dtype=np.int64)
    images[:, :4] = np.column_stack([number, np.full(STORED, 28), np.full(STORED, 28), number])
    with stores.lock.held(timeout_s=60, report=lambda _: None):
        stores.lengths.resume(Fingerprint({}), STORED, str)
        stores.lengths.append(rows, images, str(STORED), in_full=False, probe={})
    start = time.perf_counter()
    measure_lengths(
        "train", cast("LengthSource", _StoredSamples()), stores.lengths, flush_every=None, report=lambda _: None
    )
    return time.perf_counter() - start


def _free_port() -> int:
    """Return a port that is free, and that the kernel gives to no outgoing connection meanwhile."""
    for number in range(_PORTS):
        port = _FIRST_PORT + (os.getpid() + number) % _PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    message = f"no port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} is free"
    raise RuntimeError(message)


def _rank_memory(stores: Stores) -> int:
    """
    Plan what is stored on rank 0 of two; return the bytes that this takes on rank 1, beyond what it
    held before.
    """
    port = str(_free_port())

    def join(rank: int) -> Callable[[], int]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        joined = ExitStack()
        group = joined.enter_context(training.joined_ranks(None, use_cpu=True))
        source = cast("LengthSource", _StoredSamples())

        def plan() -> int:
            with joined:
                planned = Planner(group, Deadline(600)).plan(GatheredSplit("train", POLICY, source, stores))
                return len(planned.aligned.packs)

        return plan

    def plan_as_rank_zero() -> None:
        end_with_parent()
        join(0)()

    planning = multiprocessing.get_context("fork").Process(target=plan_as_rank_zero)
    planning.start()
    outcome = measure(lambda: join(1), int, repeat=1, limit_s=600)
    planning.join()
    assert isinstance(outcome, Measured), outcome  # noqa: S101  # its data is our own
    return outcome.peak_bytes
