"""
Inspection of plans: figures of a plan and of its training, and the pack and step of a sample.

The commands print these figures. A script can compute the same figures from a list of lengths:

    plan = build_raw_plan(lengths, packing_length=8192)
    summarise(plan, lengths)
    summarise_schedule(plan, lengths, EpochSchedule.from_plan(aligned, …))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, counted, fit_lines, format_lines, verb_for
from packplan.core.lengths import IntArray, Lengths, as_lengths
from packplan.core.metrics import padded_positions
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packs import Packs, filled_tokens
from packplan.core.patterns.certificate import BoundKind
from packplan.core.plan import RawPlan, unsupervised_samples
from packplan.core.samples.tables import (
    MEDIA_COLUMNS,
    BadRecord,
    DataFile,
    MediaTable,
    Table,
    column,
    num_media,
    sample_indices,
)
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats
from packplan.core.work.model import SampleWorks

BOUNDS: Mapping[BoundKind, str] = MappingProxyType(
    {"quick": "a quick bound", "relaxation": "a linear relaxation's bound", "reached": "a bound that a packing reaches"}
)
"""Kind of lower bound -> its name in tables."""


_PLAN_FIELDS = (
    "packing_length", "lower_bound", "bound_kind", "auto_packs", "num_samples", "planned_samples", "dropped_samples",
    "num_tokens", "planned_tokens", "long_tokens", "skipped_tokens", "dropped_tokens",
)  # fmt: skip
"""Fields of `PlanSummary` that are copied from attributes of the plan with the same names."""

MOST_NAMED = 5
"""Maximum number of bad records that a message names; `packplan plan show --all` lists all."""

_MOST = 0.5
"""
Share of samples longer than a pack above which a warning says that the packing length is too short.
"""

QUANTILES = (5, 50, 95)
"""Percentiles of the sample lengths that tables show."""


@attrs.frozen
class PlanSummary:
    """Figures of a raw plan, which do not depend on the number of ranks."""

    packing_length: int
    """Maximum number of tokens in a pack of several samples."""

    num_packs: int

    lower_bound: int
    """
    Lower bound on the number of packs, dropped packs included: no plan of these samples has fewer.
    """

    bound_kind: BoundKind
    """Method that found the lower bound."""

    gap: float | None
    """
    Number of packs above the lower bound, dropped packs included, divided by the bound; None
    without packing.
    """

    auto_packs: int
    """
    Approximate number of packs with the algorithm `auto`; 0 if `auto` saves at most 0.2 % or was
    not compared.
    """

    num_samples: int
    """Number of samples in the data set: planned, dropped and skipped samples together."""

    planned_samples: int

    long_samples: int
    """
    Number of long samples that are packs by themselves. Planned samples include these samples.
    """

    skipped_samples: int
    """Number of long samples that are skipped, so that they are in no pack."""

    dropped_samples: int
    """Number of samples in packs that the fill filter drops."""

    num_tokens: int
    planned_tokens: int
    long_tokens: int
    skipped_tokens: int
    dropped_tokens: int

    supervised_tokens: int | None
    """
    Number of planned tokens that the loss counts, whatever their weight; None if not measured.
    """

    unsupervised_samples: int | None
    """Number of planned samples without a supervised token; None if not measured."""

    dropped_packs: int
    """Number of packs that the fill filter drops."""

    longest_pack: int
    """Number of tokens of the longest pack."""

    oversized_packs: int
    """
    Number of packs of more than 1.1 times the packing length. Each of these packs is one long
    sample.
    """

    token_coverage: float
    """Planned tokens divided by all tokens."""

    samples_per_pack: float
    """Mean number of samples in a pack."""

    fill_mean: float | None
    """Mean fill of the packs; None without packing. The pack of a long sample counts as full."""

    fill_p5: float | None
    """Fill that 95 % of the packs reach or exceed; None without packing."""

    fill_worst: float | None

    padding_saved: float | None
    """
    Estimated share of token positions that packing saves, compared with random padded batches that
    have as many samples as a mean pack. None without packing.
    """


@attrs.frozen
class ScheduleSummary:
    """
    Figures of an epoch and of the whole run for one number of ranks.

    In an evaluation, a step is one forward pass of each rank.
    """

    world_size: int

    packs_per_rank: int
    """
    Number of packs that each rank computes in an epoch. A shared pack counts on each of its ranks.
    """

    packs_by_degree: Mapping[str, int]
    """Degree, written as text -> number of packs with this degree."""

    rank_tokens: int
    """Maximum number of tokens of one pack that a single rank computes."""

    repeated_packs: int
    """
    Number of packs that are repeated to fill all ranks. A shared pack counts once for each of its
    ranks.
    """

    unaligned_packs: int
    """
    Number of packs that every epoch drops at the end, because they do not fill all ranks. A shared
    pack counts once for each of its ranks.
    """

    gradient_accumulation_steps: int
    """Number of batches of a rank in one optimizer step."""

    effective_batch_size: int
    """Number of packs in one optimizer step over all ranks; samples without packing."""

    steps_per_epoch: int
    total_steps: int

    last_step_batches: int
    """
    Number of batches of a rank in the last step of an epoch, at most `gradient_accumulation_steps`.
    """

    work_per_step: float
    """
    Work of a step, summed over all ranks and averaged over the steps of the measured epoch. The
    unit is FLOPs if the model's work is known. If it is unknown, work is the sum of squared sample
    lengths, or of squared padded lengths without packing.
    """

    work_imbalance: float
    """
    Work of the busiest rank divided by the mean work of all ranks, averaged over the steps of the
    measured epoch. The value is 1 if all ranks have equal work.
    """

    worst_work_imbalance: float
    """Largest work imbalance of a single step in the measured epoch."""

    microbatch_imbalance: float
    """
    Work of the busiest rank in each microbatch, summed over the measured epoch, divided by the sum
    of the mean work of all ranks.
    """


def summarise(
    plan: RawPlan, lengths: Lengths, *, packed: bool = True, supervised: Lengths | None = None
) -> PlanSummary:
    """
    Compute the figures of a plan.

    Args:
        plan: Plan of samples with these lengths.
        lengths: Number of tokens of each record, 0 for a record that is not a sample.
        packed: Whether samples share packs. If false, each sample is a pack.
        supervised: Number of supervised tokens of each record; None if they were not measured.

    >>> from packplan.core.plan import build_raw_plan
    >>> lengths = [60, 20, 50, 30, 40, 40]
    >>> summarise(build_raw_plan(lengths, packing_length=80), lengths).fill_mean
    1.0
    """
    array = as_lengths(lengths, least=0)
    samples_per_pack = plan.planned_samples / len(plan.packs)
    loads = plan.packs.loads(array)
    gap = mean = p5 = worst = saved = None
    if packed:
        fills = np.divide(filled_tokens(loads, plan.packing_length), plan.packing_length)
        mean, p5, worst = plan.fill, float(np.percentile(fills, 5, method="lower")), float(fills.min())
        gap = (len(plan.packs) + len(plan.dropped_packs) - plan.lower_bound) / plan.lower_bound
        batch_size = max(1, round(samples_per_pack))
        saved = 1 - plan.planned_tokens / padded_positions(array[plan.packs.indices], batch_size=batch_size)
    return PlanSummary(
        **{name: getattr(plan, name) for name in _PLAN_FIELDS},
        num_packs=len(plan.packs), gap=gap, long_samples=len(plan.single_long), skipped_samples=len(plan.skipped_long),
        supervised_tokens=None if supervised is None else int(np.asarray(supervised)[plan.packs.indices].sum()),
        unsupervised_samples=None if supervised is None else unsupervised_samples(plan, supervised).size,
        dropped_packs=len(plan.dropped_packs), longest_pack=int(loads.max()),
        # Integer arithmetic, because 1.1 has no exact binary fraction.
        oversized_packs=int((loads * 10 > plan.packing_length * 11).sum()),
        token_coverage=plan.planned_tokens / plan.num_tokens, samples_per_pack=samples_per_pack,
        fill_mean=mean, fill_p5=p5, fill_worst=worst, padding_saved=saved,
    )  # fmt: skip


def summarise_schedule(
    plan: RawPlan,
    lengths: Lengths,
    schedule: EpochSchedule,
    *,
    packed: bool = True,
    works: SampleWorks | None = None,
    epoch: int = 0,
) -> ScheduleSummary:
    """
    Compute the figures of training a plan with a schedule.

    Args:
        plan: Plan of samples with these lengths.
        lengths: Number of tokens of each record, 0 for a record that is not a sample.
        schedule: Schedule of the plan's packs, starting at the first step.
        packed: Whether samples share packs. If false, each sample is padded to the longest sample
            of its batch.
        works: Work of each sample; None uses squared lengths.
        epoch: Epoch whose assignment of packs to ranks is measured, from 0.
    """
    aligned = schedule.packs_per_epoch
    array = as_lengths(lengths, least=0)
    pack_stats = PackStats.from_plan(plan, array, packed=packed, works=works)
    stats = EpochStats.from_schedule(pack_stats, schedule, epoch)
    steps, degrees = schedule.steps_per_epoch, schedule.pack_degrees(epoch)
    per_step = stats.step_works(0, steps)
    imbalances = per_step.max(axis=1) / per_step.mean(axis=1)
    accumulation = schedule.gradient_accumulation_steps
    return ScheduleSummary(
        world_size=schedule.world_size, packs_per_rank=aligned // schedule.world_size,
        packs_by_degree=count_degrees(degrees), rank_tokens=int((-(-pack_stats.tokens // degrees)).max()),
        repeated_packs=max(0, aligned - int(degrees.sum())), unaligned_packs=max(0, int(degrees.sum()) - aligned),
        gradient_accumulation_steps=accumulation,
        effective_batch_size=schedule.world_size * schedule.batch_size * accumulation,
        steps_per_epoch=schedule.steps_per_epoch, total_steps=schedule.total_steps,
        last_step_batches=schedule.batches_per_epoch % accumulation or accumulation,
        work_per_step=float(per_step.sum(axis=1).mean()), work_imbalance=float(imbalances.mean()),
        worst_work_imbalance=float(imbalances.max()), microbatch_imbalance=stats.microbatch_imbalance(0, steps),
    )  # fmt: skip


def describe_training(
    plan: RawPlan, lengths: Lengths, schedule: EpochSchedule, *, packed: bool = True, unit: str = "rank"
) -> dict[str, str]:
    """
    Return a table of the data, the packs, the steps and the left-out samples: row name -> text.

    Args:
        plan: Plan of samples with these lengths, or the plan of one epoch if each epoch has its
            own.
        lengths: Number of tokens of each record, 0 for a record that is not a sample.
        schedule: Schedule of the plan.
        packed: Whether samples share packs. If false, each sample is a pack.
        unit: Noun for the unit that computes a pack, such as `rank` or the name of a group of
            ranks.
    """
    long, limit, size = list(plan.single_long) if packed else [], plan.packing_length, schedule.batch_size
    held, left_out = "none: samples are trained in padded batches", []
    if packed:
        fewest, total = plan.lower_bound, len(plan.packs) + len(plan.dropped_packs)
        needed = f"no plan has fewer than {counted(fewest, 'pack')}{' in all' * bool(plan.dropped_packs)}"
        needed = "the fewest possible" if total == fewest else needed
        held = f"{len(plan.packs):,} of {counted(limit, 'token')}, fill {plan.fill:.4f}; {needed}"
    if number := len(plan.skipped_long):
        left_out.append(
            f"{counted(number, 'sample')} of {limit:,} tokens or more, {counted(plan.skipped_tokens, 'token')}"
        )
    if plan.dropped_packs:
        size_of = f"{counted(plan.dropped_samples, 'sample')}, {counted(plan.dropped_tokens, 'token')}"
        of_packs = counted(len(plan.dropped_packs), "underfilled pack")
        left_out.append(f"{size_of} ({float(plan.dropped_share):.2%}), in {of_packs}")
    longest = counted(int(as_lengths(lengths, least=0)[long].max(initial=0)), "token")
    alone = verb_for(len(long), "is a pack of its own", "are packs of their own")
    steps = f"{counted(schedule.steps_per_epoch, 'step')} an epoch, {schedule.total_steps:,} in all"
    if schedule.epochs_differ:
        number = schedule.num_epochs
        own = f"{counted(number, 'epoch')}{verb_for(number, '', ', each with its own plan')}"
        steps = f"{counted(schedule.total_steps, 'step')} in all, over {own},"
    per_rank, ranks = size * schedule.gradient_accumulation_steps, counted(schedule.world_size, unit)
    batch = f"{counted(schedule.world_size * per_rank, 'pack' if packed else 'sample')} a step"
    batch += f", {per_rank:,} on each {unit}" if schedule.world_size > 1 else ""
    rows = {
        "data": f"{counted(plan.num_samples, 'sample')}, {counted(plan.num_tokens, 'token')}",
        "packs": held,
        "long": long and f"{counted(len(long), 'sample')} {alone}, the longest of {longest}",
        "shared": schedule.degrees is not None
        and _sharing_text(plan.packs.loads(as_lengths(lengths, least=0)), schedule),
        "left out": "; ".join(left_out),
        "training": f"{steps} on {ranks}; {batch}",
        "resumed": schedule.start.step and describe_resume(schedule, "pack" if packed else "sample"),
    }
    return {name: text for name, text in rows.items() if text}


def describe_long_samples(plan: RawPlan, lengths: Lengths, setting: str) -> str:
    """
    Return a warning if more than half of the samples are longer than a pack and become packs by
    themselves, else an empty text.

    Args:
        plan: Plan of samples with these lengths.
        lengths: Number of tokens of each record, 0 for a record that is not a sample.
        setting: Name of the packing length's setting, as the warning writes it in front of the
            value.

    >>> from packplan.core.plan import build_raw_plan
    >>> plan = build_raw_plan([9, 9, 2], packing_length=4)
    >>> describe_long_samples(plan, [9, 9, 2], "max_length").split(". ")[1]
    'With max_length 9, 100 % of the samples would fit'
    """
    tokens = as_lengths(lengths, least=0)
    num_longer = int((tokens[list(plan.single_long)] > plan.packing_length).sum())
    if num_longer <= _MOST * plan.num_samples:
        return ""
    enough = length_quantiles(samples := np.sort(tokens[tokens > 0]))[-1]
    return (
        f"{num_longer:,} of {counted(plan.num_samples, 'sample')} {verb_for(num_longer)} longer than a pack of "
        f"{counted(plan.packing_length, 'token')}, so each is a pack by itself, of up to {tokens.max():,} tokens. With "
        f"{setting} {enough:,}, {100 * int((samples <= enough).sum()) // len(samples)} % of the samples would fit"
    )


def failure_lines(records: Sequence[BadRecord]) -> Iterator[str]:
    """
    Yield bad records grouped by reason, the most frequent reason first, with the first locations of
    each.

    Args:
        records: Bad records, ascending. Reasons that differ only in numbers form one group.

    >>> bad = [BadRecord(index, f"line {index}", f"has {index} images", "") for index in (3, 7)]
    >>> list(failure_lines(bad))
    ['2 records: has 3 images', '  line 3; line 7']
    """
    groups: dict[str, list[BadRecord]] = {}
    for one in records:
        groups.setdefault(re.sub(r"\d[\d,.]*", "N", one.reason), []).append(one)
    for group in sorted(groups.values(), key=len, reverse=True):
        more = f"; and {len(group) - MOST_NAMED:,} more" if len(group) > MOST_NAMED else ""
        yield f"{counted(len(group), 'record')}: {group[0].reason}"
        yield f"  {'; '.join(one.where for one in group[:MOST_NAMED])}{more}"


def describe_few_positions(lengths: Lengths, config: Mapping[str, Any], *, media: bool = False) -> str:
    """
    Return a warning if samples have more tokens than a model has positions, else an empty text.

    Args:
        lengths: Number of tokens of each record, 0 for a record that is not a sample.
        config: Content of the model's config.json; the factor of scaled rotary positions counts.
        media: Whether samples have images or videos, whose positions are fewer in mrope.

    >>> describe_few_positions([9, 600], {"max_position_embeddings": 512}).partition(": ")[0]
    '1 of 2 samples has more tokens than the 512 positions of the model, up to 600'
    """
    text = config.get("thinker_config") or config
    text = text.get("text_config") or text
    most = text.get("max_position_embeddings") or text.get("n_positions") or np.inf
    scaled, tokens = text.get("rope_scaling") or text.get("rope_parameters") or {}, as_lengths(lengths, least=0)
    kinds = [part for part in scaled.values() if isinstance(part, Mapping)] or [scaled]  # one for each type of layer
    most = max((one.get("factor") or 1) * (one.get("original_max_position_embeddings") or most) for one in (*kinds, {}))
    if not (over := int((tokens > most).sum())) or (media and "mrope_section" in scaled):
        return ""
    fact = f"{over:,} of {counted(int((tokens > 0).sum()), 'sample')} {verb_for(over, 'has', 'have')} more tokens than"
    advice = "make them shorter, or scale its rotary positions (rope_scaling)"
    return f"{fact} the {int(most):,} positions of the model, up to {tokens.max():,}: {advice}"


def describe_resume(schedule: EpochSchedule, name: str = "pack") -> str:
    """
    Describe the trained and the remaining part of a resumed run, as the text of a table row.

    Args:
        schedule: Schedule that starts at the step of the checkpoint.
        name: Noun for the items that a step trains, such as `pack`.
    """
    start, ranks = schedule.start, schedule.world_size
    left = f"{counted(max(0, schedule.total_steps - start.step), 'step')} left, {schedule.total_steps:,} in all"
    if not start.epoch_step:
        return f"after step {start.step:,}, at the start of epoch {start.epoch:,} (counted from 0); {left}"
    consumed, slots = schedule.consumed_packs(start.epoch).size, schedule.num_epoch_slots(start.epoch)
    name = name if schedule.degrees is None else "slot"
    before = start.segments[-1].world_size if start.segments else ranks
    again = schedule.num_remaining_batches(start.epoch) * ranks * schedule.batch_size - (slots - consumed)
    changed = f", now on {counted(ranks, 'rank')} instead of {before:,}" if before != ranks else ""
    changed += f" ({again:,} repeated to fill all ranks)" if again > 0 else ""
    done = f"{counted(consumed, name)} of epoch {start.epoch:,} {verb_for(consumed)} trained"
    return f"after step {start.step:,}: {done}, {slots - consumed:,} {verb_for(slots - consumed)} not{changed}; {left}"


def _sharing_text(tokens: IntArray, schedule: EpochSchedule) -> str:
    """
    Describe how many packs each number of ranks shares, and the maximum number of tokens of a rank.
    """
    degrees = schedule.pack_degrees(0)
    packs = ", ".join(f"{num:,} on {counted(int(ranks), 'rank')}" for ranks, num in count_degrees(degrees).items())
    most = counted(int((-(-tokens // degrees)).max()), "token")
    return f"{packs}; {counted(schedule.packs_per_epoch, 'slot')} an epoch; no rank computes more than {most} at once"


def format_table(title: str, rows: Mapping[str, str]) -> str:
    """
    Format rows as lines below a title, with aligned values and at most the width of a console.

    >>> print(format_table("the plan", {"data": "3 samples", "left out": "1 sample"}))
    the plan:
      data      3 samples
      left out  1 sample
    """
    width = max(map(len, rows))
    below = "\n" + " " * (width + 4)
    texts = {name: text.replace("\n", below) for name, text in rows.items()}
    return fit_lines(
        format_lines(title, (f"{name:<{width}}  {text}" for name, text in texts.items())), indent=width + 4
    )


@attrs.frozen
class SourceSummary:
    """Figures of the samples of one data source in a plan."""

    name: str

    files: tuple[DataFile, ...]

    bad_records: int
    """Number of records that cannot become samples."""

    num_samples: int
    num_tokens: int
    """Number of tokens of all samples of the source."""

    supervised_tokens: int
    """Number of tokens that the loss counts."""

    images: int
    videos: int

    frames: int
    """Number of frames sampled from the videos."""

    video_patches: int

    video_milliseconds: int
    """Total duration of all videos in milliseconds."""

    longest_sample: int
    """Number of tokens of the longest sample; 0 without samples."""

    length_quantiles: tuple[int, ...]
    """Lengths that 5 %, 50 % and 95 % of the samples do not exceed; empty without samples."""

    planned_samples: int
    planned_tokens: int

    dropped_samples: int
    """Number of samples in packs that the fill filter drops."""

    dropped_tokens: int

    skipped_samples: int
    """Number of long samples that are skipped, so that they are in no pack."""

    skipped_tokens: int

    num_packs: int
    """Number of packs with a sample of the source. A pack counts once for each of its sources."""


def summarise_sources(
    plan: RawPlan, table: Table, files: Sequence[DataFile], *, media: MediaTable
) -> tuple[SourceSummary, ...]:
    """
    Compute a plan's figures for each source, in the order of each source's first file.

    Args:
        plan: Plan of the records that are samples.
        table: Measurements of the records; int32, shape (num_records, num_columns).
        files: Data files, in order.
        media: Media table of the same records; int64, shape (num_media, num_media_columns).

    Raises:
        ArgumentError: The number of records differs between the files and the table.
    """
    names = list(dict.fromkeys(file.source for file in files))
    owners = np.repeat([names.index(file.source) for file in files], [file.records for file in files])
    if len(owners) != len(table):
        raise ArgumentError("argument", f"files have {counted(len(owners), 'record')}, but a table has {len(table):,}")
    counts = _count_by_source(plan, table, media, owners, len(names))
    samples = sample_indices(table)
    tokens, owner_of = column(table, "length")[samples], owners[samples]
    lengths = [np.sort(tokens[owner_of == number]) for number in range(len(names))]
    return tuple(
        SourceSummary(
            name,
            tuple(file for file in files if file.source == name),
            longest_sample=int(own.max(initial=0)),
            length_quantiles=length_quantiles(own),
            **{name: int(each[number]) for name, each in counts.items()},
        )
        for number, (name, own) in enumerate(zip(names, lengths, strict=True))
    )  # fmt: skip


def _count_by_source(
    plan: RawPlan, table: Table, media: MediaTable, owners: IntArray, num_sources: int
) -> dict[str, NDArray[np.int64]]:
    """
    Return a dict of `SourceSummary` field -> its values, one for each source.

    *owners* contains the source index of each record; shape (num_records,).
    """

    def total(samples: IntArray, name: str | None = None) -> NDArray[np.int64]:
        """
        Return the sum of a column over *samples* for each source; without a column, the number of
        samples.
        """
        values = None if name is None else column(table, name)[samples]
        return np.bincount(owners[samples], values, num_sources).astype(np.int64)

    everything = sample_indices(table)
    parts = {"num": everything, "planned": plan.packs.indices, "dropped": plan.dropped_packs.indices}
    parts["skipped"] = np.array(plan.skipped_long, dtype=np.int64)
    pack_of = np.repeat(np.arange(len(plan.packs)), plan.packs.sizes())
    met = np.unique(pack_of * num_sources + owners[plan.packs.indices]) % num_sources
    media_owners = np.repeat(owners, num_media(table))
    milliseconds = media[:, MEDIA_COLUMNS.index("milliseconds")]
    return {
        "bad_records": np.bincount(owners, column(table, "bad"), num_sources),
        "supervised_tokens": total(everything, "supervised"),
        **{name: total(everything, name) for name in ("images", "videos", "frames", "video_patches")},
        "video_milliseconds": np.bincount(media_owners, milliseconds, num_sources),
        **{f"{part}_samples": total(samples) for part, samples in parts.items()},
        **{f"{part}_tokens": total(samples, "length") for part, samples in parts.items()},
        "num_packs": np.bincount(met, minlength=num_sources),
    }


def length_quantiles(ascending: NDArray[np.integer]) -> tuple[int, ...]:
    """
    Return the lengths that 5 %, 50 % and 95 % of the sorted lengths do not exceed.

    The result is empty if there are no lengths.

    >>> length_quantiles(np.arange(1, 101))
    (5, 50, 95)
    """
    size = len(ascending)
    return tuple(int(ascending[-(-size * percent // 100) - 1]) for percent in QUANTILES if size)


@attrs.frozen
class SamplePlace:
    """Pack that contains a sample, or the reason why the sample is in no pack."""

    kind: Literal["packed", "long", "dropped", "skipped", "absent"]
    """
    `packed`: the sample is in a trained pack. `long`: the sample is long, and a pack by itself.
    `dropped`: the fill filter drops its pack. `skipped`: the sample is long, and therefore in no
    pack. `absent`: the epoch has no such sample.
    """

    pack: int | None
    """
    Index of the pack in the plan's packs or, if `kind` is `dropped`, in its dropped packs; None
    without a pack.
    """

    pack_members: tuple[int, ...]
    """Indices of all samples in the pack; empty without a pack."""


@attrs.frozen
class ScheduledStep:
    """Optimizer step and rank in which a pack is trained."""

    step: int
    """Optimizer step of the epoch, from 0."""

    rank: int


def find_sample(plan: RawPlan, sample: int) -> SamplePlace:
    """
    Find the pack of a sample, or the reason why the sample is in no pack.

    >>> from packplan.core.plan import build_raw_plan
    >>> find_sample(build_raw_plan([60, 20, 90], packing_length=80), 1).pack_members
    (0, 1)
    """
    for packs, kind in ((plan.packs, "packed"), (plan.dropped_packs, "dropped")):
        found = np.flatnonzero(packs.indices == sample)
        if found.size:
            pack = int(np.searchsorted(packs.offsets, found[0], side="right")) - 1
            is_long = sample in plan.single_long
            return SamplePlace("long" if is_long else kind, pack, tuple(packs[pack]))  # type: ignore[arg-type]
    if sample in plan.skipped_long:
        return SamplePlace("skipped", None, ())
    return SamplePlace("absent", None, ())


def count_degrees(degrees: IntArray) -> dict[str, int]:
    """
    Count packs by degree: degree, written as text -> number of packs.

    >>> count_degrees(np.array([1, 4, 1]))
    {'1': 2, '4': 1}
    """
    found, counts = np.unique(degrees, return_counts=True)
    return dict(zip(map(str, found), counts.tolist(), strict=True))


def scheduled_steps(schedule: EpochSchedule, pack: int, *, epoch: int = 0) -> tuple[ScheduledStep, ...]:
    """
    Return the steps and ranks that train a pack of the raw plan in an epoch.

    The result is empty if the pack is not trained, and has several entries if the pack is shared or
    repeated.

    Args:
        schedule: Schedule over the plan.
        pack: Index of the pack in the raw plan.
        epoch: Number of the epoch, from 0.
    """
    batches = schedule.num_remaining_batches(epoch) * schedule.batch_size * schedule.world_size
    places = np.flatnonzero(schedule.order(epoch)[:batches] == pack)
    per_step = schedule.world_size * schedule.batch_size * schedule.gradient_accumulation_steps
    return tuple(ScheduledStep(place // per_step, place % schedule.world_size) for place in places.tolist())


def work_of_steps(works: NDArray[np.float64], *, most: int = 100) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """
    Return the mean work of steps, in at most *most* groups of consecutive steps.

    The first array contains the first step of each group, and the end of the last group. The second
    array contains the mean work per step and rank in each group, the third the mean work of each
    step's busiest rank.

    Args:
        works: Work of each step on each rank; shape (num_steps, world_size).
        most: Maximum number of groups.

    >>> edges, mean, busiest = work_of_steps(np.array([[1.0, 3.0], [2.0, 2.0], [4.0, 8.0]]), most=2)
    >>> edges.tolist(), mean.tolist(), busiest.tolist()
    ([0, 1, 3], [2.0, 4.0], [3.0, 5.0])
    """
    edges = np.unique(np.linspace(0, len(works), most + 1).astype(np.int64))
    mean, busiest = (np.add.reduceat(one, edges[:-1]) for one in (works.mean(axis=1), works.max(axis=1)))
    return edges, mean / np.diff(edges), busiest / np.diff(edges)


def packs_by_algorithm(plan: RawPlan, lengths: Lengths, *, others: bool = True) -> dict[str, int]:
    """
    Count the packs that a plan's samples need: in the plan, with other algorithms, and with
    padding.

    The first entry of the result is the lower bound. For padded batches, the number of positions is
    divided by the packing length. Dropped samples are included.

    Args:
        plan: Plan of samples with these lengths.
        lengths: Number of tokens of each record, 0 for a record that is not a sample.
        others: Whether to run all algorithms that need only lengths. They ignore a limit on images.
    """
    tokens = as_lengths(lengths, least=0)[np.sort(np.concatenate([plan.packs.indices, plan.dropped_packs.indices]))]
    short = tokens[tokens < plan.packing_length]
    quick = [name for name, one in ALGORITHMS.items() if not one.takes and short.size and others]
    found = {name: len(pack(short, capacity=plan.packing_length, algorithm=name)) for name in quick}
    padded = padded_positions(tokens, batch_size=max(1, round(plan.planned_samples / len(plan.packs))))
    return {
        "no plan has fewer": plan.lower_bound,
        "this plan": len(plan.packs) + len(plan.dropped_packs),
        **{name: number + len(plan.single_long) for name, number in found.items()},
        "padded batches": round(padded / plan.packing_length),
    }


def compare_packs(first: Packs, second: Packs) -> dict[str, IntArray]:
    """
    Return the samples that two plans pack differently, ascending.

    `new` samples are only in *second*, and `gone` samples are only in *first*. `moved` samples are
    in both plans, but share their pack with different samples.

    Args:
        first: Packs of the first plan; indices ascend in each pack.
        second: Packs of the second plan, which may have other samples.

    >>> packs = [[0, 1], [2], [3]], [[0, 1], [2, 4]]
    >>> found = compare_packs(*map(Packs.from_lists, packs))
    >>> {name: samples.tolist() for name, samples in found.items()}
    {'new': [4], 'gone': [3], 'moved': [2]}
    """
    kinds: dict[bytes, int] = {}  # number of each pack, by its samples
    total, places = len(first) + len(second), []
    for packs in (first, second):
        ends = pairwise(packs.offsets.tolist())
        numbers = [kinds.setdefault(packs.indices[start:end].tobytes(), len(kinds)) for start, end in ends]
        places.append(packs.indices * total + np.repeat(numbers, packs.sizes()))
    differ = np.unique(np.setxor1d(*places) // total)
    new, gone = (np.setdiff1d(*pair) for pair in ((second.indices, first.indices), (first.indices, second.indices)))
    return {"new": new, "gone": gone, "moved": np.setdiff1d(differ, [*new, *gone])}
