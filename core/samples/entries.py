"""
Data sets as ms-swift names them, `[HF::|MS::]name[:subset[/subset…]][#count]`, and the draw of
their records.

A name that exists as a file or folder is taken whole. A count beyond the records repeats them.
Records are drawn as ms-swift draws them, entry by entry from one generator, so the same seed gives
the same records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from packplan.core.lengths import IntArray


@attrs.frozen
class DataEntry:
    """Name of a data set, with subsets and count."""

    name: str
    """File, folder, or id on a hub."""

    subsets: tuple[str, ...] = ()

    count: int | None = None
    """Records to draw; None takes all."""

    hub: str | None = None
    """Hub, `hf` or `ms`; None if the entry names none."""


@attrs.frozen
class DrawnRecords:
    """Records that are drawn from one data set."""

    train: IntArray
    """Positions of its records for training, in order of the draw; int64 of shape (n,)."""

    val: IntArray
    """Positions of its records for evaluation, in the same form."""


_MAX_DIGITS = 12
"""Limit of digits of a count."""


def parse_entry(text: str, *, exists: Callable[[str], bool]) -> DataEntry:
    """
    Return the data set of an entry; ValueError if its hub or count is invalid.

    Args:
        text: Entry as ms-swift takes it.
        exists: Function that tells whether a file or folder exists.

    >>> parse_entry("HF::org/name:a/b#500", exists=lambda path: False)
    DataEntry(name='org/name', subsets=('a', 'b'), count=500, hub='hf')
    """
    hub, rest, count, subsets = None, text, None, None
    if not exists(rest) and "::" in rest:
        prefix, _, rest = rest.partition("::")
        hub = prefix.lower()
        if hub not in {"hf", "ms"}:
            message = f"begins with {prefix}::, but a hub is HF:: or MS::"
            raise ValueError(message)
    if not exists(rest) and "#" in rest:
        rest, _, number = rest.rpartition("#")
        if not number.strip().isdecimal() or len(number) > _MAX_DIGITS or not int(number):
            message = f"asks for #{number} records, but a count is a whole number from 1 to 10**{_MAX_DIGITS} - 1"
            raise ValueError(message)
        count = int(number)
    if not exists(rest) and ":" in rest:
        rest, _, subsets = rest.partition(":")
    names = tuple(name.strip() for name in subsets.split("/")) if subsets else ()
    return DataEntry(rest.strip(), names, count, hub)


def draw_records(
    sizes: Sequence[int], counts: Sequence[int | None], *, split_ratio: float, shuffle: bool, seed: int
) -> tuple[DrawnRecords, ...]:
    """
    Return the records of each data set for training and evaluation, as ms-swift draws them.

    Args:
        sizes: Records of each data set, >= 1.
        counts: Records to draw of each; None takes all.
        split_ratio: Share of the drawn records for evaluation, from 0 to 1.
        shuffle: Whether to draw at random. Otherwise from the front, with the end for evaluation.
        seed: Seed of the generator of all draws, in order.

    Raises:
        ValueError: A data set is too small for its split, or for its count without repeating.

    >>> [drawn] = draw_records([4], [6], split_ratio=0, shuffle=False, seed=42)
    >>> drawn.train.tolist(), drawn.val.tolist()
    ([0, 1, 2, 3, 0, 1], [])
    """
    generator = np.random.RandomState(seed)  # ms-swift's: another one would draw other records
    drawn = []
    for size, count in zip(sizes, counts, strict=True):
        _seed_of(generator)  # ms-swift takes a seed for each data set, whether it uses it or not
        wanted = size if count is None else count
        drawn.append(_draw_one(size, wanted, split_ratio, shuffle=shuffle, generator=generator))
    return tuple(drawn)


def _seed_of(generator: np.random.RandomState) -> int:
    return int(generator.randint(0, np.iinfo(np.int32).max))


def _draw_one(size: int, count: int, ratio: float, *, shuffle: bool, generator: np.random.RandomState) -> DrawnRecords:
    nothing = np.zeros(0, np.int64)
    everything = np.arange(size, dtype=np.int64)
    if ratio == 1 and count > size:
        message = f"asks for {count:,} records of {size:,}, and evaluation repeats none: ask for at most {size:,}"
        raise ValueError(message)
    if ratio in (0, 1):
        drawn = _sampled(everything, count, shuffle=shuffle, generator=generator)
        return DrawnRecords(nothing, drawn) if ratio else DrawnRecords(drawn, nothing)
    num_val = max(int(min(size, count) * ratio), 1)
    if num_val >= min(size, count):
        message = f"has {size:,} records, too few to split by split_dataset_ratio {ratio:g}: add records"
        raise ValueError(message)
    seed = _seed_of(generator)
    if shuffle:
        order = np.random.default_rng(seed).permutation(size).astype(np.int64)
        val, train = order[:num_val], order[num_val:]
    else:
        train, val = everything[: size - num_val], everything[size - num_val :]
    return DrawnRecords(_sampled(train, count - num_val, shuffle=shuffle, generator=generator), val)


def _sampled(items: IntArray, count: int, *, shuffle: bool, generator: np.random.RandomState) -> IntArray:
    """Return *count* items: all items as many times as possible, and some of them for the rest."""
    times, rest = divmod(count, len(items))
    taken = np.tile(items, times)
    if rest:
        chosen = generator.permutation(len(items))[:rest] if shuffle else np.arange(rest)
        taken = np.concatenate([taken, items[chosen]])
    return taken
