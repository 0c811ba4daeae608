"""
The lengths that benchmarks pack: traces of real data, and distributions that others publish figures
on.

`traces.npz` holds token counts alone, no text: chat, from the answers of
github.com/tatsu-lab/alpaca_eval; sft, from github.com/teknium1/GPTeacher and
github.com/openai/grade-school-math; detcap, the element lists of
github.com/google-research-datasets/screen_annotation, whose image tokens are assumed from common
screen sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray

TRACES = Path(__file__).parent / "traces.npz"


@attrs.frozen
class Distribution:
    """Lengths to draw, and the capacity to pack them into."""

    name: str

    capacity: int
    """Tokens of a pack."""

    draw: Callable[[np.random.Generator, int, int], NDArray[np.integer]]
    """From a generator, a number of samples and the capacity."""

    def lengths(self, num_samples: int, *, seed: int) -> IntArray:
        """Return that many lengths from 1 to the capacity, in tokens."""
        drawn = self.draw(np.random.default_rng(seed), num_samples, self.capacity)
        lengths: IntArray = np.clip(drawn, 1, self.capacity).astype(np.int64)
        return lengths


def trace(name: str) -> NDArray[np.uint16]:
    """Return a trace as it was recorded: `chat`, `sft` or `detcap`."""
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
    """One to three images of common token counts, and text of lognormal length."""
    images = rng.choice([256, 576, 1024, 1280, 2560], num, p=[0.2, 0.3, 0.25, 0.15, 0.1])
    text = rng.lognormal(5.5, 0.8, num)
    lengths: IntArray = (images * rng.choice([1, 1, 1, 2, 3], num) + text).astype(np.int64)
    return lengths


def _uniform(rng: np.random.Generator, num: int, capacity: int) -> NDArray[np.integer]:
    return rng.integers(1, capacity, num, endpoint=True)


def _zipf(rng: np.random.Generator, num: int, _capacity: int) -> NDArray[np.integer]:
    return rng.zipf(1.3, num)


DISTRIBUTIONS = {
    one.name: one
    for one in (
        Distribution("chat-8192", 8192, _bootstrap("chat")),
        Distribution("chat-2048", 2048, _bootstrap("chat")),
        Distribution("sft-2048", 2048, _bootstrap("sft")),
        Distribution("detcap-12288", 12288, _bootstrap("detcap")),
        Distribution("detcap-8192", 8192, _bootstrap("detcap")),
        Distribution("vlm-16384", 16384, _vision),
        Distribution("vlm-8192", 8192, _vision),
        Distribution("vlm-4096", 4096, _vision),
        Distribution("uniform-8192", 8192, _uniform),
        Distribution("zipf-8192", 8192, _zipf),
    )
}
"""By name: what is drawn, and the capacity."""
