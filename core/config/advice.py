"""
Advice on a key that is not known: where it belongs, or which key it misspells; never a key of
another meaning.

A misspelling keeps the words of a key and their order. Each word of at least three letters may be
off by one letter (one too many, too few, another one, or two swapped), at most two words are, and
numbers stay. So `packing_lenght` is `packing_length`, and `min_pixels` is not `max_pixels`. Failing
that, a key may lack one word, or have one too many; it does not lack the medium that it is of:
`min_pixels` is not `video_min_pixels`.
"""

from collections.abc import Iterable, Mapping, Sequence

MOST = 3
"""Keys that advice names, at most."""

_ONE_WORD = 3
"""Rank of a key that differs by a whole word: behind all that differ by letters."""

_MEDIA = frozenset({"audio", "image", "video"})
"""Words without which a key would be of another medium."""


def unknown_key(name: str, level: str, known: Iterable[str], *, refused: Mapping[str, str]) -> str:
    """
    Return what is wrong with a key that its place does not have, and what to do.

    Args:
        name: The key, as it is written.
        level: The section that it stands in, `training` or `policy.sequence_packing`; empty at the
            top.
        known: All keys that there are, each with its section: `training.learning_rate`.
        refused: Keys, with their sections, that are known and always refused -> why, and what to
            do.

    >>> unknown_key("learning_rate", "", ["training.learning_rate"], refused={})
    'is no key of the top level: write training.learning_rate'
    """
    paths = list(known)
    if f"{_prefix(level)}{name}" in paths:
        section, _, last = name.rpartition(".")
        return f"is written with a dot: write {last} in the section {_prefix(level)}{section}"
    elsewhere = [path for path in paths if _last(path) == name]
    if elsewhere:
        return f"is no key of {level or 'the top level'}: write {_either(elsewhere)}"
    if reasons := [reason for path, reason in refused.items() if _last(path) == name]:
        return reasons[0]
    here = [path for path in (*paths, *refused) if path.rpartition(".")[0] == level]
    meant = closest(name, map(_last, here))
    if meant and f"{_prefix(level)}{meant[0]}" in refused:
        return f"is no known key; {meant[0]}, which it resembles, {refused[f'{_prefix(level)}{meant[0]}']}"
    if not meant:
        names = closest(name, map(_last, paths))
        meant = [path for close in names for path in paths if _last(path) == close]
    return f"is no known key: {f'did you mean {_either(meant)}?' if meant else 'remove it'}"


def closest(name: str, known: Iterable[str]) -> list[str]:
    """
    Return the keys that *name* may misspell, those that differ least, in their order.

    >>> closest("learning_rat", ["learning_rate", "seed"]), closest("min_pixels", ["max_pixels"])
    (['learning_rate'], [])
    """
    ranks = {key: rank for key in known if (rank := _rank(_words(name), _words(key))) is not None}
    return [key for key, rank in ranks.items() if rank == min(ranks.values())]


def _prefix(level: str) -> str:
    return f"{level}." if level else ""


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _either(names: Sequence[str]) -> str:
    return " or ".join(names[:MOST])


def _words(key: str) -> list[str]:
    return key.lower().replace("-", "_").split("_")


def _rank(words: list[str], meant: list[str]) -> int | None:
    """
    Return by how much *words* differ from those that are meant; None if they mean something else.
    """
    if _digits(words) != _digits(meant):
        return None
    if "".join(words) == "".join(meant):
        return 0
    if len(words) == len(meant):
        slips = [_slip(word, other) for word, other in zip(words, meant, strict=True)]
        letters = sum(slip for slip in slips if slip is not None)
        return None if None in slips or letters > 2 else letters
    one = _without_one(words, meant) | (_without_one(meant, words) - _MEDIA)
    return _ONE_WORD if one and min(len(words), len(meant)) >= 2 else None


def _without_one(longer: list[str], shorter: list[str]) -> set[str]:
    """Return the words any one of which *longer* has beyond *shorter*; none if they differ more."""
    return {word for place, word in enumerate(longer) if longer[:place] + longer[place + 1 :] == shorter}


def _digits(words: list[str]) -> str:
    return "".join(letter for letter in "".join(words) if letter.isdigit())


def _slip(word: str, meant: str) -> int | None:
    """Return 0 for the same word, 1 for one that is off by a letter, None for another word."""
    if word == meant:
        return 0
    short, long = sorted((word, meant), key=len)
    if len(short) < 2 or len(long) < 3 or len(long) - len(short) > 1:
        return None
    start = next(place for place in range(len(long)) if long[place] != short[place : place + 1])
    if len(short) < len(long):
        return 1 if short[start:] == long[start + 1 :] else None
    swapped = long[:start] + long[start : start + 2][::-1] + long[start + 2 :]
    return 1 if short[start + 1 :] == long[start + 1 :] or short == swapped else None
