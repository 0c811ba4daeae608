"""
Compares the time of measuring lengths with ms-swift's `AddLengthPreprocessor` and TRL's
tokenisation; loads ms-swift.
"""

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import torch
from swift.dataset import AddLengthPreprocessor

from benchmarks.child import NotMeasuredError, run_in_child
from benchmarks.lengths import OURS, LengthsRow
from benchmarks.measuring import LIMIT_S, PHOTOS, VIDEOS, VOCABULARY, config_of, seconds, write_videos
from benchmarks.records import MODEL_TYPE, TEXT, paragraphs, record, write_chats, write_photos, write_records
from packplan.adapters.processes import end_with_parent
from packplan.adapters.progress import progress
from packplan.adapters.samples.measurer import AT_ONCE, SwiftMeasurer
from packplan.app.opening.splits import open_encoders
from packplan.core.config.run import RunConfig, TemplateConfig
from tools.demo.tiny_models import write_model
from tools.demo.videos import video_specs

SAMPLES = {
    "chat": (4096, 1024),
    "image of 640x480": (4096, 192),
    "four images of 640x480": (2048, 96),
    "video": (512, 96),
}
"""Kind -> number of samples that Packplan measures, and fewer samples for the slower tools."""

NUM_VIDEOS = 48
"""Number of different videos, which the samples share."""

ROUNDS = 3
"""Number of rounds. A round measures all ways in turn, every second round in backward order."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)

Seconds = tuple[float, float]
"""Wall-clock seconds, and processor seconds of all processes, for the counted samples."""


@attrs.frozen
class Way:
    """One tool's way to measure a kind of samples."""

    num_counted: int
    """Number of samples after those that warm up."""

    spend: Callable[[int], Seconds]
    """Function of a number of processes that returns the seconds of the counted samples."""


def measure_beside(most: int | None, workers: Sequence[int]) -> list[LengthsRow]:
    """
    Measure every kind of sample in each way.

    Args:
        most: Maximum number of samples of a kind; None uses the numbers in `SAMPLES`.
        workers: Numbers of processes to measure with, one after the other.

    Returns:
        Rows with the samples per second of the best round, and the processor time of the median
        round.
    """
    # Threads of the tokenizer's library would be no processes of the number that is asked for.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    rows = []
    with TemporaryDirectory() as name:
        for kind, planned in SAMPLES.items():
            ours, theirs = (min(number, most or number) for number in planned)
            if theirs <= AT_ONCE:
                message = f"--samples is {theirs}, but has to exceed the {AT_ONCE} samples that warm up"
                raise NotMeasuredError(message)
            ways = _ways_of(_write(Path(name), kind, ours), ours, theirs, with_trl=kind == "chat")
            found = _spent(ways, workers, kind)
            rows += [
                LengthsRow(
                    kind,
                    way,
                    number,
                    ways[way].num_counted / min(wall_s for wall_s, _ in spent),
                    1000 * statistics.median(cpu_s for _, cpu_s in spent) / ways[way].num_counted,
                )
                for (way, number), spent in found.items()
            ]
    return rows


def _write(folder: Path, kind: str, total: int) -> RunConfig:
    """Write the model and the samples of a kind; return the run that measures these samples."""
    if kind == "chat":
        write_model(folder / "text", "qwen2", paragraphs(), seed=0, vocabulary=VOCABULARY)
        data = write_chats(folder / "chats.jsonl", total)
        return config_of(folder, folder / "text", data, TemplateConfig(max_length=8192))
    write_model(folder / "model", MODEL_TYPE, TEXT, seed=0)
    if kind == "video":
        videos = write_videos(folder, video_specs(min(total, NUM_VIDEOS)))
        records = [record("What?", "A bar.", videos=[str(videos[place % len(videos)])]) for place in range(total)]
        data = write_records(folder / "v.jsonl", records)
        return config_of(folder, folder / "model", data, VIDEOS)
    data = write_photos(folder, (640, 480), total)
    if kind.startswith("four"):
        photos = sorted(map(str, folder.glob("640x480-*.jpg")))
        chosen = np.random.default_rng(0).choice(photos, (total, 4)).tolist()
        data = write_records(folder / "four.jsonl", [record("What?", "the sea " * 9, images=four) for four in chosen])
    return config_of(folder, folder / "model", data, PHOTOS)


def _spent(ways: dict[str, Way], workers: Sequence[int], kind: str) -> dict[tuple[str, int], list[Seconds]]:
    """Return the seconds of each way on each number of processes, round by round."""
    cases = list(product(ways, workers))
    found: dict[tuple[str, int], list[Seconds]] = {case: [] for case in cases}
    for number in progress(range(ROUNDS), desc=f"measuring: {kind}", leave=False):
        for way, processes in cases if number % 2 == 0 else cases[::-1]:
            spend = partial(ways[way].spend, processes)
            found[way, processes].append(run_in_child(spend, limit_s=LIMIT_S))
    return found


def _ways_of(config: RunConfig, ours: int, theirs: int, *, with_trl: bool) -> dict[str, Way]:
    encoder = open_encoders(config)["train"]
    template = encoder.template
    preprocessor = AddLengthPreprocessor(template)
    (data,) = config.custom.train_jsonl
    lines = Path(data).read_text(encoding="utf-8").splitlines()

    def measure(processes: int) -> Seconds:
        measurer = SwiftMeasurer(encoder, workers=processes)
        measurer.pool_start_s = 0.0
        return seconds(measurer, total=ours)

    def add_length(row: int) -> None:
        read = json.loads(lines[row])
        if images := read.get("images"):
            read["images"] = [str(Path(data).parent / image) for image in images]
        preprocessor.preprocess(read)

    def tokenize(row: int) -> None:
        messages = json.loads(lines[row])["messages"]
        template.tokenizer.apply_chat_template(messages, chat_template=_CHAT_TEMPLATE, return_dict=True)

    others = {"ms-swift, AddLengthPreprocessor": add_length}
    if with_trl:
        others["TRL, apply_chat_template"] = tokenize
    counted = range(AT_ONCE, theirs)
    return {
        OURS: Way(ours - AT_ONCE, measure),
        **{way: Way(len(counted), partial(_spend, call, counted)) for way, call in others.items()},
    }


def _spend(call: Callable[[int], None], rows: range, processes: int) -> Seconds:
    """
    Return the seconds of measuring rows, which are divided among processes.

    Args:
        call: Function that measures the row with a given index.
        rows: Indices of the counted rows. Each process measures all earlier rows first, to warm up.
        processes: Number of processes.
    """
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes + 1), context.SimpleQueue()

    def work(part: range) -> None:
        end_with_parent()
        for row in range(rows.start):
            call(row)
        barrier.wait(LIMIT_S)
        before = time.process_time()
        for row in part:
            call(row)
        results.put(time.process_time() - before)

    started: list[Any] = [context.Process(target=work, args=(rows[first::processes],)) for first in range(processes)]
    for process in started:
        process.start()
    barrier.wait(LIMIT_S)
    before = time.perf_counter()
    cpu_s = sum(results.get() for _ in started)
    return time.perf_counter() - before, cpu_s
