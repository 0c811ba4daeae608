"""
Lengths of samples that benchmarks pack.

`traces.npz` holds three traces with token counts of real data, and no text:

- `chat`: answers in github.com/tatsu-lab/alpaca_eval
- `sft`: samples of github.com/teknium1/GPTeacher and github.com/openai/grade-school-math
- `detcap`: element lists of github.com/google-research-datasets/screen_annotation, with image
  tokens of common screen sizes
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.vision import VisionWork

TRACES = Path(__file__).parent / "traces.npz"

IMAGE_TOKENS, IMAGE_SHARES = (256, 576, 1024, 1280, 2560), (0.2, 0.3, 0.25, 0.15, 0.1)
"""Numbers of tokens of images of common sizes, and the probability of each size."""

TILE_SHARES = np.array([30, 20, 10, 20, 5, 30, 2, 6, 3, 1, 1, 20]) / 148
"""Probability of each number of tiles of an image, from 1 to 12; shape (12,)."""

TEXT_MODEL = WorkModel(per_position=14 * 10**9, per_pair=4 * 28 * 3584)
"""Forward work of a text model with 7 billion weights."""

MODEL = attrs.evolve(
    TEXT_MODEL, vision=VisionWork(per_patch=1_340_000_000, per_image_pair=4 * 1280, per_window_pair=0, window=0)
)
"""
Forward work of this text model with a vision tower of 0.67 billion weights. The tower's attention
within small windows is not counted.
"""

PATCHES_OF_A_TOKEN = 4


@attrs.frozen
class Distribution:
    """Distribution of sample lengths, and the capacity of packs of these samples."""

    name: str
    capacity: int
    """Maximum number of tokens in a pack."""

    draw: Callable[[np.random.Generator, int, int], NDArray[np.integer]]
    """Function that draws lengths: generator, number of samples and capacity -> lengths."""

    def lengths(self, num_samples: int, *, seed: int) -> IntArray:
        """Draw and return lengths from 1 to the capacity; shape (num_samples,)."""
        drawn = self.draw(np.random.default_rng(seed), num_samples, self.capacity)
        lengths: IntArray = np.clip(drawn, 1, self.capacity).astype(np.int64)
        return lengths


def trace(name: str) -> NDArray[np.uint16]:
    """Return the lengths in a recorded trace: `chat`, `sft` or `detcap`."""
    with np.load(TRACES) as traces:
        recorded: NDArray[np.uint16] = traces[name]
    return recorded


def _bootstrap(name: str) -> Callable[[np.random.Generator, int, int], NDArray[np.integer]]:
    def draw(rng: np.random.Generator, num: int, capacity: int) -> NDArray[np.integer]:
        recorded = trace(name)
        drawn: NDArray[np.integer] = rng.choice(recorded[recorded <= capacity], num)
        return drawn

    return draw


def _vision(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    images = rng.choice(IMAGE_TOKENS, num, p=IMAGE_SHARES)
    text = rng.lognormal(5.5, 0.8, num)
    lengths: IntArray = (images * rng.choice([1, 1, 1, 2, 3], num) + text).astype(np.int64)
    return lengths


def _tiles(rng: np.random.Generator, num: int, text: IntArray) -> IntArray:
    """
    Return lengths of samples with one image and *text* tokens. An image has up to 12 tiles, and a
    thumbnail if it has several, of 256 tokens each.
    """
    tiles = rng.choice(np.arange(1, 13), num, p=TILE_SHARES)
    lengths: IntArray = 256 * (tiles + (tiles > 1)) + text
    return lengths


def _tiles_and_answers(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    return _tiles(rng, num, rng.lognormal(4.5, 0.7, num).astype(np.int64))


def _tiles_and_labels(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    return _tiles(rng, num, rng.integers(15, 60, num))


def _conversations(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    lengths: IntArray = rng.lognormal(7.0, 0.45, num).astype(np.int64)
    return lengths


def _many_lengths(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    lengths: IntArray = rng.gamma(6, 180, num).astype(np.int64)
    return lengths


def _documents(rng: np.random.Generator, num: int, capacity: int) -> NDArray[np.integer]:
    lengths: IntArray = (capacity * rng.lognormal(-1.4, 0.9, num)).astype(np.int64)
    return lengths


def _uniform(rng: np.random.Generator, num: int, capacity: int) -> NDArray[np.integer]:
    return rng.integers(1, capacity, num, endpoint=True)


def _lognormal(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    lengths: IntArray = rng.lognormal(6, 1, num).astype(np.int64)
    return lengths


def _narrow(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    lengths: IntArray = rng.lognormal(np.log(1135) - 0.02, 0.2, num).astype(np.int64)
    return lengths


def _two_point(rng: np.random.Generator, num: int, capacity: int) -> NDArray[np.integer]:
    return rng.choice([capacity * 55 // 100, capacity // 5], num)


def _zipf(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    return rng.zipf(1.3, num)


DISTRIBUTIONS = {
    one.name: one
    for one in (
        Distribution("chat-8192", 8192, _bootstrap("chat")),
        Distribution("chat-4096", 4096, _bootstrap("chat")),
        Distribution("chat-2048", 2048, _bootstrap("chat")),
        Distribution("sft-4096", 4096, _bootstrap("sft")),
        Distribution("sft-2048", 2048, _bootstrap("sft")),
        Distribution("detcap-12288", 12288, _bootstrap("detcap")),
        Distribution("detcap-8192", 8192, _bootstrap("detcap")),
        Distribution("detcap-4096", 4096, _bootstrap("detcap")),
        Distribution("vlm-16384", 16384, _vision),
        Distribution("vlm-8192", 8192, _vision),
        Distribution("vlm-4096", 4096, _vision),
        Distribution("tiles-3072", 3072, _tiles_and_answers),
        Distribution("tiles-4096", 4096, _tiles_and_answers),
        Distribution("tiles-8192", 8192, _tiles_and_answers),
        Distribution("tile-labels-4096", 4096, _tiles_and_labels),
        Distribution("tile-labels-16384", 16384, _tiles_and_labels),
        Distribution("many-3000", 3000, _many_lengths),
        Distribution("many-3500", 3500, _many_lengths),
        Distribution("conversations-4096", 4096, _conversations),
        Distribution("conversations-3000", 3000, _conversations),
        Distribution("detcap-5000", 5000, _bootstrap("detcap")),
        Distribution("documents-32768", 32768, _documents),
        Distribution("lognormal-4096", 4096, _lognormal),
        Distribution("narrow-4096", 4096, _narrow),
        Distribution("narrow-3000", 3000, _narrow),
        Distribution("uniform-8192", 8192, _uniform),
        Distribution("two-point-8192", 8192, _two_point),
        Distribution("zipf-8192", 8192, _zipf),
    )
}
"""Distributions by name."""


@attrs.frozen(eq=False)
class Samples:
    """Numbers of tokens, images and patches of samples; arrays of shape (num_samples,)."""

    tokens: IntArray
    images: IntArray
    patches: IntArray

    @property
    def works(self) -> NDArray[np.float64]:
        """FLOPs of each sample, forward and backward."""
        return SampleWorks.from_lengths(MODEL.trained(), self.tokens, images=self.images, patches=self.patches).flops

    def take(self, chosen: IntArray) -> Samples:
        """Return the samples at the indices *chosen*."""
        return Samples(self.tokens[chosen], self.images[chosen], self.patches[chosen])


def made_mix(num_samples: int, *, seed: int) -> Samples:
    """Return samples of short text, each with 0, 1, 2 or 4 images of common sizes."""
    rng = np.random.default_rng(seed)
    text = np.clip(rng.lognormal(5.2, 0.9, num_samples), 16, 8000).astype(np.int64)
    images = rng.choice([0, 1, 1, 1, 2, 4], num_samples)
    return _with_images(text, images, rng.choice(IMAGE_TOKENS, int(images.sum()), p=IMAGE_SHARES))


def documents(num_samples: int, *, seed: int) -> Samples:
    """Return samples of longer text, each with up to 6 images of 80 to 1,599 tokens."""
    rng = np.random.default_rng(seed)
    text = np.clip(rng.lognormal(6.2, 1.1, num_samples), 32, 12_000).astype(np.int64)
    images = rng.choice([0, 0, 1, 2, 3, 6], num_samples)
    return _with_images(text, images, rng.integers(80, 1600, int(images.sum())))


def texts(name: str, num_samples: int, *, seed: int) -> Samples:
    """
    Return samples without images, whose lengths come from a trace or a distribution.

    Args:
        name: `chat`, for the trace without a limit of length, or a name in `DISTRIBUTIONS`.
        num_samples: Number of samples.
        seed: Seed of the draw.
    """
    if name == "chat":
        tokens = np.random.default_rng(seed).choice(trace(name), num_samples).astype(np.int64)
    else:
        tokens = DISTRIBUTIONS[name].lengths(num_samples, seed=seed)
    return Samples(tokens, np.zeros_like(tokens), np.zeros_like(tokens))


def _with_images(text: IntArray, images: IntArray, sizes: NDArray[np.integer]) -> Samples:
    shown = np.zeros_like(text)
    np.add.at(shown, np.repeat(np.arange(text.size), images), sizes)
    return Samples(text + shown, images, shown * PATCHES_OF_A_TOKEN)
