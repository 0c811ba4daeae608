"""Mixes of several data sets as values."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import attrs

from packplan.core.config import PathText


@attrs.frozen(kw_only=True)
class Source:
    """One data set of a mix. Exactly one of `ratio` and `count` is given."""

    jsonl: PathText
    """Data file, or a pattern of them."""

    ratio: Decimal | None = None
    """Share among the sources with a ratio, an exact decimal."""

    count: int | None = None
    """Samples of the source in each epoch, beside the ratios."""

    cap: int | None = None
    """
    Most samples of the source in an epoch, or tokens under `by: tokens`. The rest goes to the other
    sources, by their ratios.
    """

    replacement: bool = False
    """Whether a sample may be drawn more than once in an epoch."""


@attrs.frozen(kw_only=True)
class Mix:
    """Several data sets, mixed again each epoch."""

    sources: tuple[Source, ...]
    """The data sets; at least one, each file once."""

    by: Literal["samples", "tokens"] = "samples"
    """Unit of the ratios and caps."""

    samples_per_epoch: int | None = None
    """
    Samples of all sources in an epoch. Unset, the first source to run out limits them; if none can,
    it is the number of all samples within the caps.
    """

    tokens_per_epoch: int | None = None
    """The same in tokens, for `by: tokens`."""

    @property
    def per_epoch(self) -> int | None:
        """Samples or tokens of an epoch that are asked for, or None."""
        return self.samples_per_epoch if self.by == "samples" else self.tokens_per_epoch


@attrs.frozen
class Mixes:
    """
    A curriculum: the mix of each epoch. The last one stays.

    >>> mixes = Mixes(tuple(Mix(sources=(Source(jsonl=name, count=1),)) for name in "ab"))
    >>> mixes.files, mixes.at(0).sources[0].jsonl, mixes.at(7).sources[0].jsonl
    (('a', 'b'), 'a', 'b')
    """

    entries: tuple[Mix, ...]
    """Mixes of the first epochs, in order; at least one."""

    is_curriculum: bool = attrs.field(default=True, kw_only=True)
    """Whether the YAML lists mixes under `curriculum:`, which begins the keys of faults."""

    def at(self, epoch: int) -> Mix:
        """Return the mix of an *epoch*, from 0."""
        return self.entries[min(epoch, len(self.entries) - 1)]

    @property
    def files(self) -> tuple[str, ...]:
        """Files of all entries, in the order of their first mention."""
        return tuple(dict.fromkeys(source.jsonl for mix in self.entries for source in mix.sources))

    @property
    def places(self) -> dict[str, str]:
        """Key in the YAML that names each file first."""
        named = [(entry, *one) for entry, mix in enumerate(self.entries) for one in enumerate(mix.sources)]
        return {source.jsonl: f"{self.place(entry)}sources[{number}].jsonl" for entry, number, source in named[::-1]}

    def place(self, entry: int) -> str:
        """Return the beginning of the keys of an *entry* in the YAML."""
        return f"curriculum[{entry}]." if self.is_curriculum else ""
