"""
Draw of an epoch: the samples of each source, and their order.

Both follow from the sources, the seed and the epoch alone. Every sample of a source has a random
key. The source gives the samples of its lowest keys, or a run of draws with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.mixes.mixes import Mix, Mixes, Source
from packplan.core.mixes.quotas import quotas
from packplan.core.shuffling import shuffled

Seed = tuple[int, int, int]
"""Seed of the run, epoch, and number of the source in its mix."""


@attrs.frozen(eq=False)
class Schedule:
    """The samples of an epoch, in order; arrays of shape (num_samples,)."""

    source: IntArray
    """Index of the file in `Mixes.files`."""

    index: IntArray
    """Index of the sample in its file."""

    def __len__(self) -> int:
        return int(self.source.size)


@attrs.frozen(eq=False)
class Pool:
    """Samples of a source that can be drawn; arrays of shape (num_samples,)."""

    source: Source

    indices: IntArray
    """Indices of the samples in the records of all files, ascending."""

    lengths: IntArray
    """Tokens of the samples, >= 1."""

    def available(self, mix: Mix) -> int:
        """Return the number of samples or tokens, whichever the *mix* counts."""
        return len(self.indices) if mix.by == "samples" else int(self.lengths.sum())


def pools(mix: Mix, mixes: Mixes, lengths: IntArray, sizes: Sequence[int]) -> list[Pool]:
    """
    Return the samples of each source of a mix that can be drawn.

    Args:
        mix: An entry of *mixes*.
        mixes: The curriculum.
        lengths: Tokens of each record of `mixes.files`, 0 where it cannot be drawn.
        sizes: Records of each file.
    """
    first = dict(zip(mixes.files, np.cumsum([0, *sizes]).tolist(), strict=False))
    size = dict(zip(mixes.files, sizes, strict=True))
    found = []
    for source in mix.sources:
        start, end = first[source.jsonl], first[source.jsonl] + size[source.jsonl]
        own, indices = lengths[start:end], np.arange(start, end)
        is_drawn = own > 0
        found.append(Pool(source, indices, own) if is_drawn.all() else Pool(source, indices[is_drawn], own[is_drawn]))
    return found


def schedule(mixes: Mixes, sizes: Sequence[int], *, seed: int, epoch: int) -> Schedule:
    """
    Return the samples of an epoch in order, for mixes by samples.

    Args:
        mixes: Mixes without `mixes_faults` and `stream_faults`.
        sizes: Samples of each file of `mixes.files`.
        seed: Seed of draws and order, from 0.
        epoch: Epoch, from 0. Each has its own draw and order.
    """
    mix = mixes.at(epoch)
    files = [mixes.files.index(source.jsonl) for source in mix.sources]
    wanted = [int(quota) for quota in quotas(mix, [sizes[file] for file in files])]
    drawn = [
        _repeated(sizes[file], quota, np.random.PCG64((seed, epoch, number)))
        if source.replacement
        else shuffled(sizes[file], seed=(seed, epoch, number))[:quota]
        for number, (source, file, quota) in enumerate(zip(mix.sources, files, wanted, strict=True))
    ]
    source = np.repeat(files, wanted)
    order = shuffled(source.size, seed=(seed, epoch, len(wanted)))
    return Schedule(source[order], np.concatenate(drawn)[order])


def select(mixes: Mixes, lengths: Lengths, sizes: Sequence[int], *, seed: int, epoch: int) -> IntArray:
    """
    Return the records that an epoch trains: int64, ascending, repeated where replacement drew them
    more than once.

    By samples, and where every record can be drawn, they are those of `schedule`.

    Args:
        mixes: Mixes without `mixes_faults` and `drawn_faults`.
        lengths: Tokens of each record of `mixes.files`, 0 where it cannot be drawn.
        sizes: Records of each file.
        seed: Seed of draws, from 0.
        epoch: Epoch, from 0.
    """
    mix = mixes.at(epoch)
    drawable = pools(mix, mixes, as_lengths(lengths, least=0), sizes)
    wanted = quotas(mix, [pool.available(mix) for pool in drawable])
    drawn = [
        pool.indices[_drawn(pool, mix, quota, (seed, epoch, number))]
        for number, (pool, quota) in enumerate(zip(drawable, wanted, strict=True))
    ]
    drawn.sort(key=lambda indices: indices[:1].tolist())
    return np.concatenate(drawn)


def _drawn(pool: Pool, mix: Mix, quota: Fraction, seed: Seed) -> IntArray:
    """Return the positions in a pool that an epoch draws, ascending."""
    bits, size = np.random.PCG64(seed), len(pool.indices)
    if not pool.source.replacement and quota >= pool.available(mix):
        return np.arange(size)
    weights = pool.lengths if mix.by == "tokens" else np.ones_like(pool.lengths)
    if not pool.source.replacement:
        return lowest(bits.random_raw(size), weights, quota, cap=pool.source.cap)
    if mix.by == "samples":
        return np.sort(_repeated(size, int(quota), bits))
    drawn = np.concatenate(list(_repeated_tokens(weights, quota, bits)))
    ends = _ends(weights[drawn])
    return np.sort(drawn[: nearest(ends, quota, cap=pool.source.cap)])


def lowest(keys: NDArray[np.uint64], weights: IntArray, quota: Fraction, *, cap: int | None) -> IntArray:
    """
    Return the positions, ascending, of the lowest keys whose weights sum up to about *quota*: at
    least one, unless the quota is 0.

    Equal keys count in order of position. Time is linear for random keys: only those are sorted
    whose highest 16 bits are those of the key where the sum reaches the quota.

    Args:
        keys: Random key of each sample; shape (num_samples,).
        weights: Tokens of each sample, or ones, >= 1; shape (num_samples,).
        quota: Sum to come nearest to.
        cap: Sum not to exceed, at least the quota and the weight of the lowest key.
    """
    bucket_of = (keys >> np.uint64(48)).astype(np.int64)
    # Sums in float64 are exact below 2**53.
    sums = np.cumsum(np.bincount(bucket_of, weights, 2**16))
    if quota >= sums[-1]:
        return np.arange(len(keys))
    bucket = np.searchsorted(sums, math.ceil(quota))
    taken = bucket_of < bucket
    inside = np.flatnonzero(bucket_of == bucket)
    inside = inside[np.argsort(keys[inside], kind="stable")]
    ends = int(weights[taken].sum()) + _ends(weights[inside])
    taken[inside[: nearest(ends, quota, cap=cap)]] = True
    return np.flatnonzero(taken)


def nearest(ends: IntArray, quota: Fraction, *, cap: int | None) -> int:
    """
    Return the index of the sum that is nearest to a quota, of two the lower, and never a sum of 0
    for a quota above 0.

    Args:
        ends: Sums, strictly ascending, the first at most the quota and the last at least it.
        quota: Sum that is asked for.
        cap: Sum not to exceed, at least the quota and the first sum above 0.

    >>> [nearest(np.array([0, 3, 9]), Fraction(7), cap=cap) for cap in (None, 8)]
    [2, 1]
    """
    index = int(np.searchsorted(ends, math.floor(quota), side="right")) - 1
    low = int(ends[index])
    if low == quota:
        return index
    high = int(ends[index + 1])
    is_nearer = low == 0 or high - quota < quota - low
    return index + (is_nearer and (cap is None or high <= cap))


def _ends(weights: IntArray) -> IntArray:
    """Return the sums of the first 0, 1, 2 … weights."""
    return np.concatenate([[0], np.cumsum(weights)])


def _repeated(size: int, num: int, bits: np.random.PCG64) -> IntArray:
    """Return *num* draws of the numbers below *size*, with replacement."""
    # The high half of the product is below size, and nearly uniform for sizes far below 2**64.
    return (bits.random_raw(num) >> np.uint64(32)).astype(np.int64) * size >> 32


def _repeated_tokens(lengths: IntArray, quota: Fraction, bits: np.random.PCG64) -> Iterator[IntArray]:
    """Yield draws with replacement until their tokens reach *quota*."""
    left, mean = quota, Fraction(int(lengths.sum()), len(lengths))
    while left > 0:
        drawn = _repeated(len(lengths), math.ceil(left / mean), bits)
        left -= int(lengths[drawn].sum())
        yield drawn
