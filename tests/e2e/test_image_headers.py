"""Lengths from images' headers are the lengths of full encodes."""

import random
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from packplan.core.errors import RecordError
from tests.e2e.test_videos import measurer_of
from tests.records import asked, chat, write_lines

ORIENTATION = 274


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    """Images of many kinds and shapes."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = random.Random(0)  # noqa: S311
    saved = []

    def save(image, name, **options):
        image.save(folder / name, **options)
        saved.append(folder / name)

    def pixels(width, height):
        return Image.fromarray(np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8))

    for number, mode in enumerate(("L", "CMYK", "P", "RGBA", "LA", "1", "I;16")):
        image = Image.new(mode, (90 + number, 70))
        save(image, f"{number}.{'jpg' if mode == 'CMYK' else 'png'}")
    save(pixels(301, 205), "webp.webp")
    save(pixels(64, 48), "gif.gif")
    for orientation in (1, 3, 6, 8):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        save(pixels(200, 120 + orientation), f"turned{orientation}.jpg", exif=exif)
    for width, height in ((1, 1), (1, 150), (199, 1), (28, 28), (55, 57), (1400, 30), (1201, 901)):
        save(pixels(width, height), f"{width}x{height}.jpg")
    for number in range(20):
        save(pixels(rng.randint(10, 400), rng.randint(10, 400)), f"any{number}.jpg")
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("case", list(product(["qwen2_5_vl", "qwen3_vl"], [None, 2_000, 50_000, 1_000_000])), ids=str)
def test_headers_give_the_lengths_of_full_encodes(case, pictures, write_run, tmp_path):
    """With and without a limit on pixels: zero tolerance."""
    model_type, max_pixels = case
    rng = random.Random(1)  # noqa: S311
    records = [[picture] for picture in pictures] + [rng.sample(pictures, rng.randint(2, 4)) for _ in range(12)]
    lines = [
        chat(
            {"role": "user", "content": "<image>" * len(images) + "What is it?" * number},
            {"role": "assistant", "content": "A thing. " * (1 + number % 7)},
            images=[str(image) for image in images],
        )
        for number, images in enumerate(records, start=1)
    ]
    data = write_lines(tmp_path / "pictures.jsonl", lines)
    run = write_run(model_type, custom={"train_jsonl": str(data)}, template={"max_pixels": max_pixels})
    samples, encoder = measurer_of(run)
    pages = []
    original = encoder.template.encode

    def encode(sample, **options):
        pages.append(sample.get("images", ()))
        return original(sample, **options)

    encoder.template.encode = encode
    quick = list(samples.measure_many(range(len(lines)), in_full=False))

    # The others are dummies, which prove the way.
    audited = [images for images in pages if any(isinstance(image, str) for image in images)]
    assert len(lines) > 10 * len(audited) > 0
    assert list(samples.measure_many(range(len(lines)), in_full=True)) == quick


@pytest.mark.parametrize(
    ("size", "max_pixels", "says"),
    [((3000, 2), None, "aspect ratio"), ((1, 4000), 3136, "max_pixels, 3,136, leaves an image of 1 x 4000 no size")],
)
def test_a_shape_that_the_processor_refuses_is_refused_from_its_header(write_run, tmp_path, size, max_pixels, says):
    """With the record's line, as a full encode does."""
    Image.new("RGB", size).save(tmp_path / "line.png")
    data = write_lines(tmp_path / "line.jsonl", [asked("<image>?", images=["line.png"])])
    samples, _ = measurer_of(write_run(custom={"train_jsonl": str(data)}, template={"max_pixels": max_pixels}))

    for in_full in (False, True):
        (outcome,) = samples.measure_many(range(1), in_full=in_full)
        assert isinstance(outcome, RecordError)
        assert re.search(rf"line\.jsonl, line 1: .*{says}", str(outcome))
