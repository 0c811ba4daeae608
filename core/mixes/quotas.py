"""
Samples or tokens of each source in an epoch.

A source with a ratio gets `min(cap, level * ratio)`. The level is the same for all of them, and
follows from the total of the epoch, or from the first source that runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from packplan.core.mixes.mixes import Mix


def quotas(mix: Mix, available: Sequence[int]) -> list[Fraction]:
    """
    Return the samples of each source in an epoch, or its tokens if the mix is by tokens.

    Samples are whole numbers, each within one sample of the exact share: largest remainders come
    first, of equal ones the first source. Tokens are exact shares.

    Args:
        mix: A mix without faults in its values.
        available: Samples or tokens of each source.

    >>> from decimal import Decimal
    >>> from packplan.core.mixes.mixes import Source
    >>> sources = (Source(jsonl="a", ratio=Decimal(3)), Source(jsonl="b", ratio=Decimal(1)))
    >>> [int(quota) for quota in quotas(Mix(sources=sources), [300, 70])]
    [210, 70]
    """
    counts = [Fraction(source.count or 0) for source in mix.sources]
    ratios = [Fraction(source.ratio or 0) for source in mix.sources]
    caps = [source.cap for source in mix.sources]
    if mix.per_epoch is not None:
        total = max(Fraction(0), mix.per_epoch - sum(counts, Fraction(0)))
    else:
        total = _most(mix, available, ratios, caps)
        total = Fraction(int(total)) if mix.by == "samples" else total
    exact = _shares(total, ratios, caps)
    if mix.by == "tokens":
        return exact
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in by_remainder[: int(sum(exact)) - sum(whole)]:
        whole[number] += 1
    return [quota + count for quota, count in zip(whole, counts, strict=True)]


def _most(mix: Mix, available: Sequence[int], ratios: Sequence[Fraction], caps: Sequence[int | None]) -> Fraction:
    """Return the total of the sources with a ratio when the first of them runs out."""
    sized = list(zip(mix.sources, available, ratios, caps, strict=True))
    levels = [
        size / ratio
        for source, size, ratio, cap in sized
        if ratio and not source.replacement and (cap is None or cap > size)
    ]
    if levels:
        return sum((_capped(min(levels) * ratio, cap) for ratio, cap in zip(ratios, caps, strict=True)), Fraction(0))
    return Fraction(sum(int(_capped(Fraction(size), cap)) for _, size, ratio, cap in sized if ratio))


def _shares(total: Fraction, ratios: Sequence[Fraction], caps: Sequence[int | None]) -> list[Fraction]:
    """Return the exact shares of a total; less than it where the caps of all sources are."""
    shares = [Fraction(0)] * len(ratios)
    free = {number for number, ratio in enumerate(ratios) if ratio}
    while free:
        level = (total - sum(shares)) / sum(ratios[number] for number in free)
        wanted = {number: level * ratios[number] for number in free}
        full = {number for number in free if _capped(wanted[number], caps[number]) < wanted[number]}
        for number in full or free:
            shares[number] = _capped(wanted[number], caps[number])
        free = free - full if full else set()
    return shares


def _capped(share: Fraction, cap: int | None) -> Fraction:
    return share if cap is None else min(share, Fraction(cap))
