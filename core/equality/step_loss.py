"""
Weights of samples in the loss of an optimizer step, and the likely reason for another loss.

A step has ranks, and each rank has batches, whose gradients are accumulated. The loss is a weighted
sum of the samples' summed losses, whatever the trainer divides by. So a wrong division is a wrong
set of weights, and the weights of the usual mistakes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

Weigh = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""Function from the learned tokens and the pack of each sample to its weight."""

Mean = Literal["tokens", "samples", "packs"] | Weigh


@attrs.frozen
class StepSample:
    """A sample of an optimizer step, and where it was trained."""

    tokens: int
    """Length of the sample."""

    learned: int
    """Tokens that are learned: those with a label and a token of the sample before them."""

    labelled: int
    """Labels that are not ignored, with that of the first token."""

    pack: int
    """Pack in the step."""

    rank: int = 0
    batch: int = 0
    """Batch of the rank in the step."""


def sample_weights(samples: Sequence[StepSample], *, mean: Mean) -> FloatArray:
    """
    Return the weight of each sample's summed loss in the loss of a step; shape (samples,).

    Args:
        samples: Samples of the step, over all ranks.
        mean: `tokens` for the mean over all learned tokens, `samples` for the mean of the samples'
            means, `packs` for the mean of the packs' means, or a function that returns the weights.

    >>> samples = [StepSample(4, 3, 3, pack=0), StepSample(2, 1, 1, pack=0)]
    >>> [sample_weights(samples, mean=mean).round(3).tolist() for mean in ("tokens", "samples")]
    [[0.25, 0.25], [0.167, 0.5]]
    """
    if callable(mean):
        return np.asarray(mean([one.learned for one in samples], [one.pack for one in samples]), dtype=np.float64)
    groups: dict[str, Sequence[Hashable]] = {
        "tokens": [0] * len(samples),
        "samples": range(len(samples)),
        "packs": [one.pack for one in samples],
    }
    return _group_means(samples, groups[mean])


def _group_means(samples: Sequence[StepSample], groups: Sequence[Hashable]) -> FloatArray:
    """Return the weights of the mean of the groups' means, over groups that learn a token."""
    learned: dict[Hashable, int] = {}
    for one, group in zip(samples, groups, strict=True):
        learned[group] = learned.get(group, 0) + one.learned
    number = sum(total > 0 for total in learned.values())
    return np.array([1 / (number * learned[group]) if learned[group] else 0.0 for group in groups])


def likely_reason(
    samples: Sequence[StepSample], sums: FloatArray, found: FloatArray, *, sharing: int, tolerance: float
) -> str:
    """
    Return the mistake whose weights give what was found, as a clause; empty if none does.

    Args:
        samples: Samples of the step, over all ranks.
        sums: Numbers of each sample's summed loss, or of its gradients; shape (samples, numbers).
        found: The step's numbers; shape (numbers,).
        sharing: Ranks that share each row.
        tolerance: Largest relative difference.

    >>> samples = [StepSample(4, 3, 3, pack=0, batch=0), StepSample(2, 1, 1, pack=1, batch=1)]
    >>> likely_reason(samples, np.array([[6.0], [1.0]]), np.array([1.5]), sharing=1, tolerance=1e-6)
    'as the mean of the batches, though they learn different numbers of tokens'
    """
    scale = float(np.linalg.norm(found))
    for clause, weights in _mistakes(samples, sharing):
        if float(np.linalg.norm(weights @ sums - found)) <= tolerance * scale:
            return clause
    return ""


def _mistakes(samples: Sequence[StepSample], sharing: int) -> Iterator[tuple[str, FloatArray]]:
    """Yield mistakes with their weights, the simplest first."""
    due, factors = sample_weights(samples, mean="tokens"), dict(_factors(samples, sharing))
    yield from ((f"as the token mean {clause}", due * factor) for clause, factor in factors.items())
    others = dict(_other_means(samples))
    yield from others.items()
    for name, weights in others.items():
        yield from ((f"{name}, and {clause}", weights * factor) for clause, factor in factors.items())


def _factors(samples: Sequence[StepSample], sharing: int) -> Iterator[tuple[str, float]]:
    """Yield what the ranks, or the accumulated batches, divide or multiply by once too often."""
    ranks = len({one.rank for one in samples}) * sharing
    batches = max(len({one.batch for one in samples if one.rank == rank}) for rank in {one.rank for one in samples})
    numbers = {"the ranks": ranks, "the accumulated batches": batches}
    if sharing < ranks:
        numbers["the ranks that share a row"] = sharing
    by_number: dict[int, list[str]] = {}
    for name, number in numbers.items():
        by_number.setdefault(number, []).append(name)
    numbers = {f"{' or '.join(names)} ({number})": number for number, names in by_number.items() if number > 1}
    numbers |= {f"{a} and by {b}": numbers[a] * numbers[b] for a, b in combinations(numbers, 2)}
    for name, number in numbers.items():
        yield f"divided by {name} once too often", 1 / number
        yield f"not divided by {name}", number
    if ranks > 1:
        yield f"divided by the ranks ({ranks}) twice too often", 1 / ranks**2


def _other_means(samples: Sequence[StepSample]) -> Iterator[tuple[str, FloatArray]]:
    """Yield other means than that over all learned tokens."""
    different = "though they learn different numbers of tokens"
    groups: dict[str, Sequence[Hashable]] = {
        "batches": [(one.rank, one.batch) for one in samples],
        "ranks": [one.rank for one in samples],
        "packs": [one.pack for one in samples],
        "samples": range(len(samples)),
    }
    for name, group in groups.items():
        yield f"as the mean of the {name}, {different}", _group_means(samples, group)
    ones = np.ones(len(samples))
    counts = {
        "as the sum over the tokens, which nothing divides": 1,
        "as a mean that counts ignored labels": sum(one.tokens for one in samples),
        "as a mean that counts the first token of each sample": sum(one.labelled for one in samples),
    }
    yield from ((name, ones / count) for name, count in counts.items())
