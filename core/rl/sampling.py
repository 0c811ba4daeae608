"""Sampling of answers by the model, and the prompts that are answered together."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from packplan.core.lengths import IntArray, Lengths, as_lengths


@attrs.frozen
class Sampling:
    """Number, length and temperature of the answers to a prompt."""

    completions: int
    """Answers to each prompt."""

    keep: int
    """Number of the best answers that become training samples."""

    max_new_tokens: int
    temperature: float

    def batches(self, lengths: Lengths, *, max_tokens: int) -> Iterator[list[int]]:
        """
        Yield the positions of prompts that are answered together, the longest prompts first.

        A batch's answers have the width of its longest prompt and of the longest answer.

        Args:
            lengths: Tokens of the prompts, >= 1.
            max_tokens: Most tokens of a batch; one prompt alone may exceed it.

        >>> sampling = Sampling(completions=2, keep=1, max_new_tokens=10, temperature=1.0)
        >>> list(sampling.batches([20, 50, 30, 10], max_tokens=160))
        [[1], [2, 0], [3]]
        """
        lengths = as_lengths(lengths)
        rest = (-lengths).argsort(kind="stable").tolist()
        while rest:
            width = self.completions * (int(lengths[rest[0]]) + self.max_new_tokens)
            size = max(1, max_tokens // width)
            yield rest[:size]
            rest = rest[size:]


def assign_prompts(lengths: Lengths, *, shards: int) -> IntArray:
    """
    Return the positions of prompts, each worker's next to each other, its longest first.

    The first workers have one prompt more where workers do not divide them, as in
    `numpy.array_split`. Workers get like lengths, and batches of neighbours need little padding.

    Args:
        lengths: Expected tokens of each prompt with an answer.
        shards: Data-parallel workers, >= 1.

    >>> assign_prompts([20, 50, 30, 10, 40], shards=2).tolist()
    [1, 2, 3, 4, 0]
    """
    order = (-as_lengths(lengths)).argsort(kind="stable")
    return np.concatenate([order[worker::shards] for worker in range(shards)])
