"""Random numbers of answers, which depend on what is drawn and never on who draws it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def draw_keys(
    *, seed: int, step: int, prompts: Sequence[int], generations: Sequence[int], num: int
) -> NDArray[np.uint64]:
    """
    Return a random number for each token of each answer.

    The number depends on seed, step, prompt, generation and position alone. Philox, a generator
    with a counter, gives it (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
    numpy promises that its raw numbers never change.

    Args:
        seed: Seed of the run, from 0.
        step: Step of the run, from 0.
        prompts: Index of each answer's prompt, from 0.
        generations: Number of each answer among those to its prompt, from 0.
        num: Tokens of an answer.

    Returns:
        Shape (num_answers, num).
    """
    key = np.array([seed, step], dtype=np.uint64)
    keys = np.empty((len(prompts), num), dtype=np.uint64)
    for row, prompt, generation in zip(keys, prompts, generations, strict=True):
        counter = np.array([0, generation, prompt, 0], dtype=np.uint64)
        row[:] = np.random.Philox(key=key, counter=counter).random_raw(num)
    return keys
