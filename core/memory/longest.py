"""Peaks of full packs of other lengths, and the longest that fits: by lines through traced ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil

import attrs

MARGIN = 0.1
"""
Share that is added to a peak for a GPU's rounding of blocks, their fragmentation, and the memory of
CUDA and of collectives. It is an assumption, and was not measured on a GPU.
"""

_STEP = 64
"""Lengths are multiples of this many tokens."""


@attrs.frozen
class Longest:
    """Longest packing length that fits, and the check of its line."""

    tokens: int
    """Packing length; 0 if none fits."""

    peak: int
    """Peak at that length, in bytes, without the margin."""

    error: float
    """Deviation of the line from the traced peak at its length, relative to the latter."""

    limited: bool
    """Whether the model's positions end there, and not the memory."""


def peak_of_full(known: Mapping[int, int], tokens: int) -> int | None:
    """
    Return the peak of a full pack in bytes, by a line through the two nearest lengths.

    Args:
        known: Packing length -> traced peak of a full pack, in bytes.
        tokens: Packing length that is asked for.

    Returns:
        The traced peak, where there is one; None with fewer than two lengths.

    >>> peak_of_full({512: 1100, 1024: 2100}, 2048)
    4100
    """
    if tokens in known or len(known) < _TWO:
        return known.get(tokens)
    length, other = sorted(known, key=lambda one: abs(one - tokens))[:2]
    slope = (known[other] - known[length]) / (other - length)
    return round(known[length] + slope * (tokens - length))


_TWO = 2


def with_margin(peak: float) -> int:
    """Return the bytes that a GPU needs for a peak."""
    return ceil(peak * (1 + MARGIN))


def longest_fitting(peak_at: Callable[[int], int], *, start: int, limit: int, most: int) -> Longest:
    """
    Return the longest packing length whose peak fits.

    Memory is nearly linear in tokens. So the line through two lengths names a third one, whose own
    peak corrects it. A length is only returned if its own peak fits.

    Args:
        peak_at: Peak of a full pack of so many tokens, in bytes.
        start: Length to begin with, >= 1.
        limit: Bytes that are there.
        most: Longest length that the model has positions for.

    >>> longest_fitting(lambda tokens: 10 * tokens, start=512, limit=110_000, most=32768).tokens
    9984
    """
    room = limit / (1 + MARGIN)
    known = {one: peak_at(one) for one in {start, other_length(start, most)}}
    error: float | None = None
    for _ in range(_ATTEMPTS):
        length, expected = _on_line(known, room, most=most)
        if length in known:
            length -= _STEP if known[length] > room else 0
        if length in known or length < 1:
            break
        known[length] = peak_at(length)
        error = expected / known[length] - 1 if error is None else error
        if known[length] <= room < known[length] * (1 + _ENOUGH):
            break
    fitting = [one for one, peak in known.items() if peak <= room and one <= most]
    longest = max(fitting, default=0)
    return Longest(longest, known.get(longest, min(known.values())), error or 0.0, limited=longest == most)


def other_length(start: int, most: int) -> int:
    """Return the second length of a line: twice the first, which has its images' share, or half."""
    return 2 * start if 2 * start <= most else max(1, start // 2)


_ENOUGH = 0.03
"""Room that may be left at the length that is returned, relative to its peak."""

_ATTEMPTS = 2


def _on_line(known: dict[int, int], room: float, *, most: int) -> tuple[int, float]:
    """
    Return the length at which the line through the two nearest peaks reaches the room, rounded
    down, and the peak of the line there.
    """
    (length, peak), (other, other_peak) = sorted(known.items(), key=lambda one: abs(one[1] - room))[:2]
    slope = (other_peak - peak) / (other - length)
    found = length + (room - peak) / slope if slope > 0 else most
    rounded = most if found >= most else max(_STEP, int(found) // _STEP * _STEP)
    return rounded, peak + slope * (rounded - length)
