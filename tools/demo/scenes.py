"""
Data of the demo: scenes of coloured shapes, and descriptions that a model learns to write.

Images have many sizes, and captions have many lengths. Some records have no image, some have
several images, and a few are longer than a pack. The same seed gives the same files.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 84),
    "blue": (38, 84, 200),
    "yellow": (244, 196, 48),
    "purple": (128, 60, 160),
    "orange": (240, 128, 40),
}

SHAPES = ("circle", "square", "triangle", "bar")

SIZES = {"small": 0.12, "large": 0.25}

_BACKGROUNDS = ((250, 250, 250), (24, 24, 32), (225, 235, 225))


@attrs.frozen
class Shape:
    """One coloured shape in a scene."""

    size: str
    colour: str
    kind: str
    box: tuple[int, int, int, int]
    """Left, top, right, bottom in pixels."""

    @property
    def desc(self) -> str:
        """Size, colour and kind in words."""
        return f"{self.size} {self.colour} {self.kind}"


def write_data(folder: Path, *, seed: int, num_train: int, num_val: int) -> None:
    """
    Write `train.jsonl` and `val.jsonl` (dense captions), `messages.jsonl`, and their images under
    *folder*. Also write `repeat.jsonl` and `colours.jsonl` for reinforcement learning.

    Args:
        folder: Output folder, created if missing.
        seed: Seed of all random choices.
        num_train: Number of records in each file except `val.jsonl`.
        num_val: Number of records in `val.jsonl`, which show other scenes.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", num_train), ("val", num_val)):
        records = list(_draw_records(folder, split, random.Random(f"{seed} {split}"), count))  # noqa: S311  # no secret
        _write_lines(folder / f"{split}.jsonl", [dense for dense, _ in records])
        if split == "train":
            _write_lines(folder / "messages.jsonl", [messages for _, messages in records])
    repeated = [_draw_repeat_task(random.Random(f"{seed} repeat {n}")) for n in range(num_train)]  # noqa: S311  # no secret
    _write_lines(folder / "repeat.jsonl", repeated)
    drawn = (random.Random(f"{seed} colour {n}") for n in range(num_train))  # noqa: S311  # no secret
    _write_lines(folder / "colours.jsonl", [_draw_colour_task(folder, rng, number) for number, rng in enumerate(drawn)])


def _draw_colour_task(folder: Path, rng: random.Random, number: int) -> dict[str, Any]:
    """
    Write a picture, and return the task of naming its colour.

    Each of four colours is the answer equally often. A model that ignores the picture is therefore
    right in one of four records.
    """
    colour = list(COLOURS)[number % 4]
    image = f"images/colour_{number:05d}.png"
    Image.new("RGB", (rng.choice((56, 84)), rng.choice((56, 84))), COLOURS[colour]).save(folder / image)
    return {
        "messages": [{"role": "user", "content": "<image>Colour:"}, {"role": "assistant", "content": colour}],
        "images": [image],
    }


def _draw_repeat_task(rng: random.Random) -> dict[str, Any]:
    """Return the task of repeating some words, whose answer a program can check."""
    words = " ".join(rng.choice([*COLOURS, *SHAPES]) for _ in range(1 + min(int(rng.expovariate(0.25)), 15)))
    turns = (("user", f"Repeat: {words}"), ("assistant", words))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def read_corpus(folder: Path) -> Iterator[str]:
    """Yield the lines of `train.jsonl` and `messages.jsonl`, from which a tokenizer is learned."""
    for name in ("train.jsonl", "messages.jsonl"):
        yield from (folder / name).read_text(encoding="utf-8").splitlines()


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def _draw_records(
    folder: Path, split: str, rng: random.Random, count: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for number in range(count):
        # Of 40 records, 3 are text alone, 4 have several images, and 1 is longer than a demo pack.
        kind = number % 40
        num_images = 0 if kind in {5, 18, 31} else {9: 2, 16: 3, 23: 2, 36: 2}.get(kind, 1)
        width, height = rng.choice(range(56, 281, 14)), rng.choice(range(56, 281, 14))
        num_shapes = 60 if kind == 27 else 1 + min(int(rng.expovariate(0.35)), 11)
        shapes = [_draw_shape(rng, width, height) for _ in range(num_shapes)]
        images = []
        for part in range(num_images):
            suffix = "jpg" if number % 3 == 0 else "png"
            images.append(f"images/{split}_{number:05d}_{part}.{suffix}")
            shown = shapes if part == 0 else [_draw_shape(rng, width, height) for _ in range(2)]
            _write_image(folder / images[-1], rng, width, height, shown)
        yield (
            {
                **({"images": images} if images else {}),
                "objects": [{"desc": shape.desc, "bbox_2d": list(shape.box)} for shape in shapes],
                "width": width,
                "height": height,
                "summary": _summary_text(shapes),
            },
            {
                "messages": [
                    {"role": "user", "content": "<image>" * num_images + f"What are the {len(shapes)} shapes?"},
                    {"role": "assistant", "content": _summary_text(shapes)},
                ],
                **({"images": images} if images else {}),
            },
        )


def _summary_text(shapes: list[Shape]) -> str:
    return f"A scene with {', '.join(f'a {shape.desc}' for shape in shapes)}."


def _draw_shape(rng: random.Random, width: int, height: int) -> Shape:
    size = rng.choice(list(SIZES))
    side = max(8, round(min(width, height) * SIZES[size]))
    left, top = rng.randrange(0, width - side), rng.randrange(0, height - side)
    return Shape(size, rng.choice(list(COLOURS)), rng.choice(SHAPES), (left, top, left + side, top + side))


def _write_image(path: Path, rng: random.Random, width: int, height: int, shapes: list[Shape]) -> None:
    image = Image.new("RGB", (width, height), rng.choice(_BACKGROUNDS))
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        left, top, right, bottom = shape.box
        colour = COLOURS[shape.colour]
        if shape.kind == "circle":
            pen.ellipse(shape.box, fill=colour)
        elif shape.kind == "square":
            pen.rectangle(shape.box, fill=colour)
        elif shape.kind == "triangle":
            pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)
        else:
            third = (bottom - top) // 3
            pen.rectangle((left, top + third, right, bottom - third), fill=colour)
    image.save(path)
