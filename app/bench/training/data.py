"""
Models and samples that training is measured on: random weights; text of real lengths, and images
with text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from packplan.app.bench.distributions import trace
from packplan.app.demo.tiny_models import write_model

MODEL_TYPE = "qwen2_5_vl"

IMAGE_TOKENS = (256, 576, 1024, 1280, 2560)
"""
Tokens of an image, as in the VLM-like lengths of the planner's benchmark; a tiny model gets a
sixteenth.
"""

IMAGE_SHARES = (0.2, 0.3, 0.25, 0.15, 0.1)


def write_model_of(folder: Path, shape: str) -> None:
    """Write a model of random weights: `tiny`, or of the layout of Qwen2.5-VL-3B (`3b`)."""
    write_model(folder, MODEL_TYPE, ["the sea, seen from a hill " * 3] * 9, seed=0, shape=shape)


def write_records(folder: Path, kind: str, num_samples: int, shape: str) -> Path:
    """
    Write samples of lengths that their distribution gives, unless they are there; return the data
    file.

    Args:
        folder: Of data file and images.

        kind: `text` or `images`.

        num_samples: Written to the file.

        shape: Of the model; `tiny` gets smaller images and shorter texts with them.
    """
    path = folder / f"{kind}.jsonl"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    records = list(_texts(rng, num_samples) if kind == "text" else _images(rng, num_samples, shape, folder))
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def _texts(rng: np.random.Generator, num_samples: int) -> Iterator[dict[str, Any]]:
    recorded = trace("sft")
    for tokens in rng.choice(recorded[recorded < 400], num_samples).tolist():
        yield _record("What is it?", tokens)


def _images(rng: np.random.Generator, num_samples: int, shape: str, folder: Path) -> Iterator[dict[str, Any]]:
    scale = 16 if shape == "tiny" else 1
    for number in range(num_samples):
        images = []
        for part in range(int(rng.choice([1, 1, 1, 2, 3]))):
            tokens = int(rng.choice(IMAGE_TOKENS, p=IMAGE_SHARES)) // scale
            images.append(f"{number}-{part}.png")
            high = isqrt(tokens)
            while tokens % high:
                high -= 1
            colour = tuple(rng.integers(0, 256, 3).tolist())
            Image.new("RGB", (28 * tokens // high, 28 * high), colour).save(folder / images[-1])
        text = int(rng.lognormal(5.5, 0.8)) // scale
        yield {**_record("<image>" * len(images) + "What is it?", text), "images": images}


def _record(question: str, tokens: int) -> dict[str, Any]:
    answer = " sea" * max(1, tokens)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
