"""The samples that ways to even work are compared on, and what they cost."""

from __future__ import annotations

import attrs
import numpy as np

from app.bench.distributions import trace
from core.lengths import IntArray
from core.work import SampleWorks, VisionWork, WorkModel

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
    def works(self) -> IntArray:
        """FLOPs of each sample, forward and backward."""
        return SampleWorks.of(MODEL, self.tokens, images=self.images, patches=self.patches).samples

    def below(self, capacity: int) -> Samples:
        """Return the samples that are shorter than a pack."""
        keep = self.tokens < capacity
        return Samples(self.tokens[keep], self.images[keep], self.patches[keep])


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
    tokens = np.random.default_rng(seed).choice(trace("chat"), num_samples).astype(np.int64)
    return Samples(tokens, np.zeros_like(tokens), np.zeros_like(tokens))


DATA = {"vision": made_mix, "chat": chat}
