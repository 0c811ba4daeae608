"""
Mixes of data sets: how many samples or tokens an epoch draws from each source, and which samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.config.run import PathText
from packplan.core.errors import Fault, counted
from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.shuffling import seeded_permutation

_MOST_DRAWS = 10**8
"""
Maximum number of samples that an epoch draws from a source with replacement, limited by memory.
"""


@attrs.frozen(kw_only=True)
class Source:
    """One data set of a mix. Exactly one of `ratio` and `count` is given."""

    jsonl: PathText
    """Data file, or a pattern of files."""

    ratio: Decimal | None = None
    """Share of this source, relative to all sources with a ratio, as an exact decimal."""

    count: int | None = None
    """Number of samples of this source in each epoch; sources with a ratio share the rest."""

    cap: int | None = None
    """
    Maximum number of samples of this source in an epoch, or of tokens with `by: tokens`. The other
    sources fill the rest, by their ratios.
    """

    replacement: bool = False
    """Whether a sample may be drawn more than once in an epoch."""


@attrs.frozen(kw_only=True)
class Mix:
    """Sources whose samples are drawn again each epoch, by ratio or count."""

    sources: tuple[Source, ...]
    """Data sets of the mix: at least one, and no file twice."""

    by: Literal["samples", "tokens"] = "samples"
    """Unit of the ratios and caps."""

    samples_per_epoch: int | None = None
    """
    Number of samples of all sources in an epoch. If unset, an epoch ends when the first source runs
    out. If no source can run out, an epoch has all samples within the caps.
    """

    tokens_per_epoch: int | None = None
    """Number of tokens of all sources in an epoch, with `by: tokens`."""

    @property
    def epoch_total(self) -> int | None:
        """
        Number of samples in an epoch, or of tokens if the mix is by tokens; None if the YAML gives
        no total.
        """
        return self.samples_per_epoch if self.by == "samples" else self.tokens_per_epoch


@attrs.frozen
class Mixes:
    """
    Mix of each epoch. The last mix is also used for all later epochs.

    >>> mixes = Mixes(tuple(Mix(sources=(Source(jsonl=name, count=1),)) for name in "ab"))
    >>> mixes.files, mixes.mix_of_epoch(0).sources[0].jsonl, mixes.mix_of_epoch(7).sources[0].jsonl
    (('a', 'b'), 'a', 'b')
    """

    entries: tuple[Mix, ...]
    """Mixes of the first epochs, in order; at least one."""

    is_curriculum: bool = attrs.field(default=True, kw_only=True)
    """
    Whether the YAML lists mixes under `curriculum:`. If so, the keys in faults start with
    `curriculum`.
    """

    def mix_of_epoch(self, epoch: int) -> Mix:
        """Return the mix of *epoch*, counted from 0."""
        return self.entries[min(epoch, len(self.entries) - 1)]

    @property
    def files(self) -> tuple[str, ...]:
        """Distinct data files of all mixes, in the order in which they are first named."""
        return tuple(dict.fromkeys(source.jsonl for mix in self.entries for source in mix.sources))

    @property
    def file_keys(self) -> dict[str, str]:
        """Data file -> the first YAML key that names it."""
        named = [(entry, *one) for entry, mix in enumerate(self.entries) for one in enumerate(mix.sources)]
        return {one.jsonl: f"{self.key_prefix(entry)}sources[{number}].jsonl" for entry, number, one in named[::-1]}

    def key_prefix(self, entry: int) -> str:
        """Return the prefix that the keys of mix *entry* have in the YAML."""
        return f"curriculum[{entry}]." if self.is_curriculum else ""


def quotas(mix: Mix, available: Sequence[int]) -> list[Fraction]:
    """
    Return the number of samples to draw from each source, or of tokens if the mix is by tokens.

    Numbers of samples are whole: shares with the largest fractional parts are rounded up, and all
    others down. Of equal fractional parts, those of the first sources are rounded up first. Numbers
    of tokens are exact fractions.

    Args:
        mix: A mix whose values have no faults.
        available: Number of samples of each source, or of tokens if the mix is by tokens.

    >>> from decimal import Decimal
    >>> from packplan.core.mixes import Source
    >>> sources = (Source(jsonl="a", ratio=Decimal(3)), Source(jsonl="b", ratio=Decimal(1)))
    >>> [int(quota) for quota in quotas(Mix(sources=sources), [300, 70])]
    [210, 70]
    """
    counts = [Fraction(source.count or 0) for source in mix.sources]
    ratios = [Fraction(source.ratio or 0) for source in mix.sources]
    caps = [source.cap for source in mix.sources]
    if mix.epoch_total is not None:
        total = max(Fraction(0), mix.epoch_total - sum(counts, Fraction(0)))
    else:
        total = _max_total(mix, available, ratios, caps)
        total = Fraction(int(total)) if mix.by == "samples" else total
    exact = _exact_shares(total, ratios, caps)
    if mix.by == "tokens":
        return exact
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in by_remainder[: int(sum(exact)) - sum(whole)]:
        whole[number] += 1
    return [quota + count for quota, count in zip(whole, counts, strict=True)]


def _max_total(mix: Mix, available: Sequence[int], ratios: Sequence[Fraction], caps: Sequence[int | None]) -> Fraction:
    """
    Return the largest total at which no source with a ratio runs out. If no source can run out,
    return the total of all samples of these sources, within the caps.
    """
    sized = list(zip(mix.sources, available, ratios, caps, strict=True))
    levels = [
        size / ratio
        for source, size, ratio, cap in sized
        if ratio and not source.replacement and (cap is None or cap > size)
    ]
    if levels:
        return sum((_cap_share(min(levels) * ratio, cap) for ratio, cap in zip(ratios, caps, strict=True)), Fraction(0))
    return Fraction(sum(int(_cap_share(Fraction(size), cap)) for _, size, ratio, cap in sized if ratio))


def _exact_shares(total: Fraction, ratios: Sequence[Fraction], caps: Sequence[int | None]) -> list[Fraction]:
    """
    Divide a total into shares by ratio, each limited by its cap, as exact fractions. If caps limit
    all shares, their sum is below the total.
    """
    shares = [Fraction(0)] * len(ratios)
    free = {number for number, ratio in enumerate(ratios) if ratio}
    while free:
        level = (total - sum(shares)) / sum(ratios[number] for number in free)
        wanted = {number: level * ratios[number] for number in free}
        full = {number for number in free if _cap_share(wanted[number], caps[number]) < wanted[number]}
        for number in full or free:
            shares[number] = _cap_share(wanted[number], caps[number])
        free = free - full if full else set()
    return shares


def _cap_share(share: Fraction, cap: int | None) -> Fraction:
    return share if cap is None else min(share, Fraction(cap))


Seed = tuple[int, int, int]
"""Seed of the run, number of the epoch, and index of the source in its mix."""


@attrs.frozen(eq=False)
class Pool:
    """Samples of one source that can be drawn; arrays have shape (num_samples,)."""

    source: Source

    indices: IntArray
    """Indices of the samples, counted over the records of all files, ascending."""

    lengths: IntArray
    """Number of tokens of each sample, >= 1."""

    def available(self, mix: Mix) -> int:
        """
        Return the number of samples that can be drawn, or of tokens if the *mix* is by tokens.
        """
        return len(self.indices) if mix.by == "samples" else int(self.lengths.sum())


def source_pools(mix: Mix, mixes: Mixes, lengths: IntArray, sizes: Sequence[int]) -> list[Pool]:
    """
    Return the pool of each source of a mix.

    Args:
        mix: An entry of *mixes*.
        mixes: Mixes of all epochs.
        lengths: Number of tokens of each record of `mixes.files`, 0 if the record cannot be drawn.
        sizes: Number of records in each file.
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


def draw_in_order(mixes: Mixes, sizes: Sequence[int], *, seed: int, epoch: int) -> IntArray:
    """
    Draw the records of one epoch of a mix by samples. Return their indices in the order of
    training; int64.

    Args:
        mixes: Mixes in which `mixes_faults` and `stream_faults` find no fault.
        sizes: Number of records in each file of `mixes.files`.
        seed: Seed of the draws and of the order, from 0.
        epoch: Number of the epoch, from 0. Each epoch has its own draw and order.
    """
    mix = mixes.mix_of_epoch(epoch)
    files = [mixes.files.index(source.jsonl) for source in mix.sources]
    wanted = [int(quota) for quota in quotas(mix, [sizes[file] for file in files])]
    drawn = [
        sum(sizes[:file])
        + (
            _draw_with_replacement(sizes[file], quota, np.random.PCG64((seed, epoch, number)))
            if source.replacement
            else seeded_permutation(sizes[file], seed=(seed, epoch, number))[:quota]
        )
        for number, (source, file, quota) in enumerate(zip(mix.sources, files, wanted, strict=True))
    ]
    return np.concatenate(drawn)[seeded_permutation(sum(wanted), seed=(seed, epoch, len(wanted)))]


def select_records(mixes: Mixes, lengths: Lengths, sizes: Sequence[int], *, seed: int, epoch: int) -> IntArray:
    """
    Draw the records of one epoch. Return their indices, ascending; int64.

    An index is repeated if the record was drawn more than once (with replacement).

    If the mix is by samples and every record can be drawn, `draw_in_order` draws the same records.

    Args:
        mixes: Mixes in which `mixes_faults` and `measured_mixes_faults` find no fault.
        lengths: Number of tokens of each record of `mixes.files`, 0 if the record cannot be drawn.
        sizes: Number of records in each file.
        seed: Seed of the draws, from 0.
        epoch: Number of the epoch, from 0.
    """
    mix = mixes.mix_of_epoch(epoch)
    drawable = source_pools(mix, mixes, as_lengths(lengths, least=0), sizes)
    wanted = quotas(mix, [pool.available(mix) for pool in drawable])
    drawn = [
        pool.indices[_draw_positions(pool, mix, quota, (seed, epoch, number))]
        for number, (pool, quota) in enumerate(zip(drawable, wanted, strict=True))
    ]
    drawn.sort(key=lambda indices: indices[:1].tolist())
    return np.concatenate(drawn)


def _draw_positions(pool: Pool, mix: Mix, quota: Fraction, seed: Seed) -> IntArray:
    """
    Draw positions in a pool, so that their number of samples or tokens is nearest to the quota.
    Return the positions, ascending.
    """
    bits, size = np.random.PCG64(seed), len(pool.indices)
    if not pool.source.replacement and quota >= pool.available(mix):
        return np.arange(size)
    weights = pool.lengths if mix.by == "tokens" else np.ones_like(pool.lengths)
    if not pool.source.replacement:
        return select_lowest_keys(bits.random_raw(size), weights, quota, cap=pool.source.cap)
    if mix.by == "samples":
        return np.sort(_draw_with_replacement(size, int(quota), bits))
    drawn = np.concatenate(list(_draw_until_quota(weights, quota, bits)))
    ends = _running_sums(weights[drawn])
    return np.sort(drawn[: index_of_nearest_sum(ends, quota, cap=pool.source.cap)])


def select_lowest_keys(keys: NDArray[np.uint64], weights: IntArray, quota: Fraction, *, cap: int | None) -> IntArray:
    """
    Return the positions of the lowest keys whose weights add up to about *quota*.

    The positions ascend. At least one position is selected, unless the quota is 0.

    Among equal keys, lower positions come first. The time is linear for random keys. Only keys that
    share their highest 16 bits with the key at which the sum reaches the quota are sorted.

    Args:
        keys: Random key of each sample; shape (num_samples,).
        weights: Number of tokens of each sample, or 1 for each sample; shape (num_samples,).
        quota: Wanted sum of weights.
        cap: Maximum sum of weights, at least *quota* and the weight of the lowest key. None sets no
            limit.
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
    ends = int(weights[taken].sum()) + _running_sums(weights[inside])
    taken[inside[: index_of_nearest_sum(ends, quota, cap=cap)]] = True
    return np.flatnonzero(taken)


def index_of_nearest_sum(ends: IntArray, quota: Fraction, *, cap: int | None) -> int:
    """
    Return the index of the sum nearest to a quota. Of two equally near sums, the lower one counts.

    For a quota above 0, a sum of 0 is never chosen.

    Args:
        ends: Sums, strictly ascending. The first sum is at most *quota*, the last sum at least
            *quota*.
        quota: Wanted sum.
        cap: Maximum sum, at least *quota* and the first sum above 0. None sets no limit.

    >>> [index_of_nearest_sum(np.array([0, 3, 9]), Fraction(7), cap=cap) for cap in (None, 8)]
    [2, 1]
    """
    index = int(np.searchsorted(ends, math.floor(quota), side="right")) - 1
    low = int(ends[index])
    if low == quota:
        return index
    high = int(ends[index + 1])
    is_nearer = low == 0 or high - quota < quota - low
    return index + (is_nearer and (cap is None or high <= cap))


def _running_sums(weights: IntArray) -> IntArray:
    """Return the cumulative sums of weights, starting with 0."""
    return np.concatenate([[0], np.cumsum(weights)])


def _draw_with_replacement(size: int, num: int, bits: np.random.PCG64) -> IntArray:
    """Draw *num* positions below *size*, with replacement."""
    # The high half of each product is below size, and nearly uniform for sizes far below 2**32.
    return (bits.random_raw(num) >> np.uint64(32)).astype(np.int64) * size >> 32


def _draw_until_quota(lengths: IntArray, quota: Fraction, bits: np.random.PCG64) -> Iterator[IntArray]:
    """Yield arrays of positions, drawn with replacement until their tokens reach *quota*."""
    left, mean = quota, Fraction(int(lengths.sum()), len(lengths))
    while left > 0:
        drawn = _draw_with_replacement(len(lengths), math.ceil(left / mean), bits)
        left -= int(lengths[drawn].sum())
        yield drawn


def mixes_faults(mixes: Mixes, sizes: Sequence[int]) -> Iterator[Fault]:
    """
    Yield the faults of mixes that can be found before samples are measured.

    Args:
        mixes: Mixes of all epochs.
        sizes: Number of records in each file of `mixes.files`; 0 if the file is empty or missing.
    """
    if not mixes.entries:
        yield Fault("curriculum", "is empty: name at least one mix")
    size_of = dict(zip(mixes.files, sizes, strict=True))
    for entry, mix in enumerate(mixes.entries):
        own = [size_of[source.jsonl] for source in mix.sources]
        found = list(_value_faults(mix, own)) or list(_total_faults(mix))
        if not found and mix.by == "samples":
            found = list(_share_faults(mix, own)) or list(_draw_faults(mix, own, own))
        yield from _prefix_faults(mixes, entry, found)


def stream_faults(mixes: Mixes) -> Iterator[Fault]:
    """
    Yield a fault for each mix by tokens, which a stream cannot draw because it measures no lengths.
    """
    for entry, mix in enumerate(mixes.entries):
        if mix.by == "tokens":
            reason = "is tokens, which needs measured lengths, and a stream measures none: set it to samples"
            yield from _prefix_faults(mixes, entry, [Fault("by", reason)])


def measured_mixes_faults(mixes: Mixes, lengths: Lengths, sizes: Sequence[int], epochs: int) -> Iterator[Fault]:
    """
    Yield the faults of mixes that can be found only after samples are measured.

    Args:
        mixes: Mixes in which `mixes_faults` finds no fault.
        lengths: Number of tokens of each record of `mixes.files`, 0 if the record cannot be drawn.
        sizes: Number of records in each file.
        epochs: Number of trained epochs. Mixes of later epochs are not checked.
    """
    tokens = as_lengths(lengths, least=0)
    for entry, mix in enumerate(mixes.entries[:epochs]):
        drawable = source_pools(mix, mixes, tokens, sizes)
        found = list(_pool_faults(mix, drawable))
        if not found:
            least = [1 if mix.by == "samples" else int(pool.lengths.min()) for pool in drawable]
            available = [pool.available(mix) for pool in drawable]
            found = list(_share_faults(mix, available, least))
            found = found or list(_draw_faults(mix, available, [len(pool.indices) for pool in drawable]))
        yield from _prefix_faults(mixes, entry, found)


def _prefix_faults(mixes: Mixes, entry: int, found: Sequence[Fault]) -> Iterator[Fault]:
    for fault in found:
        yield attrs.evolve(fault, path=f"{mixes.key_prefix(entry)}{fault.path}")


def _value_faults(mix: Mix, sizes: Sequence[int]) -> Iterator[Fault]:
    """Yield the faults of a mix's values. *sizes* has the number of records of each source."""
    if not mix.sources:
        yield Fault("sources", "is empty: name at least one source")
    files = [source.jsonl for source in mix.sources]
    for number, (source, size) in enumerate(zip(mix.sources, sizes, strict=True)):
        path, first = f"sources[{number}]", files.index(source.jsonl)
        yield from _source_faults(mix, source, path)
        if first < number:
            yield Fault(f"{path}.jsonl", f"is {source.jsonl}, and so is sources[{first}].jsonl: name each file once")
        elif not size:
            yield Fault(path, f"({source.jsonl}) has no record: remove the source, or add records")
        elif source.count is not None and source.count > size and not source.replacement:
            reason = (
                f"is {source.count}, but {source.jsonl} has {counted(size, 'sample')}: lower it, or set replacement: "
                "true"
            )
            yield Fault(f"{path}.count", reason)
    other = "tokens" if mix.by == "samples" else "samples"
    if getattr(mix, f"{other}_per_epoch") is not None:
        yield Fault(f"{other}_per_epoch", f"is set, but the mix is by {mix.by}: set {mix.by}_per_epoch instead")
    if mix.epoch_total is not None and mix.epoch_total < 1:
        yield Fault(f"{mix.by}_per_epoch", f"is {mix.epoch_total}, but has to be at least 1")


def _source_faults(mix: Mix, source: Source, path: str) -> Iterator[Fault]:
    """
    Yield the faults of a source's ratio, count and cap. *path* is the source's key in the YAML.
    """
    if (source.ratio is None) == (source.count is None):
        yield Fault(path, f"({source.jsonl}) needs either a ratio or a count")
    if source.ratio is not None and not (source.ratio.is_finite() and source.ratio > 0):
        yield Fault(f"{path}.ratio", f"is {source.ratio}, but has to be above 0")
    if source.count is not None and source.count < 1:
        yield Fault(f"{path}.count", f"is {source.count}, but has to be at least 1")
    if source.count is not None and mix.by == "tokens":
        yield Fault(f"{path}.count", "is a number of samples, but the mix is by tokens: set a ratio, and perhaps a cap")
    if source.cap is not None and source.cap < 1:
        yield Fault(f"{path}.cap", f"is {source.cap}, but has to be at least 1")
    if source.cap is not None and source.count is not None:
        yield Fault(f"{path}.cap", "limits a source with a ratio, but this one has a count: remove cap or count")


def _total_faults(mix: Mix) -> Iterator[Fault]:
    """Yield the faults of a mix's total. The values of the mix must have no faults."""
    fixed, wanted, key = sum(source.count or 0 for source in mix.sources), mix.epoch_total, f"{mix.by}_per_epoch"
    if wanted is None:
        return
    if wanted < fixed:
        yield Fault(key, f"is {wanted}, but the counts of the sources add up to {fixed}: raise it")
    elif wanted != fixed and all(source.count for source in mix.sources):
        yield Fault(key, f"is {wanted}, but the counts add up to {fixed}, and no source has a ratio: remove it")
    elif (most := sum(quotas(mix, []))) < wanted:
        yield Fault(key, f"is {wanted}, but the caps of the sources add up to {most}: lower it, or raise a cap")


def _pool_faults(mix: Mix, drawable: Sequence[Pool]) -> Iterator[Fault]:
    """Yield a fault for each source that has no sample, or a sample above its cap."""
    for number, pool in enumerate(drawable):
        path, file, cap = f"sources[{number}]", pool.source.jsonl, pool.source.cap
        longest = int(pool.lengths.max(initial=0))
        if not longest:
            yield Fault(path, f"({file}) has no sample to draw, since all are bad or too long: remove the source")
        elif mix.by == "tokens" and cap is not None and cap < longest:
            yield Fault(f"{path}.cap", f"is {cap}, but the longest sample of {file} has {longest:,} tokens: raise it")


def _draw_faults(mix: Mix, available: Sequence[int], samples: Sequence[int]) -> Iterator[Fault]:
    """
    Yield a fault for each source with more draws in an epoch than memory allows (`_MOST_DRAWS`).

    *available* has the number of samples or tokens of each source, in the unit of the mix.
    *samples* has the number of samples of each source.
    """
    found = zip(mix.sources, available, samples, quotas(mix, available), strict=True)
    for number, (source, size, num, quota) in enumerate(found):
        if (draws := int(quota / size * num)) > _MOST_DRAWS and source.replacement:
            key = "its count" if source.count else f"{mix.by}_per_epoch"
            reason = f"({source.jsonl}) would be drawn {draws:,} times an epoch, above the limit of {_MOST_DRAWS:,}"
            yield Fault(f"sources[{number}]", f"{reason}: lower {key}")


def _share_faults(mix: Mix, available: Sequence[int], least: Sequence[int] | None = None) -> Iterator[Fault]:
    """
    Yield a fault for each source whose share is less than one sample, or more than the source has.

    The values, the total and the pools of the mix must have no faults. *available* has the number
    of samples or tokens of each source. *least* has the number of samples or tokens of the source's
    shortest sample.
    """
    unit, least = mix.by.removesuffix("s"), least or [1] * len(available)
    found = zip(mix.sources, available, quotas(mix, available), least, strict=True)
    for number, (source, size, quota, shortest) in enumerate(found):
        if quota < shortest:
            reason = "of 0 samples" if mix.by == "samples" else f"below its shortest sample ({counted(shortest, unit)})"
            key = "its ratio" if mix.epoch_total is None else f"{mix.by}_per_epoch"
            yield Fault(f"sources[{number}]", f"({source.jsonl}) has a share {reason} in an epoch: raise {key}")
        elif quota > size and not source.replacement:
            reason = f"({source.jsonl}) has {counted(size, unit)}, but its share is {round(quota):,}"
            yield Fault(f"sources[{number}]", f"{reason}: set replacement: true, or a cap")
