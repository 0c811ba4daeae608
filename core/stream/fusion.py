"""
Mixing of several data sets: the samples of each source in an epoch, and their order.

A mixed epoch follows from the sources, the seed and the epoch alone. Ratios are exact to within one
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction

import attrs
import numpy as np

from packplan.core.config import PathText
from packplan.core.errors import Fault, counted
from packplan.core.lengths import IntArray
from packplan.core.shuffling import shuffled

Order = Callable[[int], IntArray]
"""Epoch -> indices of samples, in order."""


@attrs.frozen(kw_only=True)
class Source:
    """One data set of a mix. Exactly one of `ratio` and `count` is given."""

    jsonl: PathText
    """Data file, which also names the source."""

    ratio: Decimal | None = None
    """Share of the source among those with a ratio, as the decimal that is written."""

    count: int | None = None
    """Samples of the source in each epoch."""

    replacement: bool = False
    """Whether a sample may be drawn more than once in an epoch."""


@attrs.frozen(kw_only=True)
class Mix:
    """Several data sets, mixed again each epoch."""

    sources: tuple[Source, ...]
    """The data sets; at least one."""

    samples_per_epoch: int | None = None
    """
    Samples of all sources together in an epoch. If unset, the first source to run out limits them.
    If all are drawn with replacement, it is the number of all their samples.
    """


@attrs.frozen(eq=False)
class Schedule:
    """The samples of an epoch, in order; arrays of shape (num_samples,)."""

    source: IntArray
    """Index of the source."""

    index: IntArray
    """Index of the sample in its source."""

    def __len__(self) -> int:
        return int(self.source.size)


def mix_faults(mix: Mix, sizes: Sequence[int]) -> Iterator[Fault]:
    """Yield the faults of a mix of sources of these *sizes*, in samples."""
    if not mix.sources:
        yield Fault("sources", "is empty: name at least one")
    for number, (source, size) in enumerate(zip(mix.sources, sizes, strict=True)):
        path = f"sources[{number}]"
        if (source.ratio is None) == (source.count is None):
            yield Fault(path, f"({source.jsonl}) needs either a ratio or a count")
        if source.ratio is not None and not (source.ratio.is_finite() and source.ratio > 0):
            yield Fault(f"{path}.ratio", f"is {source.ratio}, but has to be above 0")
        if source.count is not None and source.count < 1:
            yield Fault(f"{path}.count", f"is {source.count}, but has to be at least 1")
        if not size:
            yield Fault(path, f"({source.jsonl}) has no record")
        elif source.count is not None and source.count > size and not source.replacement:
            reason = (
                f"is {source.count}, but {source.jsonl} has {counted(size, 'sample')}: lower it, or set replacement: "
                "true"
            )
            yield Fault(f"{path}.count", reason)
    if mix.samples_per_epoch is not None and mix.samples_per_epoch < 1:
        yield Fault("samples_per_epoch", f"is {mix.samples_per_epoch}, but has to be at least 1")


def share_faults(mix: Mix, sizes: Sequence[int]) -> Iterator[Fault]:
    """
    Yield the faults of the shares of a mix without other faults. Every source has a sample, and
    none runs out.
    """
    fixed, wanted = sum(source.count or 0 for source in mix.sources), mix.samples_per_epoch
    if wanted is not None and wanted < fixed:
        yield Fault("samples_per_epoch", f"is {wanted}, but the counts alone are {fixed}: raise it")
    elif wanted is not None and wanted != fixed and all(source.count for source in mix.sources):
        yield Fault(
            "samples_per_epoch", f"is {wanted}, but the counts are {fixed}, and no source has a ratio: remove it"
        )
    for number, (source, size, quota) in enumerate(zip(mix.sources, sizes, quotas(mix, sizes), strict=True)):
        path = f"sources[{number}]"
        if not quota:
            yield Fault(
                path, f"({source.jsonl}) has a share of no sample in an epoch: raise its ratio, or samples_per_epoch"
            )
        elif quota > size and not source.replacement:
            yield Fault(
                path, f"({source.jsonl}) has {counted(size, 'sample')}, but its share is {quota}: set replacement: true"
            )


def quotas(mix: Mix, sizes: Sequence[int]) -> list[int]:
    """
    Return the number of samples of each source in an epoch.

    Sources with a count have that number. Those with a ratio share the rest of `samples_per_epoch`,
    each to within one sample of its exact share. Largest remainders come first, of equal ones the
    first source. Without `samples_per_epoch` the first source to run out limits the number. If all
    are drawn with replacement, it is the number of all their samples.

    Args:
        mix: A mix without `mix_faults`.
        sizes: Samples of each source.

    >>> sources = (Source(jsonl="a", ratio=Decimal(3)), Source(jsonl="b", ratio=Decimal(1)))
    >>> quotas(Mix(sources=sources), [300, 70])
    [210, 70]
    """
    counts = [source.count or 0 for source in mix.sources]
    ratios = [Fraction(source.ratio or 0) for source in mix.sources]
    if not any(ratios):
        return counts
    shares = [ratio / sum(ratios) for ratio in ratios]
    total = _shared(mix, sizes, shares, sum(counts))
    exact = [share * total for share in shares]
    wanted = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda number: wanted[number] - exact[number])
    for number in by_remainder[: total - sum(wanted)]:
        wanted[number] += 1
    return [quota + count for quota, count in zip(wanted, counts, strict=True)]


def schedule(mix: Mix, sizes: Sequence[int], *, seed: int, epoch: int) -> Schedule:
    """
    Return the samples of an epoch, in order.

    Args:
        mix: A mix without `mix_faults` and `share_faults`.
        sizes: Samples of each source.
        seed: Seed of draws and order, from 0.
        epoch: Epoch, from 0. Each has its own draw and order.
    """
    wanted = quotas(mix, sizes)
    drawn = [
        _drawn(size, quota, replacement=source.replacement, seed=(seed, epoch, number))
        for number, (source, size, quota) in enumerate(zip(mix.sources, sizes, wanted, strict=True))
    ]
    source = np.repeat(np.arange(len(wanted)), wanted)
    order = shuffled(source.size, seed=(seed, epoch, len(wanted)))
    return Schedule(source[order], np.concatenate(drawn)[order])


def _shared(mix: Mix, sizes: Sequence[int], shares: Sequence[Fraction], counted: int) -> int:
    """Return the number of samples of all sources with a ratio."""
    if mix.samples_per_epoch is not None:
        return max(0, mix.samples_per_epoch - counted)
    sized = [(size, share, source) for size, share, source in zip(sizes, shares, mix.sources, strict=True) if share]
    limits = [int(size / share) for size, share, source in sized if not source.replacement]
    return min(limits, default=sum(size for size, _, _ in sized))


def _drawn(size: int, quota: int, *, replacement: bool, seed: tuple[int, ...]) -> IntArray:
    if not replacement:
        return shuffled(size, seed=seed)[:quota]
    # The high half of the product is below size, and nearly uniform for sizes far below 2**64.
    raw = np.random.PCG64(seed).random_raw(quota)
    return (raw >> np.uint64(32)).astype(np.int64) * size >> 32
