"""
What a data set is called, as ms-swift writes it: `[HF::|MS::]name[:subset[/subset…]][#count]`; and
which of its records that draws.

Rules kept here: a name that exists as a file or folder is taken whole, whatever it holds; a count
beyond the records repeats them; numbers are drawn as ms-swift draws them, entry by entry from one
generator, so that the same seed gives the same records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@attrs.frozen
class DataEntry:
    """A data set, and how much of it."""

    name: str
    """A file, a folder, or an id of a hub."""

    subsets: tuple[str, ...] = ()

    count: int | None = None
    """Records to draw; None takes all."""

    hub: str | None = None
    """`hf` or `ms`, where the entry says which."""


@attrs.frozen
class DrawnRecords:
    """What is taken of one data set."""

    train: IntArray
    """Positions of its records, in the order in which they are taken; int64 of shape (n,)."""

    val: IntArray
    """The same for evaluation."""


_MAX_DIGITS = 12
"""Digits of a count; beyond it no number of records is meant."""


def parse_entry(text: str, *, exists: Callable[[str], bool]) -> DataEntry:
    """
    Return what a data set's name stands for; ValueError if its count is none.

    Args:
        text: As ms-swift takes it.
        exists: Whether there is a file or folder of this name.

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
    Return which records of each data set are trained and evaluated, as ms-swift draws them.

    Args:
        sizes: Records of each data set, >= 1.
        counts: Records to draw of each; None takes all.
        split_ratio: Share of the drawn records that is evaluated: 0 none, 1 all.
        shuffle: Draw at random; otherwise from the front, and evaluate the end.
        seed: Seed of the generator that all data sets are drawn from, in order.

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
    if ratio == 0:
        return DrawnRecords(_sampled(everything, count, shuffle=shuffle, generator=generator), nothing)
    if ratio == 1:
        if count > size:
            message = f"asks for {count:,} records of {size:,}, and evaluation repeats none: ask for at most {size:,}"
            raise ValueError(message)
        return DrawnRecords(nothing, _sampled(everything, count, shuffle=shuffle, generator=generator))
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
    """Return *count* items: all of them as often as they fit, and a part of them for the rest."""
    times, rest = divmod(count, len(items))
    taken = np.tile(items, times)
    if rest:
        chosen = generator.permutation(len(items))[:rest] if shuffle else np.arange(rest)
        taken = np.concatenate([taken, items[chosen]])
    return taken
