"""The samples that ways to even work are compared on, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, Protocol, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.app.bench.distributions import DISTRIBUTIONS, trace
from packplan.core.lengths import IntArray
from packplan.core.packs import Packs, concatenate
from packplan.core.work import SampleWorks, VisionWork, WorkModel

MODEL = WorkModel(
    per_position=14 * 10**9,
    per_pair=4 * 28 * 3584,
    vision=VisionWork(per_patch=1_340_000_000, per_image_pair=4 * 1280, per_window_pair=0, window=0),
).trained()
"""A 7B model with a vision tower of 0.67B, most of whose layers attend within small windows."""

PATCHES_OF_A_TOKEN = 4


@attrs.frozen(eq=False)
class Samples:
    """What is packed; arrays of shape (num_samples,)."""

    tokens: IntArray
    images: IntArray
    patches: IntArray

    @property
    def works(self) -> NDArray[np.float64]:
        """FLOPs of each sample, forward and backward."""
        return SampleWorks.of(MODEL, self.tokens, images=self.images, patches=self.patches).samples

    def below(self, capacity: int) -> Samples:
        """Return the samples that are shorter than a pack."""
        return self.take(np.flatnonzero(self.tokens < capacity))

    def take(self, chosen: IntArray) -> Samples:
        """Return the samples at these places."""
        return Samples(self.tokens[chosen], self.images[chosen], self.patches[chosen])


Left = Literal["none", "long", "alone"]
"""Which packs are left out of all steps."""

ASIDE = get_args(Left)


class Aside:
    """Leaves packs out that no packing could have made lighter."""

    def __init__(self, left: Left, drawn: Samples, capacity: int) -> None:
        self._left = left
        self._capacity = capacity
        is_long = drawn.tokens >= capacity
        self._num_long = int(is_long.sum()) if left == "none" else 0
        self.samples = drawn.take(np.argsort(is_long, kind="stable")) if left == "none" else drawn.below(capacity)
        """Samples that packs may hold: the shorter ones, in their order, then the long ones."""

    def trained(self, packs: Packs) -> Packs:
        """Return the packs of the shorter samples that steps have, and those of the long ones."""
        if self._left == "alone":
            return packs.take(np.flatnonzero(packs.sizes() > 1))
        num = self.samples.tokens.size
        return concatenate([packs, Packs.from_lists([[index] for index in range(num - self._num_long, num)])])

    def breaches(self, packs: Packs) -> int:
        """Return how many packs are above the capacity, but for a sample alone that is so."""
        loads = packs.loads(self.samples.tokens)
        return int(((loads > self._capacity) & ((packs.sizes() > 1) | (self._num_long == 0))).sum())


class Draw(Protocol):
    """Draws samples."""

    def __call__(self, num_samples: int, *, seed: int) -> Samples:
        """Return so many samples."""


def made_mix(num_samples: int, *, seed: int) -> Samples:
    """
    Return texts with no image, one, two or four of common sizes.

    Args:
        num_samples: How many, >= 1.

        seed: Of what is drawn, from 0.
    """
    rng = np.random.default_rng(seed)
    text = np.clip(rng.lognormal(5.2, 0.9, num_samples), 16, 8000).astype(np.int64)
    images = rng.choice([0, 1, 1, 1, 2, 4], num_samples)
    sizes = rng.choice([256, 576, 1024, 1280, 2560], int(images.sum()), p=[0.2, 0.3, 0.25, 0.15, 0.1])
    shown = np.zeros(num_samples, dtype=np.int64)
    np.add.at(shown, np.repeat(np.arange(num_samples), images), sizes)
    return Samples(text + shown, images, shown * PATCHES_OF_A_TOKEN)


def chat(num_samples: int, *, seed: int) -> Samples:
    """
    Return real lengths of chats, without images.

    Args:
        num_samples: How many, >= 1.

        seed: Of what is drawn, from 0.
    """
    return _texts(np.random.default_rng(seed).choice(trace("chat"), num_samples).astype(np.int64))


def documents(num_samples: int, *, seed: int) -> Samples:
    """
    Return longer texts with up to six images of other sizes than those of `made_mix`.

    Args:
        num_samples: How many, >= 1.

        seed: Of what is drawn, from 0.
    """
    rng = np.random.default_rng(seed)
    text = np.clip(rng.lognormal(6.2, 1.1, num_samples), 32, 12_000).astype(np.int64)
    images = rng.choice([0, 0, 1, 2, 3, 6], num_samples)
    shown = np.zeros(num_samples, dtype=np.int64)
    np.add.at(shown, np.repeat(np.arange(num_samples), images), rng.integers(80, 1600, int(images.sum())))
    return Samples(text + shown, images, shown * PATCHES_OF_A_TOKEN)


def drawn_lengths(num_samples: int, *, seed: int, name: str) -> Samples:
    """
    Return texts of a distribution of the other benchmarks.

    Args:
        num_samples: How many, >= 1.

        seed: Of what is drawn, from 0.

        name: Of the distribution.
    """
    return _texts(DISTRIBUTIONS[name].lengths(num_samples, seed=seed))


def _texts(tokens: IntArray) -> Samples:
    return Samples(tokens, np.zeros_like(tokens), np.zeros_like(tokens))


DATA: Mapping[str, Draw] = {
    "vision": made_mix,
    "chat": chat,
    "documents": documents,
    **{name: partial(drawn_lengths, name=name) for name in ("sft-2048", "detcap-12288", "uniform-8192", "zipf-8192")},
}
"""By name; those with a number are drawn for packs of so many tokens."""
