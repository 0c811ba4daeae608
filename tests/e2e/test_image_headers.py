"""Lengths from images' headers are the lengths of full encodes."""

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base

from packplan.core.errors import RecordError
from tests.e2e.ready import assert_refused, measured
from tests.records import asked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[str]:
    """Images of many kinds and shapes."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = random.Random(0)  # noqa: S311

    def pixels(width, height):
        return Image.fromarray(np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8))

    for number, mode in enumerate(("L", "CMYK", "P", "RGBA", "LA", "1", "I;16")):
        Image.new(mode, (90 + number, 70)).save(folder / f"{number}.{'jpg' if mode == 'CMYK' else 'png'}")
    pixels(301, 205).save(folder / "webp.webp")
    pixels(64, 48).save(folder / "gif.gif")
    for orientation in (1, 3, 6, 8):
        exif = Image.Exif()
        exif[Base.Orientation] = orientation
        pixels(200, 120 + orientation).save(folder / f"turned{orientation}.jpg", exif=exif)
    any_sizes = [(rng.randint(10, 400), rng.randint(10, 400)) for _ in range(8)]
    for size in ((1, 1), (1, 150), (199, 1), (28, 28), (55, 57), (1400, 30), (1201, 901), *any_sizes):
        pixels(*size).save(Path(folder, "x".join(map(str, size))).with_suffix(".jpg"))
    return sorted(map(str, folder.iterdir()))


@pytest.mark.parametrize("case", list(product(["qwen2_5_vl", "qwen3_vl"], [None, 2_000, 50_000])), ids=str)
def test_headers_give_the_lengths_of_full_encodes(case, pictures, open_source):
    """With and without a limit on pixels: zero tolerance, and few are audited."""
    model_type, max_pixels = case
    rng = random.Random(1)  # noqa: S311
    shown = [[picture] for picture in pictures] + [rng.sample(pictures, rng.randint(2, 4)) for _ in range(12)]
    records = [
        asked("<image>" * len(images) + "What is it?" * number, images=images) for number, images in enumerate(shown)
    ]
    source, encoder = open_source(records, model_type, max_pixels=max_pixels)
    encoded, encode = [], encoder.template.encode
    encoder.template.encode = lambda sample, **options: encoded.append(sample) or encode(sample, **options)

    assert len(records) == sum(one.measurement.images > 0 for one in measured(source))

    # Others are dummies, which prove the way; of these, each is encoded in full once to compare.
    audited = sum(any(isinstance(image, str) for image in sample.get("images", ())) for sample in encoded)
    assert len(records) > 10 * (audited - len(records)) > 0


@pytest.mark.parametrize(
    ("size", "max_pixels", "says"),
    [((3000, 2), None, "aspect ratio"), ((1, 4000), 3136, "1 x 4000 shrinks to 0: raise template.max_pixels, now 3,")],
)
def test_a_shape_that_the_processor_refuses_is_refused_from_its_header(open_source, tmp_path, size, max_pixels, says):
    """With the record's line, as a full encode does."""
    Image.new("RGB", size).save(tmp_path / "line.png")
    source, encoder = open_source([asked("<image>?", images=["line.png"])], max_pixels=max_pixels)

    assert_refused(measured(source), [says])
    with pytest.raises(RecordError, match=says):
        encoder.encode(0)
