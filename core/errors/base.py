"""What all errors of this project are, and what several of them hold."""

from __future__ import annotations

from itertools import takewhile

import attrs

from packplan.core.errors.words import counted, shortened


class PackplanError(Exception):
    """
    Base of all errors raised on purpose; its text is bounded, whatever the data or the YAML that it
    quotes.
    """

    def _text(self) -> str:
        """Return what is wrong, and what to do, however long."""
        return super().__str__()

    def __str__(self) -> str:
        return shortened(self._text())


class UserError(PackplanError):
    """The caller can fix it; the text says what is wrong and what to do."""


class ArgumentError(UserError, ValueError):
    """What a library function was given cannot be used: lengths, a batch, the number of ranks."""


class VerificationError(PackplanError):
    """Something stored or shared is not what it claims to be."""


@attrs.frozen
class Fault:
    """One thing wrong with a configuration."""

    path: str
    """Where: `training.packing_min_fill_ratio`."""

    reason: str
    """What is wrong, and the remedy."""

    place: str = ""
    """Where the value stands, if not in the YAML: what the command line says, `training.seed=x`."""

    def __str__(self) -> str:
        place = f" (command line: {self.place})" if self.place else ""
        return f"{self.path}{place}: {self.reason}" if self.path else self.reason


@attrs.frozen
class Difference:
    """One key in which two fingerprints differ."""

    key: str
    stored: object
    current: object

    def __str__(self) -> str:
        return f"{self.key}: stored {self.stored!r}, now {self.current!r}"


@attrs.frozen
class RankDifference:
    """One key in which ranks differ."""

    key: str

    values: tuple[str | None, ...]
    """The value of each rank, as text; None where a rank has none."""

    def __str__(self) -> str:
        ranks: dict[str | None, list[int]] = {}
        for rank, value in enumerate(self.values):
            ranks.setdefault(value, []).append(rank)
        same = sum(1 for _ in takewhile(lambda at: len(set(at)) == 1, zip(*filter(None, ranks), strict=False)))
        shown = [f"{_from(value, same)} on {_ranks(ranks[value])}" for value in list(ranks)[:_MOST]]
        left_out = len(ranks) - len(shown)
        return f"{self.key}: {'; '.join(shown)}" + (f"; {counted(left_out, 'other value')}" if left_out else "")


_MOST, _MOST_CHARACTERS, _BEFORE = 3, 80, 20
"""
Values and ranks of a difference that are named, characters of a value, and those of them before the
first that differs.
"""


def _from(value: str | None, same: int) -> str:
    """Return a value, a long one from where it differs, behind so many characters that do not."""
    if value is None or len(value) <= _MOST_CHARACTERS:
        return "absent" if value is None else value
    start = max(0, same - _BEFORE)
    end = start + _MOST_CHARACTERS
    return f"{'…' if start else ''}{value[start:end]}{'…' if end < len(value) else ''}"


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words: the first ones by number."""
    named = ", ".join(map(str, ranks[:_MOST]))
    others = f" and {len(ranks) - _MOST:,} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{others}"
