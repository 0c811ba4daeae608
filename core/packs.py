"""
`Packs`, an immutable sequence of packs stored in flat arrays, and the checksum of packs.

Every `Packs` keeps these rules:

- `offsets` is int64 of shape (num_packs + 1,), starts at 0 and increases strictly: no pack is
  empty.
- `indices` is int64 of shape (offsets[-1],).
- Pack k is `indices[offsets[k]:offsets[k + 1]]`.
- Both arrays are read-only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, overload

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError
from packplan.core.lengths import IntArray, Lengths, as_lengths

BLOCK = 1 << 16
"""
Number of samples that are sorted at a time. Their keys then fit into the CPU cache, where a radix
sort is five times faster.
"""


_FORMAT = b"packplan packs 1\n"


def _read_only_view(values: Any) -> IntArray:
    array = np.asarray(values, dtype=np.int64).view()  # planning makes many packs, which are not copied
    array.flags.writeable = False
    return array


@attrs.frozen(eq=False, repr=False)
class Packs(Sequence[list[int]]):
    """
    Packs of sample indices; an object behaves like a list of lists.

    >>> packs = Packs.from_lists([[0, 2], [1]])
    >>> len(packs), packs[0], packs[1:].tolist(), packs == [[0, 2], [1]]
    (2, [0, 2], [[1]], True)
    """

    offsets: IntArray = attrs.field(converter=_read_only_view)
    """Start of each pack in `indices`, then the end of the last pack; shape (num_packs + 1,)."""

    indices: IntArray = attrs.field(converter=_read_only_view)
    """Sample indices of all packs, one pack after the other; shape (num_samples,)."""

    def __attrs_post_init__(self) -> None:
        offsets = self.offsets
        if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != self.indices.size:
            raise ArgumentError("argument", "offsets have to run from 0 to the number of indices")
        if np.any(offsets[1:] <= offsets[:-1]):
            raise ArgumentError("argument", f"pack {int(np.argmax(offsets[1:] <= offsets[:-1]))} is empty")

    @classmethod
    def from_lists(cls, packs: Iterable[Sequence[int]]) -> Packs:
        """
        Make packs from lists of sample indices, in the given order. Raise an ArgumentError if a
        pack is empty, or if an index is not a whole number from 0.
        """
        packs = list(packs)
        offsets = np.zeros(len(packs) + 1, dtype=np.int64)
        np.cumsum([len(pack) for pack in packs], out=offsets[1:])
        indices = np.array(list(chain.from_iterable(packs)))
        if indices.size and (indices.dtype.kind not in "iu" or indices.min() < 0):
            raise ArgumentError("argument", "sample indices have to be whole numbers from 0")
        return cls(offsets, indices)

    @classmethod
    def from_labels(cls, labels: NDArray[np.int32]) -> Packs:
        """
        Make packs, given the bin of each sample.

        Indices ascend in a pack, and packs ascend by their first index.

        Args:
            labels: Bin of each sample, numbered from 0 without gaps; shape (num_samples,).
        """
        if not labels.size:
            return cls(np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
        num_labels = int(labels.max()) + 1
        return cls(*_group_by_label(_renumber_by_first_sample(labels, num_labels), num_labels))

    @property
    def num_samples(self) -> int:
        """Number of sample indices in all packs; a repeated pack counts each time."""
        return int(self.indices.size)

    def sizes(self) -> IntArray:
        """Return the number of samples in each pack; shape (num_packs,)."""
        return np.diff(self.offsets)

    def loads(self, lengths: IntArray) -> IntArray:
        """
        Return the number of tokens of each pack, given each sample's length; shape (num_packs,).
        """
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(np.asarray(lengths)[self.indices], self.offsets[:-1])

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """
        Return the sum of *values* over each pack, computed exactly and then rounded to float64, so
        that it is the same on every processor.

        Args:
            values: A whole number >= 0 for each sample, of any magnitude; float64, shape
                (num_samples,).

        >>> Packs.from_lists([[0, 1], [2]]).sums(np.array([2.0**63, 1.0, 3.0])).tolist()
        [9.223372036854776e+18, 3.0]
        """
        fits = values.max(initial=0) * self.sizes().max(initial=0) < 2**63
        whole: Any = values.astype(np.int64) if fits else np.frompyfunc(int, 1, 1)(values)
        return self.loads(whole).astype(np.float64)

    def take(self, positions: IntArray) -> Packs:
        """Return the packs at *positions*, in this order. A position may occur several times."""
        sizes = self.sizes()[positions]
        offsets = np.zeros(sizes.size + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        starts = np.repeat(self.offsets[positions] - offsets[:-1], sizes)
        return Packs(offsets, self.indices[starts + np.arange(offsets[-1])])

    def to_labels(self, num_records: int) -> IntArray:
        """
        Return the pack index of each record, -1 for a record in no pack; shape (num_records,).
        """
        owners = np.full(num_records, -1, dtype=np.int64)
        owners[self.indices] = np.repeat(np.arange(len(self)), self.sizes())
        return owners

    def tolist(self) -> list[list[int]]:
        """Return all packs as lists of integers."""
        return list(self)

    def __len__(self) -> int:
        return int(self.offsets.size) - 1

    @overload
    def __getitem__(self, item: int) -> list[int]: ...
    @overload
    def __getitem__(self, item: slice) -> Packs: ...
    def __getitem__(self, item: int | slice) -> list[int] | Packs:
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step != 1 or stop <= start:
                return self.take(np.arange(len(self))[item])
            # Neighbouring packs are contiguous in memory: no index is copied.
            offsets = self.offsets[start : stop + 1]
            return Packs(offsets - offsets[0] if start else offsets, self.indices[offsets[0] : offsets[-1]])
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


class HasPacks(Protocol):
    """Object that has `packs` and behaves like a list of packs."""

    @property
    def packs(self) -> Packs:
        """Sample indices of each pack."""

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, item: int | slice) -> list[int] | Packs:
        return self.packs[item]


AnyPacks = Packs | HasPacks | Sequence[Sequence[int]] | NDArray[np.integer]
"""Packs that a caller may pass: `Packs`, a plan, or lists or arrays of sample indices."""


def as_packs(value: AnyPacks) -> Packs:
    """
    Convert lists or arrays of sample indices, or a plan, to `Packs`.

    Args:
        value: The packs, or an object with an attribute `packs`, such as a `Plan` or `RawPlan`.

    Raises:
        ArgumentError: *value* is neither packs nor an object that has packs.
        ArgumentError: A sample index is not a whole number from 0.

    >>> as_packs(np.array([[0, 2], [1, 3]]))
    Packs([[0, 2], [1, 3]], 2 packs, 4 samples)
    """
    held: Any = getattr(value, "packs", value)
    try:
        return held if isinstance(held, Packs) else Packs.from_lists(held)
    except TypeError:
        message = f"packs have to be lists of sample indices, a Packs, a Plan or a RawPlan, not {value!r:.80}"
        raise ArgumentError("argument", message) from None


def plan_checksum(packs: AnyPacks, *, lengths: Lengths | None = None) -> str:
    """
    Return the SHA-256 hex digest of *packs*, which covers the sample indices, the order of packs,
    and the order of samples in each pack.

    The hashed bytes are a format line, then the offsets and indices of `Packs`, and *lengths* if
    given. Each array is hashed as its size and its values, all little-endian int64. The digest is
    the same on all machines and in all processes.

    Args:
        packs: Packs, or a plan that contains packs.
        lengths: Number of tokens of each sample, which are digested too if given; shape
            (num_samples,).
    """
    packs, digest = as_packs(packs), hashlib.sha256(_FORMAT)
    for array in (packs.offsets, packs.indices, *([] if lengths is None else [as_lengths(lengths, least=0)])):
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(array.astype("<i8", copy=False).data)
    return digest.hexdigest()


def filled_tokens(loads: IntArray | Sequence[int], packing_length: int) -> IntArray:
    """
    Return the number of tokens in each pack, limited to the packing length, so that a long pack
    counts as full.

    >>> filled_tokens([30, 80, 200], 80).tolist()
    [30, 80, 80]
    """
    return np.minimum(np.asarray(loads, dtype=np.int64), packing_length)


def concatenate(parts: Sequence[Packs]) -> Packs:
    """Concatenate the packs of all *parts*."""
    offsets = np.zeros(1 + sum(map(len, parts)), dtype=np.int64)
    first = end = 0
    for part in parts:
        np.add(part.offsets[1:], end, out=offsets[first + 1 : first + 1 + len(part)])
        first, end = first + len(part), end + part.num_samples
    return Packs(offsets, np.concatenate([part.indices for part in parts]))


def sort_by_first_index(packs: Packs) -> Packs:
    """Sort packs by their first index. The order inside each pack does not change."""
    return packs.take(np.argsort(packs.indices[packs.offsets[:-1]], kind="stable"))


def join_ranges(counts: IntArray, *, starts: IntArray, dtype: type[np.signedinteger[Any]] = np.int64) -> NDArray[Any]:
    """
    Return concatenated ranges: `counts[0]` numbers from `starts[0]` on, then `counts[1]` numbers
    from `starts[1]` on, …

    Args:
        counts: Number of values in each range, >= 0; shape (num_starts,).
        starts: First value of each range; shape (num_starts,).
        dtype: Integer type of the result.

    >>> join_ranges(np.array([2, 0, 3]), starts=np.array([7, 5, 1])).tolist()
    [7, 8, 1, 2, 3]
    """
    ends = np.cumsum(counts)
    numbers = np.arange(ends[-1] if ends.size else 0, dtype=dtype)
    numbers += np.repeat((starts - (ends - counts)).astype(dtype), counts)
    return numbers


def _renumber_by_first_sample(labels: NDArray[np.int32], num_labels: int) -> NDArray[np.int32]:
    """
    Renumber packs in the order of their first sample. *labels* contains the pack of each sample.
    """
    first = np.empty(num_labels, dtype=np.int64)
    # Assigned back to front, so that the first sample of each label is written last and stays.
    for end in range(labels.size, 0, -BLOCK):
        start = max(0, end - BLOCK)
        first[labels[start:end][::-1]] = np.arange(end - 1, start - 1, -1)
    opens = np.zeros(labels.size, dtype=bool)
    opens[first] = True
    rank = np.empty(num_labels, dtype=np.int32)
    rank[labels[opens]] = np.arange(num_labels, dtype=np.int32)
    return rank[labels]


def _group_by_label(labels: NDArray[np.int32], num_labels: int) -> tuple[IntArray, IntArray]:
    """
    Group samples by label; return offsets and indices, which ascend inside each group.

    The first of two radix passes puts samples into buckets of neighbouring labels. The second pass
    sorts each bucket, which fits into the cache, by label.
    """
    num_samples = labels.size
    shift = max(0, (num_labels * BLOCK // num_samples).bit_length() - 1)
    num_drawers = (num_labels - 1 >> shift) + 1
    key_type = np.uint8 if num_drawers <= 256 else np.uint16 if num_drawers <= 65_536 else np.uint32
    starts = range(0, num_samples, BLOCK)
    sizes = np.zeros(num_drawers, dtype=np.int64)
    for start in starts:
        sizes += np.bincount(labels[start : start + BLOCK] >> shift, minlength=num_drawers)
    ends = np.cumsum(sizes)
    free = ends - sizes
    indices = np.empty(num_samples, dtype=np.int64)
    for start in starts:
        keys = (labels[start : start + BLOCK] >> shift).astype(key_type)
        here = np.bincount(keys, minlength=num_drawers)
        indices[join_ranges(here, starts=free)] = start + np.argsort(keys, kind="stable")
        free += here
    width = 1 << shift
    offsets = np.zeros(num_drawers * width + 1, dtype=np.int64)
    for number, (size, end) in enumerate(zip(sizes.tolist(), ends.tolist(), strict=True)):
        inside = indices[end - size : end]
        keys = (labels[inside] & (width - 1)).astype(np.uint16)
        indices[end - size : end] = inside[np.argsort(keys, kind="stable")]
        offsets[number * width + 1 : (number + 1) * width + 1] = np.bincount(keys, minlength=width)
    offsets = offsets[: num_labels + 1]
    return np.cumsum(offsets, out=offsets), indices
