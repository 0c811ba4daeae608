"""Reward functions, which compare a completion with the answer in its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol


class Reward(Protocol):
    """Function that scores a completion; higher is better."""

    def __call__(self, completion: str, answer: str, /) -> float:
        """Return the score of *completion*, given the record's own *answer*."""


def word_overlap(completion: str, answer: str) -> float:
    """
    Return the F1 measure of common words, from 0 to 1, as in question answering (SQuAD, 2016).

    >>> word_overlap("a red dot", "a small red dot")
    0.8571428571428571
    """
    given, wanted = completion.lower().split(), answer.lower().split()
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def character_overlap(completion: str, answer: str) -> float:
    """
    Return the F1 measure of common characters, from 0 to 1, without blanks.

    >>> character_overlap("dab", "a bad day")
    0.6
    """
    given, wanted = "".join(completion.split()), "".join(answer.split())
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def exact_match(completion: str, answer: str) -> float:
    """Return 1 if both are equal without surrounding blanks, else 0."""
    return float(completion.strip() == answer.strip())


def word_count(completion: str, answer: str) -> float:
    """
    Return the smaller number of words over the larger, whatever the words are.

    >>> word_count("a b", "c d e")
    0.6666666666666666
    """
    given, wanted = len(completion.split()), len(answer.split())
    return min(given, wanted) / max(given, wanted) if given or wanted else 1.0


REWARDS: Mapping[str, Reward] = MappingProxyType(
    {
        "word_overlap": word_overlap,
        "character_overlap": character_overlap,
        "exact_match": exact_match,
        "word_count": word_count,
    }
)
"""Rewards by the name that a run gives them; it may also name a function of its own."""
