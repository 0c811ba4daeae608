"""
Lengths of made videos from their containers, beside full encodes: whether they are equal, and what
each costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch

from packplan.adapters.progress import progress
from packplan.app.demo.tiny_models import write_model
from packplan.app.demo.videos import MadeVideo, made_videos
from packplan.app.wiring import training
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.samples import Measured, Outcome

MODELS = ("qwen2_5_vl", "qwen3_vl")

CLIP = MadeVideo(rate=Fraction(30), num_frames=900, size=(1280, 720))
"""30 s at 720p."""

_ASKED = 32
"""Times that the clip's container is asked, for the mean: as many as are measured at once."""

_SAMPLING = TemplateConfig(max_length=65536, video_min_pixels=3200)
"""Tiny frames stay small, so that ten minutes of them fit into memory."""


@attrs.frozen
class VideoCosts:
    """What was measured."""

    num_videos: int

    num_decoded: int
    """Videos whose containers promise too little, and which were decoded to be measured."""

    differences: tuple[str, ...]
    """Videos and models whose lengths are not those of a full encode."""

    clip_container_ms: float
    """CPU time that the clip's length takes from its container."""

    clip_decode_ms: float
    """CPU time that decoding the clip's sampled frames takes."""

    clip_encode_ms: float
    """CPU time that its full encode takes."""


def measure_video_costs(number: int) -> VideoCosts:
    """Compare the lengths of so many made videos, for each model, and time a clip of 720p."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_videos(folder, made_videos(number))
        differences: list[str] = []
        decoded = 0
        for model in MODELS:
            write_model(folder / model, model, ["a bar that moves over a coloured ground"] * 9, seed=0)
            quick, full = (outcomes(folder, model, paths, in_full=way) for way in (False, True))
            differences += compared(model, paths, quick, full)
            decoded = sum(image.decoded for one in quick if isinstance(one, Measured) for image in one.images)
        return VideoCosts(number, decoded, tuple(differences), *_clip_costs(folder))


def write_videos(folder: Path, videos: Sequence[MadeVideo]) -> list[Path]:
    """Encode videos into a folder; return their paths."""
    numbered = progress(enumerate(videos), desc="encoding", total=len(videos), leave=False)
    return [video.write(folder / f"{number:03d}_{video.codec}.{video.container}") for number, video in numbered]


def outcomes(folder: Path, model: str, videos: Sequence[Path], *, in_full: bool) -> list[Outcome]:
    """
    Measure a sample of each video.

    Args:
        folder: Holds the model, and takes the data file.

        model: Name of the model's folder.

        videos: Paths of the videos.

        in_full: Encode them; else ask their containers.
    """
    samples = _measurer(folder, model, videos)
    measured = samples.measure_many(range(len(samples)), in_full=in_full)
    return list(progress(measured, desc=f"{model}, {'encoded' if in_full else 'from containers'}", leave=False))


def compared(model: str, videos: Sequence[Path], quick: Sequence[Outcome], full: Sequence[Outcome]) -> list[str]:
    """
    Return a line for each video whose two measurements differ, or which could not be measured.

    Args:
        model: That they were measured for.

        videos: Their paths.

        quick: Measured from their containers.

        full: Encoded.
    """
    pairs = zip(videos, quick, full, strict=True)
    return [
        f"{model}, {video.name}: {one} from its container, {other} encoded"
        for video, one, other in pairs
        if one != other or not isinstance(one, Measured)
    ]


def _measurer(folder: Path, model: str, videos: Sequence[Path]) -> Any:
    lines = [
        {
            "messages": [
                {"role": "user", "content": "<video>What moves?"},
                {"role": "assistant", "content": "A bar."},
            ],
            "videos": [str(video)],
        }
        for video in videos
    ]
    data = folder / "videos.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    config = RunConfig(
        model=ModelConfig(model=str(folder / model)),
        template=_SAMPLING,
        custom=CustomConfig(train_jsonl=(str(data),)),
        training=TrainingConfig(output_dir=str(folder / "run"), packing_length_precompute_workers=1),
    )
    return training.open_measurer(config, training.open_samples(config)["train"])


def _clip_costs(folder: Path) -> tuple[float, float, float]:
    """
    Return the CPU milliseconds of a clip of 720p: asked, its sampled frames decoded, encoded.
    """
    import decord

    clip = CLIP.write(folder / "clip.mp4")
    samples = _measurer(folder, MODELS[0], [clip] * (_ASKED + 1))
    list(samples.measure_many(range(1), in_full=False))  # opens what all of them share
    started = time.process_time()
    list(samples.measure_many(range(1, _ASKED + 1), in_full=False))
    container = (time.process_time() - started) / _ASKED
    started = time.process_time()
    reader = decord.VideoReader(str(clip), num_threads=1)
    reader.get_batch(torch.linspace(0, len(reader) - 1, 60).round().long().tolist()).asnumpy()
    decode = time.process_time() - started
    started = time.process_time()
    next(samples.measure_many(range(1), in_full=True))
    return 1000 * container, 1000 * decode, 1000 * (time.process_time() - started)
