"""Times how lengths are measured, for `benchmarks.lengths`; loads torch and ms-swift."""

import os
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from benchmarks.child import NotMeasuredError, run_in_child
from benchmarks.lengths import LengthsRow
from benchmarks.records import MODEL_TYPE, TEXT, paragraphs, record, write_chats, write_photos, write_records
from packplan.adapters.progress import progress
from packplan.adapters.samples.measurer import AT_ONCE, SwiftMeasurer
from packplan.app.opening.splits import open_splits
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.samples.tables import MeasuredSample, RecordOutcome
from tools.demo.tiny_models import write_model
from tools.demo.videos import VideoSpec, video_specs

KINDS: dict[str, tuple[int, tuple[int, int] | None]] = {
    "text": (1600, None),
    "small image": (800, (160, 120)),
    "photograph": (128, (4032, 3024)),
}
"""Kind -> number of samples; width and height of the image in pixels, or None without image."""

WAYS = ("headers", "full encode")

VIDEO_MODELS = ("qwen2_5_vl", "qwen3_vl")

CLIP, CLIP_FRAMES = VideoSpec(rate=Fraction(30), num_frames=900, size=(1280, 720)), 60
"""Video of 30 s at 720p, and the number of frames that are sampled from it."""

LIMIT_S = 3600.0
"""Seconds after which a process is ended."""

VOCABULARY = 16_000
"""Size of the vocabulary that the tokenizer of chats learns."""

PHOTOS = TemplateConfig(max_length=4096, max_pixels=1_280 * 28 * 28)
"""Template keys with the limit that users of Qwen2.5-VL mostly set: 1,280 tokens an image."""

VIDEOS = TemplateConfig(max_length=65536, video_min_pixels=3200)
"""Template keys that do not enlarge small frames, so that ten minutes of video fit into memory."""


def measure_kinds(workers: Sequence[int], most: int | None) -> list[LengthsRow]:
    """Measure at most *most* samples of each kind in both ways, with each number of *workers*."""
    # Processes forked from one that has used more threads may hang in them.
    torch.set_num_threads(1)
    cases = list(product(KINDS, WAYS, workers))
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", MODEL_TYPE, TEXT, seed=0)
        for kind, way, number in progress(cases, desc="measuring", leave=False):
            planned, size = KINDS[kind]
            total = min(planned, most or planned)
            if total <= AT_ONCE:
                message = f"--samples is {total}, but has to exceed the {AT_ONCE} samples that warm up"
                raise NotMeasuredError(message)
            data = write_photos(folder, size, total) if size else _write_texts(folder, total)
            config = config_of(folder, folder / "model", data, PHOTOS, workers=number)
            spend = partial(_opened_seconds, config, in_full=way == WAYS[1], total=total)
            wall_s, cpu_s = run_in_child(spend, limit_s=LIMIT_S)
            counted = total - AT_ONCE
            rows.append(LengthsRow(kind, way, number, counted / wall_s, 1000 * cpu_s / counted))
    return rows


def measure_chats(num_rows: int, model: str | None) -> tuple[list[LengthsRow], float]:
    """
    Compare measuring chats with the bare tokenizer; return the rows, and the mean tokens of a chat.

    Each block of chats is measured in all ways in turn, so that a slow phase of the machine affects
    all ways.
    """
    # Threads of the tokenizer's library would hide its work from this process's clock.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    if num_rows <= AT_ONCE:
        message = f"--rows is {num_rows}, but has to exceed the {AT_ONCE} rows that warm up"
        raise NotMeasuredError(message)
    with TemporaryDirectory() as name:
        folder = Path(name)
        if model is None:
            write_model(folder / "model", "qwen2", paragraphs(), seed=0, vocabulary=VOCABULARY)
        data = write_chats(folder / "chats.jsonl", num_rows)
        config = config_of(folder, Path(model or folder / "model"), data, TemplateConfig(max_length=8192))
        ways, lengths = _ways_of_chats(config)
        spent = dict.fromkeys(ways, 0.0)
        for start in progress(range(0, num_rows, AT_ONCE), desc="measuring chats", leave=False):
            for way, call in ways.items():
                before = time.process_time()
                call(range(start, min(start + AT_ONCE, num_rows)))
                spent[way] += (time.process_time() - before) * (start > 0)
    counted = num_rows - AT_ONCE
    rows = [LengthsRow("chat", way, 1, counted / cpu_s, 1000 * cpu_s / counted) for way, cpu_s in spent.items()]
    return rows, sum(lengths) / num_rows


def measure_videos(number: int) -> tuple[list[LengthsRow], int, list[str]]:
    """
    Compare lengths of generated videos from their containers with full encodes, and time a clip.

    Returns:
        The clip's rows, the number of decoded videos, and a line for each difference.
    """
    torch.set_num_threads(1)
    differences: list[str] = []
    decoded = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        videos = write_videos(folder, video_specs(number))
        for model in VIDEO_MODELS:
            write_model(folder / model, model, TEXT, seed=0)
            quick, full = (video_lengths(folder / model, videos, in_full=in_full) for in_full in (False, True))
            differences += [f"{model}, {line}" for line in differing(videos, quick, full)]
            decoded = sum(image.decoded for one in quick if isinstance(one, MeasuredSample) for image in one.media)
        spent = _clip_seconds(folder / VIDEO_MODELS[0], CLIP.write(folder / "clip.mp4"))
    clip = f"clip of {CLIP.num_frames // 30} s, {CLIP.size[0]}x{CLIP.size[1]}"
    return [LengthsRow(clip, way, 1, 1 / cpu_s, 1000 * cpu_s) for way, cpu_s in spent.items()], decoded, differences


def write_videos(folder: Path, videos: Sequence[VideoSpec]) -> list[Path]:
    """Encode videos into a folder; return their paths."""
    numbered = progress(enumerate(videos), desc="encoding", total=len(videos), leave=False)
    return [video.write(folder / f"{number:03d}_{video.codec}.{video.container}") for number, video in numbered]


def video_lengths(model: Path, videos: Sequence[Path], *, in_full: bool) -> list[RecordOutcome]:
    """
    Measure one sample with each video.

    Args:
        model: Folder of the model; the data file is written beside it.
        videos: Paths of the videos.
        in_full: Whether samples are encoded in full, not measured from the containers.
    """
    samples = _open(_video_config(model, videos))
    return list(progress(samples.measure_many(range(len(samples)), in_full=in_full), desc=model.name, leave=False))


def differing(videos: Sequence[Path], quick: Sequence[RecordOutcome], full: Sequence[RecordOutcome]) -> list[str]:
    """
    Return a line for each video whose lengths differ, or that could not be measured.

    Args:
        videos: Paths of the videos.
        quick: Measurements from the containers.
        full: Measurements by full encodes.
    """
    return [
        f"{video.name}: {one} from its container, {other} encoded"
        for video, one, other in zip(videos, quick, full, strict=True)
        if one != other or not isinstance(one, MeasuredSample)
    ]


def _write_texts(folder: Path, number: int) -> Path:
    answers = ("the sea " * (1 + 7 * place % 59) for place in range(number))
    return write_records(folder / "text.jsonl", [record("What?", answer) for answer in answers])


def config_of(folder: Path, model: Path, data: Path, template: TemplateConfig, *, workers: int = 1) -> RunConfig:
    """
    Return the run that measures a data file.

    Args:
        folder: Folder of the run's output.
        model: Folder of the model.
        data: The data file.
        template: Keys of the section `template.`.
        workers: Number of processes that measure.
    """
    return RunConfig(
        model=ModelConfig(model=str(model)),
        template=template,
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(output_dir=str(folder / "run"), packing_length_precompute_workers=workers),
    )


def _video_config(model: Path, videos: Sequence[Path]) -> RunConfig:
    records = [record("What moves?", "A bar.", videos=[str(video)]) for video in videos]
    return config_of(model.parent, model, write_records(model.with_suffix(".jsonl"), records), VIDEOS)


def _open(config: RunConfig) -> Any:
    measurer: Any = open_splits(config)["train"].source
    measurer.pool_start_s = 0.0
    return measurer


def _opened_seconds(config: RunConfig, *, in_full: bool, total: int) -> tuple[float, float]:
    return seconds(_open(config), in_full=in_full, total=total)


def seconds(samples: SwiftMeasurer, *, total: int, in_full: bool = False) -> tuple[float, float]:
    """
    Return the wall-clock seconds of measuring all samples except the first `AT_ONCE`, and the
    processor seconds of all processes. Both include the digests of the records.

    Args:
        samples: Measurer of the samples.
        total: Number of samples.
        in_full: Whether samples are encoded in full.
    """
    marks = []
    for done, _ in enumerate(samples.measure_many(range(total), in_full=in_full), 1):
        if done == total:
            samples.data_digest(total)
        if done in {AT_ONCE, total}:
            # This process by its own clock: others are known in hundredths of a second.
            children = psutil.Process().children(recursive=True)
            marks.append((time.perf_counter(), time.process_time() + sum(map(_cpu_seconds, children))))
    (start, cpu_start), (end, cpu_end) = marks
    return end - start, cpu_end - cpu_start


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        spent = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # it has ended since it was listed
    return float(spent.user + spent.system)


def _ways_of_chats(config: RunConfig) -> tuple[dict[str, Callable[[range], None]], list[int]]:
    """Return a function for each way to measure some rows, and the number of tokens of each row."""
    split = open_splits(config)["train"]
    samples, encoder = split.source, split.encoder
    tokenizer = encoder.template.tokenizer
    encoded = [encoder.encode(index)["input_ids"] for index in range(len(encoder))]
    texts = [tokenizer.decode(tokens) for tokens in encoded]

    def measure(rows: range) -> None:
        list(samples.measure_many(rows, in_full=False))
        samples.data_digest(rows.stop)

    def call(rows: range) -> None:
        for row in rows:
            tokenizer(texts[row], add_special_tokens=False)

    def ask_library(rows: range) -> None:
        tokenizer.backend_tokenizer.encode_batch_fast(texts[rows.start : rows.stop], add_special_tokens=False)

    def encode(rows: range) -> None:
        for row in rows:
            encoder.encode(row)

    ways = {"texts": measure, "bare tokenizer, row by row": call, "its library, in batches": ask_library}
    return {**ways, WAYS[1]: encode}, [len(tokens) for tokens in encoded]


def _clip_seconds(model: Path, clip: Path) -> dict[str, float]:
    """Return CPU seconds for the clip: measured from its container, decoded, and fully encoded."""
    import decord

    samples = _open(_video_config(model, [clip] * (AT_ONCE + 1)))

    def spent(call: Callable[[], Any]) -> float:
        before = time.process_time()
        call()
        return time.process_time() - before

    def decode() -> None:
        reader = decord.VideoReader(str(clip), num_threads=1)
        reader.get_batch(torch.linspace(0, len(reader) - 1, CLIP_FRAMES).round().long().tolist()).asnumpy()

    list(samples.measure_many(range(1), in_full=False))  # opens what all samples share
    return {
        "container": spent(lambda: list(samples.measure_many(range(1, AT_ONCE + 1), in_full=False))) / AT_ONCE,
        "decoded frames alone": spent(decode),
        WAYS[1]: spent(lambda: list(samples.measure_many(range(1), in_full=True))),
    }
