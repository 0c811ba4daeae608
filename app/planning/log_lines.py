"""Lines of the log on a planned split, in the words that the documentation explains."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from packplan.app.planning.schedule import forced_batch_lines, partial_window_line
from packplan.app.planning.split import Split
from packplan.core.checksum import plan_checksum
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecord
from packplan.core.errors import counted, format_ranges, verb_for
from packplan.core.patterns.certificate import BoundKind
from packplan.core.samples.tables import DataFile, column, source_sizes
from packplan.core.schedule import EpochSchedule

SHOWN = 10
"""Ranges of samples that a line names, where they may lie anywhere; the stored plan has all."""

BOUNDS: Mapping[BoundKind, str] = MappingProxyType(
    {
        "quick": "quick bound",
        "relaxation": "linear relaxation",
        "reached": "a packing reaches it",
    }
)
"""Words for each kind of lower bound."""


log = logging.getLogger(__name__)

Line = tuple[int, str]
"""Log level and text of a line."""


def log_plan(planned: Split) -> None:
    """Log the lines of `plan_lines`, each after the name of its split."""
    of = f"{planned.name}, its first epoch" if planned.recipe else planned.name
    for level, line in plan_lines(planned):
        log.log(level, "%s: %s", of, line)


def steps_line(planned: Split, schedule: EpochSchedule) -> str:
    """
    Return the line that Packplan's plugin prints in ms-swift: the steps of a schedule, and a digest
    of the plan by the indices that ms-swift gives to rows.
    """
    row = np.cumsum(column(planned.table, "bad") == 0) - 1
    digest = plan_checksum(planned.raw.with_indices(row).packs)[:12]
    return (
        f"{counted(schedule.steps_per_epoch, 'step')} an epoch, {schedule.total_steps:,} in all on "
        f"{counted(schedule.world_size, 'rank')}; plan {digest}"
    )


def log_schedule(config: RunConfig, train: Split, schedule: EpochSchedule) -> None:
    """
    Log the epochs that have plans of their own, the optimizer steps of a run, and each setting of
    its batches that packing changes.

    Args:
        config: The run.
        train: The planned split that is trained.
        schedule: Order of its packs.
    """
    _log_epochs(train, schedule)
    for forced in forced_batch_lines(config):
        log.warning("%s", forced)
    batch = schedule.batch_size * schedule.gradient_accumulation_steps
    each = (
        f"{counted(schedule.world_size * batch, 'pack' if config.training.packing else 'sample')} = "
        f"{counted(schedule.world_size, 'rank')} x {schedule.batch_size:,} per device x "
        f"{schedule.gradient_accumulation_steps:,} accumulation"
    )
    if (size := config.training.sequence_parallel_size) > 1:
        log.info("%d ranks share each row, and count as one rank of the plan (training.sequence_parallel_size)", size)
    if schedule.epochs_differ:
        steps = f"{schedule.total_steps:,} in total, over {counted(schedule.num_epochs, 'epoch')}, each of {each}"
    else:
        per_rank = f"{counted(schedule.batches_per_epoch, 'batch')} per rank and epoch"
        steps = f"{schedule.steps_per_epoch:,} per epoch, {schedule.total_steps:,} in total, each of {each}; {per_rank}"
    log.info("optimizer steps: %s", steps)
    if window := partial_window_line(schedule):
        log.log(window[0], "%s", window[1])


def _log_epochs(split: Split, schedule: EpochSchedule) -> None:
    """Log samples, packs and steps of each epoch, where epochs have plans of their own."""
    records, files = (() if split.epochs is None else split.epochs.records), split.encoder.data_files()
    for place, one in enumerate(records):
        if SHOWN // 2 <= place < len(records) - SHOWN // 2:
            continue
        if place and place == len(records) - SHOWN // 2 > SHOWN // 2:
            log.info("train: … and %s", counted(len(records) - SHOWN, "epoch"))
        log.info(
            "train: epoch %d: %s, %s; %s, %s, checksum %s%s",
            one.epoch,
            counted(one.num_samples, "sample"),
            counted(one.num_tokens, "token"),
            counted(one.num_packs, "pack"),
            counted(schedule.num_epoch_steps(one.epoch), "step"),
            one.checksum[:12],
            f": {drawn}" if (drawn := source_draws_text(one, files)) else "",
        )


def source_draws_text(record: EpochRecord, files: Sequence[DataFile]) -> str:
    """
    Return text with the number of samples and share of tokens that an epoch draws from each source.
    It is empty if there is only one source.

    Args:
        record: Record of the epoch.
        files: Files of the data.
    """
    if len(record.source_samples) < 2:
        return ""
    rows = zip((name for name, _ in source_sizes(files)), record.source_samples, record.source_tokens, strict=True)
    return ", ".join(
        f"{name} {samples:,} ({tokens / record.num_tokens:.2%} of the tokens)" for name, samples, tokens in rows
    )


def plan_lines(planned: Split) -> Iterator[Line]:
    """Yield the log lines that describe a planned split, each with its log level."""
    for parts in (_describe_plan, _describe_packs, _describe_exceptions):
        yield from parts(planned)


def _info_line(text: str) -> Line:
    return logging.INFO, text


def _warning_line(text: str) -> Line:
    return logging.WARNING, text


def _describe_plan(planned: Split) -> Iterator[Line]:
    raw, aligned = planned.raw, planned.aligned
    held = "padded batches; each counts as a pack of its own below"
    if planned.policy.packing:
        long = " (a long pack counts as full)" if raw.single_long else ""
        dropped, of_all = (f", {len(raw.dropped_packs):,} more dropped", " in all") if raw.dropped_packs else ("", "")
        held = (
            f"{counted(len(raw.packs), 'pack')}, fill {raw.fill:.4f}{long}{dropped}, no plan has fewer than "
            f"{counted(raw.lower_bound, 'pack')}{of_all} ({BOUNDS[raw.bound_kind]})"
        )
    supervised = int(column(planned.table, "supervised")[raw.packs.indices].sum(dtype=np.int64))
    yield _info_line(
        f"{counted(raw.num_samples, 'sample')}, {counted(raw.num_tokens, 'token')}; "
        f"packing_length {raw.packing_length:,}; {counted(raw.planned_samples, 'sample')} in {held}; "
        f"{counted(supervised, 'token')} ({supervised / raw.planned_tokens:.1%}) {verb_for(supervised)} supervised"
    )
    repeated = f" (repeated packs of the raw plan [{format_ranges(aligned.repeated)}])" if aligned.pad_needed else ""
    yield _info_line(
        f"N_raw_packs {len(raw.packs):,}, N_aligned_packs {len(aligned.packs):,}, world_size {aligned.world_size}, "
        f"dataloader_drop_last {str(aligned.dataloader_drop_last).lower()}, pad_needed {aligned.pad_needed:,}"
        f"{repeated}; raw_plan checksum {planned.raw_checksum[:12]}, aligned_plan checksum {planned.checksum[:12]}"
    )
    if nothing := planned.unsupervised.size:
        cut = int(column(planned.table, "cut")[planned.unsupervised].sum())
        which = f": {format_ranges(planned.unsupervised.tolist(), most=SHOWN)}"
        if not planned.is_supervised:
            which = ", so training " + ("refuses the plan" if planned.name == "train" else "leaves the evaluation out")
        yield _warning_line(
            f"{counted(nothing, 'planned sample')} {verb_for(nothing, 'has', 'have')} no supervised token"
            f"{f', {cut:,} of which {verb_for(cut)} truncated (template.max_length)' if cut else ''}{which}"
        )
    if aligned.num_dropped:
        first = len(raw.packs) - aligned.num_dropped
        yield _warning_line(
            f"the last {counted(aligned.num_dropped, 'pack')} (from {first:,}) "
            f"{verb_for(aligned.num_dropped)} not trained{'' if planned.recipe else ', in no epoch'}; "
            f"training.dataloader_drop_last: false trains {verb_for(aligned.num_dropped, 'it', 'them')}"
        )


def _describe_packs(planned: Split) -> Iterator[Line]:
    """Yield lines on the packs that `auto` would save, and on samples over the packing length."""
    if not planned.policy.packing:
        return
    raw, lengths = planned.raw, column(planned.table, "length")
    if raw.auto_packs:
        instead = f"{counted(raw.auto_packs, 'pack')} instead of {len(raw.packs):,}"
        yield _info_line(f"training.packing_algorithm: auto needs at most {instead}")
    if number := len(raw.single_long):
        long = lengths[list(raw.single_long)].astype(np.int64)
        over = int((long * 10 > raw.packing_length * 11).sum())
        whole = number - int(column(planned.table, "cut")[list(raw.single_long)].astype(bool).sum())
        not_cut = f", {whole:,} not truncated" if whole < number else ""
        line = (
            f"{counted(number, 'sample')} {verb_for(number, 'has', 'have')} {counted(raw.packing_length, 'token')} or "
            f"more and {verb_for(number, 'is a pack of its own', 'are packs of their own')}, the longest of "
            f"{int(long.max()):,}{not_cut}: {format_ranges(raw.single_long, most=SHOWN)}"
        )
        if over:
            yield _warning_line(
                f"{line}; {counted(over, 'pack')} {verb_for(over, 'exceeds', 'exceed')} the packing length by more "
                "than 10 %; training.packing_allow_single_long: false skips long samples"
            )
        else:
            yield _info_line(line)


def _describe_exceptions(planned: Split) -> Iterator[Line]:
    """Yield lines on the samples that are truncated, skipped or dropped."""
    raw = planned.raw
    lengths, cut = column(planned.table, "length"), column(planned.table, "cut") != 0
    if num_cut := int(cut.sum()):
        longest = int(lengths[cut].max())
        long = "; truncated samples are long samples" if longest >= raw.packing_length else ""
        yield _warning_line(
            f"{counted(num_cut, 'sample')} {verb_for(num_cut)} truncated to at most {counted(longest, 'token')} "
            f"(template.truncation_strategy){long}"
        )
    if raw.skipped_long:
        number = len(raw.skipped_long)
        yield _warning_line(
            f"{counted(number, 'sample')} ({counted(raw.skipped_tokens, 'token')}) {verb_for(number, 'has', 'have')} "
            f"{raw.packing_length:,} tokens or more and {verb_for(number)} skipped: "
            f"{format_ranges(raw.skipped_long, most=SHOWN)}; raise template.max_length, lower "
            "template.max_pixels, or set training.packing_allow_single_long: true"
        )
    if number := len(raw.dropped_packs):
        line = (
            f"{counted(number, 'pack')} filled below {planned.policy.min_fill_ratio} {verb_for(number)} dropped "
            f"({counted(raw.dropped_samples, 'sample')}, {counted(raw.dropped_tokens, 'token')}, "
            f"{float(raw.dropped_share):.2%} of all); "
            f"training.packing_drop_last: false keeps {verb_for(number, 'it', 'them')}, a lower "
            "training.packing_min_fill_ratio keeps more"
        )
        many = raw.dropped_share > Fraction(planned.policy.max_dropped_share)
        yield _warning_line(line) if many else _info_line(line)
