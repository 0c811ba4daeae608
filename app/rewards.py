"""Reward functions for the demo's tasks, in TRL's form: they return a score for each completion."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

Completions = Sequence[Sequence[dict[str, str]]]
"""Messages of each completion: one message of the assistant."""


def character_overlap(completions: Completions, answer: Sequence[str], **_: Any) -> list[float]:
    """
    Return the F1 score between the characters of each completion and its answer, ignoring
    whitespace.

    >>> character_overlap([[{"role": "assistant", "content": "dab"}]], ["a bad day"])
    [0.6]
    """

    def score(given: str, wanted: str) -> float:
        common = (Counter(given) & Counter(wanted)).total()
        return 2 * common / (len(given) + len(wanted)) if common else 0.0

    pairs = zip(completions, answer, strict=True)
    return [score("".join(said[-1]["content"].split()), "".join(wanted.split())) for said, wanted in pairs]


def exact_match(completions: Completions, answer: Sequence[str], **_: Any) -> list[float]:
    """
    Return 1 for each completion that equals its answer, ignoring surrounding whitespace, else 0.
    """
    pairs = zip(completions, answer, strict=True)
    return [float(said[-1]["content"].strip() == wanted.strip()) for said, wanted in pairs]
