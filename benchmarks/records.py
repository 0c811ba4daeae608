"""Writes models with random weights, and data files, for benchmarks."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from math import isqrt
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.distributions import IMAGE_SHARES, IMAGE_TOKENS, trace
from tools.demo.tiny_models import write_model

MODEL_TYPE = "qwen2_5_vl"

TEXT = ["the sea, seen from a hill " * 3] * 9
"""Text from which the tokenizer of a model is learned."""

HEAD = 64
"""Dimensions of an attention head."""

SHRUNK = 16
"""Divisor of the tokens of common images, so that a pack of 2,048 tokens holds several images."""

NUM_PHOTOS = 8
"""Number of different photographs of one size, which all records share."""


def write_sized_model(folder: Path, width: int, layers: int) -> None:
    """
    Write a Qwen2.5-VL with random weights.

    Args:
        folder: Folder of the model; created if missing.
        width: Hidden size of the text layers, a multiple of 128; half of it is the hidden size of
            the vision tower.
        layers: Number of text layers, and of layers in the vision tower.
    """
    write_model(folder, MODEL_TYPE, TEXT, seed=0)
    config = AutoConfig.from_pretrained(folder).to_dict()
    heads = width // HEAD
    for part, sizes in {
        "text_config": {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads,
                        "num_key_value_heads": heads // 2, "num_hidden_layers": layers, "layer_types": None,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}},
        "vision_config": {"hidden_size": width // 2, "intermediate_size": 2 * width, "num_heads": heads // 2,
                          "depth": layers, "out_hidden_size": width, "fullatt_block_indexes": [layers - 1]},
    }.items():  # fmt: skip
        config[part] |= sizes
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(folder)


def write_sized_text_model(folder: Path, width: int, layers: int) -> None:
    """
    Write a Qwen2 with random weights.

    Args:
        folder: Folder of the model; created if missing.
        width: Hidden size, a multiple of 128.
        layers: Number of layers.
    """
    write_model(folder, "qwen2", TEXT, seed=0)
    config = AutoConfig.from_pretrained(folder).to_dict()
    heads = width // HEAD
    config |= {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads, "vocab_size": 8192,
               "num_key_value_heads": heads // 2, "num_hidden_layers": layers, "layer_types": None}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(folder)


def record(question: str, answer: str, *, images: Sequence[str] = (), videos: Sequence[str] = ()) -> dict[str, Any]:
    """
    Return a record of one turn.

    Args:
        question: Text after the media.
        answer: Text that is trained.
        images: Image files.
        videos: Video files.
    """
    asked = "<image>" * len(images) + "<video>" * len(videos) + question
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    media = {"images": list(images), "videos": list(videos)}
    return {"messages": turns, **{name: files for name, files in media.items() if files}}


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """Write a data file of JSON Lines; return its path."""
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    return path


def write_training_data(folder: Path, kind: str, num_samples: int, *, seed: int = 0) -> Path:
    """
    Write training samples, unless the data file exists; return the path of the data file.

    Args:
        folder: Folder of the data file and its images.
        kind: `text`, with real lengths, or `images`, with images and text.
        num_samples: Number of samples.
        seed: Seed of lengths and images.
    """
    path, rng = folder / f"{kind}.jsonl", np.random.default_rng(seed)
    if path.exists():
        return path
    if kind == "text":
        recorded = trace("sft")
        lengths = rng.choice(recorded[recorded < 400], num_samples).tolist()
        return write_records(path, [record("What is it?", " sea" * tokens) for tokens in lengths])
    return write_records(path, [_with_images(folder, number, rng) for number in range(num_samples)])


def write_photos(folder: Path, size: tuple[int, int], num_samples: int) -> Path:
    """
    Write samples with one photograph each; return the path of the data file.

    Args:
        folder: Folder of the data file and the photographs.
        size: Width and height in pixels.
        num_samples: Number of samples, which share `NUM_PHOTOS` photographs.
    """
    rng, (width, height) = np.random.default_rng(0), size
    names = [f"{width}x{height}-{number}.jpg" for number in range(NUM_PHOTOS)]
    for name in names:
        # Smooth blotches: a JPEG of noise would cost more to read than any photograph.
        blotches = rng.integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8)
        Image.fromarray(blotches).resize(size, Image.Resampling.BICUBIC).save(folder / name, quality=90)
    answers = ["the sea " * words for words in rng.integers(1, 60, num_samples)]
    records = [record("What?", text, images=[names[place % NUM_PHOTOS]]) for place, text in enumerate(answers)]
    return write_records(folder / f"{width}x{height}.jsonl", records)


@cache
def paragraphs() -> list[str]:
    """Return paragraphs of English text, from Python's own manual."""
    return [part.strip() for topic in topics.values() for part in topic.split("\n\n") if len(part) > 40]


def write_chats(path: Path, num_rows: int) -> Path:
    """Write chats of one to three turns; return *path*."""
    return write_records(path, map(chat, range(num_rows)))


def chat(seed: int) -> dict[str, Any]:
    """
    Return a chat of one to three turns.

    A question has about 100 characters, an answer about 600.
    """
    parts, rng = paragraphs(), np.random.default_rng(seed)

    def said(size: float) -> str:
        wanted = int(rng.lognormal(np.log(size), 0.9))
        words = " ".join(parts[place] for place in rng.integers(0, len(parts), 2 + wanted // 100))
        return words[: max(wanted, 20)]

    system = "You answer questions on a programming language."
    turns = [{"role": "system", "content": system}] if rng.random() < 0.2 else []
    for _ in range(int(rng.integers(1, 4))):
        turns += [{"role": "user", "content": said(100)}, {"role": "assistant", "content": said(600)}]
    return {"messages": turns}


def _with_images(folder: Path, number: int, rng: np.random.Generator) -> dict[str, Any]:
    images = []
    for part in range(int(rng.choice([1, 1, 1, 2, 3]))):
        tokens = int(rng.choice(IMAGE_TOKENS, p=IMAGE_SHARES)) // SHRUNK
        rows = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
        images.append(f"{number}-{part}.png")
        colour = tuple(rng.integers(0, 256, 3).tolist())
        Image.new("RGB", (28 * tokens // rows, 28 * rows), colour).save(folder / images[-1])
    return record("What is it?", " sea" * max(1, int(rng.lognormal(5.5, 0.8)) // SHRUNK), images=images)
