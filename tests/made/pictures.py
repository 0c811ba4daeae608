"""Records that show whether a model's images are counted and packed right."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.records import ANSWER, chat, write_lines

IMAGES_OF = (1, 0, 3, 1)
"""Images of each scene, over and over."""

_SIZES = ((1, 1), (1, 150), (28, 28), (55, 57), (600, 30), (571, 24), (56, 56), (112, 112), (448, 448), (640, 320))

NUM_SIZES = 45


def write_scenes(folder: Path, *, count: int) -> Path:
    """Write records with no, one and three images, no image twice, and return their file."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number in range(count):
        images = []
        for part in range(IMAGES_OF[number % len(IMAGES_OF)]):
            size = (70, 60) if part == 1 else (112, 84)
            image = Image.new("RGB", size, (30 * number % 256, (200 - 20 * number) % 256, 90 * part))
            ImageDraw.Draw(image).ellipse((4, 4, 40 + number, 50), fill=((255 - 20 * number) % 256, 30, 7 * number))
            images.append(f"{number}-{part}.png")
            image.save(folder / images[-1])
        answer = "a large blue circle, a small red bar " * (1 + number % 3)
        records.append(showing(images=images, text=f"What is in {number}?", answer=answer))
    return write_lines(folder / "scenes.jsonl", records)


def write_sizes(folder: Path) -> Path:
    """Write a record for an image of each size, then of several and none; return their file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)  # noqa: S311  # no secret
    sizes = [*_SIZES, *((rng.randint(10, 400), rng.randint(10, 400)) for _ in range(NUM_SIZES - len(_SIZES)))]
    for width, height in sizes:
        Image.new("RGB", (width, height), (width % 255, height % 255, 9)).save(folder / f"{width}x{height}.png")
    names = [f"{width}x{height}.png" for width, height in sizes]
    several = [rng.sample(names, number) for number in (2, 3, 4)]
    return write_lines(folder / "sizes.jsonl", [showing(images=one) for one in [*zip(names), *several, []]])


def showing(*videos: Any, images: Iterable[str] = (), text: str = "?", answer: str = "a red bar") -> dict[str, Any]:
    """Return a record that shows videos and images."""
    tags = "<video>" * len(videos) + "<image>" * len(images := [*images])
    media = {kind: [*held] for kind, held in (("videos", videos), ("images", images)) if held}
    return chat({"role": "user", "content": tags + text}, {**ANSWER, "content": answer}, **media)


def texts(path: Path) -> list[str]:
    """Return the contents of all messages of a data file."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [message["content"] for one in records for message in one["messages"]]
