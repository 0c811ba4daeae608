"""Synthetic videos of a bar that moves over a background, in common containers and codecs."""

import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np

KINDS = (
    ("mp4", "libx264", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("mkv", "libx264", "yuv420p"),
    ("avi", "mpeg4", "yuv420p"),
    ("mp4", "libx265", "yuv420p"),
    ("webm", "libvpx", "yuv420p"),
    ("mov", "libx264", "yuv420p"),
    ("avi", "mjpeg", "yuvj420p"),
    ("mkv", "libvpx-vp9", "yuv420p"),
    ("mp4", "mpeg4", "yuv420p"),
)
"""File extension of the container, encoder, and pixel format of each kind of video."""

RATES = (Fraction(25), Fraction(24000, 1001), Fraction(30000, 1001), Fraction(60), None)
"""Frames per second; None for frames at irregular times."""

SECONDS = (1.0, 0.2, 3.0, 0.5, 7.0)
"""Usual durations in seconds. A few videos last 1 or 10 minutes."""

SIZES = ((64, 48), (96, 54), (50, 120), (130, 66), (320, 180))

NUM_CLIPS = 8

NUM_RECORDS = 48

_TURNED = (0, 90, 0, 180, 270, 0)

_SHOWN = 12
"""Number of different frames of a video, which repeat."""

_OPTIONS = {
    "libx264": {"preset": "ultrafast"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
}

_THOUSANDTH = Fraction(1, 1000)


@attrs.frozen
class VideoSpec:
    """Settings of a video that is to be encoded."""

    container: str = "mp4"
    codec: str = "libx264"
    pixels: str = "yuv420p"
    rate: Fraction | None = RATES[0]
    """Frames per second; None for frames at irregular times."""

    num_frames: int = 25

    size: tuple[int, int] = SIZES[0]
    """Width and height before rotation."""

    turned: int = 0
    """Degrees of rotation that the container declares."""

    seed: int = 0
    """Seed of the colours, and of irregular frame times."""

    def write(self, path: Path) -> Path:
        """Encode the video to *path*, and return the path."""
        import av

        # Else matroska draws numbers, and no two files are the same.
        container: Any = av.open(str(path), "w", container_options={"fflags": "+bitexact"})
        with container:
            stream = container.add_stream(self.codec, rate=self.rate or RATES[0], options=_OPTIONS.get(self.codec, {}))
            stream.width, stream.height = self.size
            stream.pix_fmt = self.pixels
            stream.codec_context.gop_size = 12
            stream.codec_context.thread_count = 1
            if self.rate is None:
                stream.time_base = stream.codec_context.time_base = _THOUSANDTH
            if self.turned:
                stream.set_display_rotation(self.turned)
            shown = list(self._frames())
            for number, time in enumerate(self._times()):
                frame = av.VideoFrame.from_ndarray(shown[number % _SHOWN], format="rgb24")
                frame.pts, frame.time_base = time, _THOUSANDTH if self.rate is None else 1 / self.rate
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    def _frames(self) -> Iterator[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(self.seed)
        (width, height), ground, bar = self.size, rng.integers(0, 256, 3), rng.integers(0, 256, 3)
        for number in range(_SHOWN):
            frame = np.full((height, width, 3), ground, dtype=np.uint8)
            left = number * width // _SHOWN
            frame[:, left : left + max(width // 6, 2)] = bar
            yield frame

    def _times(self) -> Iterator[int]:
        if self.rate is not None:
            yield from range(self.num_frames)
            return
        rng, time = random.Random(self.seed), 0  # noqa: S311  # no secret
        for _ in range(self.num_frames):
            yield time
            time += rng.choice((20, 33, 40, 80))


def write_records(folder: Path) -> Path:
    """
    Write clips, stills, and a file of records with text, images and videos. Return the path of this
    file.

    Args:
        folder: Output folder, created if missing.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    clips = [_spec_at(place) for place in range(NUM_CLIPS)]
    names = [clip.write(folder / f"clip{clip.seed}.{clip.container}").name for clip in clips]
    for number in range(NUM_CLIPS):
        Image.new("RGB", (56 + 14 * number, 70), (30 * number, 90, 200 - 20 * number)).save(
            folder / f"still{number}.png"
        )
    path = folder / "videos.jsonl"
    path.write_text("".join(f"{json.dumps(_media_record(number, names))}\n" for number in range(NUM_RECORDS)))
    return path


def _media_record(number: int, names: list[str]) -> dict[str, Any]:
    """Return a record: text alone, or with a still, a clip, a clip and a still, or two clips."""
    first, second = (names[(number + step) % len(names)] for step in (0, 3))
    still = f"still{number % NUM_CLIPS}.png"
    media: dict[str, list[str]] = (
        {}, {"images": [still]}, {"videos": [first]}, {"videos": [first], "images": [still]},
        {"videos": [first, second]},
    )[number % 5]  # fmt: skip
    tags = "<video>" * len(media.get("videos", [])) + "<image>" * len(media.get("images", []))
    answer = "A bar moves to the right. " * (1 + number % 4)
    return {
        "messages": [
            {"role": "user", "content": f"{tags}What happens in {number}?"},
            {"role": "assistant", "content": answer.strip()},
        ],
        **media,
    }


def video_specs(number: int) -> list[VideoSpec]:
    """
    Return the settings of *number* videos that vary in container, rate, duration, size and
    rotation. One video in 40 lasts 1 or 10 minutes.
    """
    return [_spec_at(place) for place in range(number)]


def _spec_at(place: int) -> VideoSpec:
    container, codec, pixels = KINDS[place % len(KINDS)]
    rate = RATES[(place + place // len(KINDS)) % len(RATES)]
    if rate is None and container == "avi":  # which has no times of frames
        rate = RATES[0]
    seconds, size = SECONDS[(place + place // 3) % len(SECONDS)], SIZES[(place // 2) % len(SIZES)]
    if place % 40 == 16:
        seconds, size = (600.0 if place % 80 == 56 else 60.0), SIZES[0]
    if codec == "libx265":  # its encoder takes no smaller blocks
        size = SIZES[3]
    return VideoSpec(
        container=container,
        codec=codec,
        pixels=pixels,
        rate=rate,
        num_frames=max(2, round(seconds * (rate or 25))),
        size=size,
        turned=_TURNED[(place // len(KINDS) + place) % len(_TURNED)] if container in {"mp4", "mov"} else 0,
        seed=place,
    )
