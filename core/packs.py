"""
Packs: a frozen sequence of packs, stored flat.

Rules that every `Packs` keeps: `offsets` is int64 of shape (num_packs + 1,), starts at 0 and rises strictly
(no pack is empty); `indices` is int64 of shape (offsets[-1],); pack k is `indices[offsets[k]:offsets[k + 1]]`;
both arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import attrs
import numpy as np

from core.lengths import IntArray


def _frozen_array(values: Any) -> IntArray:
    array = np.asarray(values, dtype=np.int64)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@attrs.frozen(eq=False, repr=False)
class Packs(Sequence[list[int]]):
    """
    Packs of sample indices; reads like a list of lists.

    >>> packs = Packs.from_lists([[0, 2], [1]])
    >>> len(packs), packs[0], packs[1:].tolist(), packs == [[0, 2], [1]]
    (2, [0, 2], [[1]], True)
    """

    offsets: IntArray = attrs.field(converter=_frozen_array)
    """Where each pack starts in `indices`, and the end of the last; shape (num_packs + 1,)."""

    indices: IntArray = attrs.field(converter=_frozen_array)
    """Sample indices of all packs, one pack after the other; shape (num_samples,)."""

    def __attrs_post_init__(self) -> None:
        offsets = self.offsets
        if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != self.indices.size:
            message = "offsets have to run from 0 to the number of indices"
            raise ValueError(message)
        if np.any(offsets[1:] <= offsets[:-1]):
            message = f"pack {int(np.argmax(offsets[1:] <= offsets[:-1]))} is empty"
            raise ValueError(message)

    @classmethod
    def from_lists(cls, packs: Iterable[Sequence[int]]) -> Packs:
        """Build from lists of sample indices, in the order given."""
        packs = list(packs)
        offsets = np.zeros(len(packs) + 1, dtype=np.int64)
        np.cumsum([len(pack) for pack in packs], out=offsets[1:])
        return cls(offsets, np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=int(offsets[-1])))

    @classmethod
    def from_assignment(cls, samples: IntArray, bins: IntArray) -> Packs:
        """
        Build in canonical order: sample `samples[i]` is in bin `bins[i]`.

        Args:
            samples: Distinct sample indices, ascending.

            bins: Any labels >= 0, one a sample.
        """
        if not samples.size:
            return cls(np.zeros(1, dtype=np.int64), samples)
        # The samples ascend, so a bin's first appearance is its smallest index: numbering bins by first
        # appearance is the canonical order of packs, and a stable sort keeps indices ascending inside them.
        _, first, inverse, counts = np.unique(bins, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        offsets = np.zeros(order.size + 1, dtype=np.int64)
        np.cumsum(counts[order], out=offsets[1:])
        return cls(offsets, samples[np.argsort(rank[inverse], kind="stable")])

    @property
    def num_samples(self) -> int:
        """Sample indices in all packs together; a repeated pack counts again."""
        return int(self.indices.size)

    def sizes(self) -> IntArray:
        """Samples in each pack; shape (num_packs,)."""
        return np.diff(self.offsets)

    def loads(self, lengths: IntArray) -> IntArray:
        """Tokens in each pack, given every sample's length; shape (num_packs,)."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(lengths[self.indices], self.offsets[:-1])

    def take(self, positions: IntArray) -> Packs:
        """Return the packs at *positions*, in that order; a position may repeat."""
        sizes = self.sizes()[positions]
        offsets = np.zeros(sizes.size + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        starts = np.repeat(self.offsets[positions] - offsets[:-1], sizes)
        return Packs(offsets, self.indices[starts + np.arange(offsets[-1])])

    def tolist(self) -> list[list[int]]:
        """Return all packs as lists of ints."""
        return list(self)

    def __len__(self) -> int:
        return int(self.offsets.size) - 1

    @overload
    def __getitem__(self, item: int) -> list[int]: ...
    @overload
    def __getitem__(self, item: slice) -> Packs: ...
    def __getitem__(self, item: int | slice) -> list[int] | Packs:
        if isinstance(item, slice):
            return self.take(np.arange(len(self))[item])
        position = range(len(self))[item]
        found: list[int] = self.indices[self.offsets[position] : self.offsets[position + 1]].tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packs):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.indices, other.indices)
        if isinstance(other, (list, tuple)):
            return len(self) == len(other) and all(a == list(b) for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self[:3])) + (", …" if len(self) > 3 else "")
        return f"Packs([{shown}], {len(self)} packs, {self.num_samples} samples)"


def concatenate(parts: Sequence[Packs]) -> Packs:
    """Return the packs of all *parts*, one part after the other."""
    ends = np.cumsum([0, *(part.num_samples for part in parts)])
    offsets = [np.zeros(1, dtype=np.int64)]
    offsets += [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    return Packs(np.concatenate(offsets), np.concatenate([part.indices for part in parts]))


def canonical(packs: Packs) -> Packs:
    """Order indices inside packs, and packs by their first index; packs must be disjoint."""
    labels = np.repeat(np.arange(len(packs)), packs.sizes())
    order = np.argsort(packs.indices, kind="stable")
    return Packs.from_assignment(packs.indices[order], labels[order])
