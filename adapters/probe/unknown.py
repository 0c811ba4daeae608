"""
Keys of a configuration that may be lengths and that no rule of `shrink` knows, shrunk by trial.

Samples of the probe would never reach the end of a window, chunk or memory that is longer than they
are. So each number of that size is made smaller, if the model still runs. A number that cannot
shrink, and is no size of weights, may carry one sample's state beyond the probe's reach. Such a
model is refused, and the key named.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packplan.adapters.probe.shrink import LONGEST, is_known

Place = tuple[str | int, ...]
"""Keys, and positions in lists, that lead to a value."""

Trials = Mapping[Place, int]
"""New values at places of a small copy's configuration."""

_SHORT = (8, 16, 32)
"""Tokens to try for a length: as few as the model accepts."""

_REACHED = LONGEST // 2
"""Tokens that the probe's samples always exceed."""

_NO_SIZES = (
    "token_id",
    "label",
    "rope",
    "theta",
    "freq",
    "seed",
    "suppress",
    "inference",
    "quantization",
    "dtype",
    "version",
)
"""Parts of keys whose numbers are no sizes, or that `shrink` handles."""


def unknown_places(small: Mapping[str, Any], *, text: str | None) -> dict[Place, int]:
    """
    Return the numbers of a small copy's configuration that may be lengths and that no rule knows.

    Args:
        small: Result of `shrink`.
        text: Key of the text model's part; None if there are no parts.
    """
    part = small if text is None else small[text]
    return dict(_places(part, () if text is None else (text,)))


def _places(value: Any, place: Place) -> Iterator[tuple[Place, int]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            is_part = isinstance(item, Mapping) and "model_type" in item
            if not is_part and not is_known(str(key)) and not any(word in str(key) for word in _NO_SIZES):
                yield from _places(item, (*place, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _places(item, (*place, number))
    elif isinstance(value, int) and not isinstance(value, bool) and value > _REACHED:
        yield place, value


def shrink_by_trial(places: Sequence[Place], runs: Callable[[Trials], bool]) -> tuple[dict[Place, int], list[Place]]:
    """
    Return new values for the places at which the model still runs, and the places that cannot
    shrink.

    Args:
        places: Places of numbers that may be lengths.
        runs: Test of whether a small copy with new values can be built, and computes a sample.
    """
    together = dict.fromkeys(places, _SHORT[0])
    if not places or runs(together):
        return together, []
    if not runs({}):  # these numbers are not the cause
        return {}, []
    found: dict[Place, int] = {}
    left = []
    for place in places:
        short = next((size for size in _SHORT if runs({**found, place: size})), None)
        if short is None:
            left.append(place)
        else:
            found[place] = short
    return found, left


def with_trials(small: Mapping[str, Any], trials: Trials) -> dict[str, Any]:
    """Return a configuration with new values at some places."""
    changed = copy.deepcopy(dict(small))
    for (*parts, last), size in trials.items():
        part: Any = changed
        for key in parts:
            part = part[key]
        part[last] = size
    return changed


def named(place: Place, value: int) -> str:
    """Describe a place in words: its keys, and its number."""
    return f"{'.'.join(str(key) for key in place if not isinstance(key, int))} ({value:,})"
