"""Faults of mixes, each by its key in the YAML: those of the values, and those that data decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from packplan.core.errors import Fault, counted
from packplan.core.lengths import Lengths, as_lengths
from packplan.core.mixes.draw import Pool, pools
from packplan.core.mixes.mixes import Mix, Mixes, Source
from packplan.core.mixes.quotas import quotas

_MOST_DRAWS = 10**8
"""Samples that an epoch may draw from a source; with replacement, the data do not limit them."""


def mixes_faults(mixes: Mixes, sizes: Sequence[int]) -> Iterator[Fault]:
    """
    Yield the faults of mixes that show before samples are measured.

    Args:
        mixes: The curriculum.
        sizes: Records of each file of `mixes.files`; 0 for a file that has none, or is gone.
    """
    if not mixes.entries:
        yield Fault("curriculum", "is empty: name at least one mix")
    size_of = dict(zip(mixes.files, sizes, strict=True))
    for entry, mix in enumerate(mixes.entries):
        own = [size_of[source.jsonl] for source in mix.sources]
        found = list(_value_faults(mix, own)) or list(_total_faults(mix))
        if not found and mix.by == "samples":
            found = list(_share_faults(mix, own)) or list(_draw_faults(mix, own, own))
        yield from _placed(mixes, entry, found)


def stream_faults(mixes: Mixes) -> Iterator[Fault]:
    """Yield the faults of mixes that are drawn without measuring their samples."""
    for entry, mix in enumerate(mixes.entries):
        if mix.by == "tokens":
            reason = "is tokens, which only static plans count before they draw: set it to samples"
            yield from _placed(mixes, entry, [Fault("by", reason)])


def drawn_faults(mixes: Mixes, lengths: Lengths, sizes: Sequence[int], epochs: int) -> Iterator[Fault]:
    """
    Yield the faults of mixes that show when samples are measured.

    Args:
        mixes: Mixes without `mixes_faults`.
        lengths: Tokens of each record of `mixes.files`, 0 where it cannot be drawn.
        sizes: Records of each file.
        epochs: Number of epochs that are trained. Entries beyond them are not looked at.
    """
    tokens = as_lengths(lengths, least=0)
    for entry, mix in enumerate(mixes.entries[:epochs]):
        drawable = pools(mix, mixes, tokens, sizes)
        found = list(_pool_faults(mix, drawable))
        if not found:
            least = [1 if mix.by == "samples" else int(pool.lengths.min()) for pool in drawable]
            available = [pool.available(mix) for pool in drawable]
            found = list(_share_faults(mix, available, least))
            found = found or list(_draw_faults(mix, available, [len(pool.indices) for pool in drawable]))
        yield from _placed(mixes, entry, found)


def _placed(mixes: Mixes, entry: int, found: Sequence[Fault]) -> Iterator[Fault]:
    for fault in found:
        yield attrs.evolve(fault, path=f"{mixes.place(entry)}{fault.path}")


def _value_faults(mix: Mix, sizes: Sequence[int]) -> Iterator[Fault]:
    """Yield the faults of the values of a mix of sources of these *sizes*, in records."""
    if not mix.sources:
        yield Fault("sources", "is empty: name at least one")
    files = [source.jsonl for source in mix.sources]
    for number, (source, size) in enumerate(zip(mix.sources, sizes, strict=True)):
        path, first = f"sources[{number}]", files.index(source.jsonl)
        yield from _source_faults(mix, source, path)
        if first < number:
            yield Fault(f"{path}.jsonl", f"is {source.jsonl}, as sources[{first}].jsonl is: name each file once")
        elif not size:
            yield Fault(path, f"({source.jsonl}) has no record: remove it, or add records")
        elif source.count is not None and source.count > size and not source.replacement:
            reason = (
                f"is {source.count}, but {source.jsonl} has {counted(size, 'sample')}: lower it, or set replacement: "
                "true"
            )
            yield Fault(f"{path}.count", reason)
    other = "tokens" if mix.by == "samples" else "samples"
    if getattr(mix, f"{other}_per_epoch") is not None:
        yield Fault(f"{other}_per_epoch", f"is set, but the mix is by {mix.by}: set {mix.by}_per_epoch instead")
    if mix.per_epoch is not None and mix.per_epoch < 1:
        yield Fault(f"{mix.by}_per_epoch", f"is {mix.per_epoch}, but has to be at least 1")


def _source_faults(mix: Mix, source: Source, path: str) -> Iterator[Fault]:
    """Yield the faults of the share of a source at this *path*."""
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
        yield Fault(f"{path}.cap", "limits what a ratio gives, but the source has a count: remove one")


def _total_faults(mix: Mix) -> Iterator[Fault]:
    """Yield the faults of the total of a mix whose values have none."""
    fixed, wanted, key = sum(source.count or 0 for source in mix.sources), mix.per_epoch, f"{mix.by}_per_epoch"
    if wanted is None:
        return
    if wanted < fixed:
        yield Fault(key, f"is {wanted}, but the counts alone are {fixed}: raise it")
    elif wanted != fixed and all(source.count for source in mix.sources):
        yield Fault(key, f"is {wanted}, but the counts are {fixed}, and no source has a ratio: remove it")
    elif (most := sum(quotas(mix, []))) < wanted:
        yield Fault(key, f"is {wanted}, but no source takes more than its cap, {most} in all: lower it, or raise a cap")


def _pool_faults(mix: Mix, drawable: Sequence[Pool]) -> Iterator[Fault]:
    """Yield the faults of sources that have no sample, or one that passes their cap alone."""
    for number, pool in enumerate(drawable):
        path, file, cap = f"sources[{number}]", pool.source.jsonl, pool.source.cap
        longest = int(pool.lengths.max(initial=0))
        if not longest:
            yield Fault(path, f"({file}) has no sample to draw, since all its records are bad or too long: remove it")
        elif mix.by == "tokens" and cap is not None and cap < longest:
            yield Fault(f"{path}.cap", f"is {cap}, but the longest sample of {file} has {longest:,} tokens: raise it")


def _draw_faults(mix: Mix, available: Sequence[int], samples: Sequence[int]) -> Iterator[Fault]:
    """
    Yield the faults of sources that are drawn from more often than memory holds.

    *available* are samples or tokens of each source, and *samples* always samples.
    """
    found = zip(mix.sources, available, samples, quotas(mix, available), strict=True)
    for number, (source, size, num, quota) in enumerate(found):
        if (draws := int(quota / size * num)) > _MOST_DRAWS and source.replacement:
            key = "its count" if source.count else f"{mix.by}_per_epoch"
            reason = f"({source.jsonl}) would be drawn from {draws:,} times in an epoch, above {_MOST_DRAWS:,}"
            yield Fault(f"sources[{number}]", f"{reason}: lower {key}")


def _share_faults(mix: Mix, available: Sequence[int], least: Sequence[int] | None = None) -> Iterator[Fault]:
    """
    Yield the faults of the shares of a mix without other faults. Every source has a sample, and
    none runs out.

    *available* are samples or tokens of each source, and *least* those of its shortest sample.
    """
    unit, least = mix.by.removesuffix("s"), least or [1] * len(available)
    found = zip(mix.sources, available, quotas(mix, available), least, strict=True)
    for number, (source, size, quota, shortest) in enumerate(found):
        if quota < shortest:
            reason = "of no sample" if mix.by == "samples" else f"below its shortest sample ({counted(shortest, unit)})"
            key = "its ratio" if mix.per_epoch is None else f"{mix.by}_per_epoch"
            yield Fault(f"sources[{number}]", f"({source.jsonl}) has a share {reason} in an epoch: raise {key}")
        elif quota > size and not source.replacement:
            reason = f"({source.jsonl}) has {counted(size, unit)}, but its share is {round(quota):,}"
            yield Fault(f"sources[{number}]", f"{reason}: set replacement: true, or a cap")
