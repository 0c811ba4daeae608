"""
The table at the start of a run, and warnings about its plans.

`docs/how-it-works.md` explains these lines.
"""

import logging
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from packplan.app.planning.schedule import forced_batch_lines, partial_window_line
from packplan.app.planning.split import PlannedSplit
from packplan.core.batch import pack_degrees
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecord
from packplan.core.errors import counted, format_ranges, verb_for
from packplan.core.inspection import describe_long_samples, describe_training, format_table
from packplan.core.packs import plan_checksum
from packplan.core.samples.tables import DataFile, column, source_sizes
from packplan.core.schedule import EpochSchedule

SHOWN = 10
"""Maximum number of index ranges that a log line lists. The stored plan has all indices."""

log = logging.getLogger(__name__)


def log_run(config: RunConfig, splits: Sequence[PlannedSplit], schedule: EpochSchedule, *, attention: str = "") -> None:
    """
    Log the table of a run, and a warning for each setting that the user may want to change.

    Args:
        config: The run.
        splits: Planned splits, `train` first.
        schedule: Schedule of the packs of `train`.
        attention: Attention backend of the run, with the reason for it; empty if no backend is
            chosen yet.
    """
    rows = {**describe_run(config, splits, schedule), **attention_row(attention)}
    log.info("%s", format_table(config.source or "the run", rows))
    _log_epochs(splits[0], schedule)
    for split in splits:
        log.debug("%s: %s", split.name, _alignment_text(split))
    warnings = [f"{split.name}: {line}" for split in splits for line in plan_warnings(split)]
    warnings += forced_batch_lines(config)
    level, line = partial_window_line(config, schedule) or (logging.INFO, "")
    for text in [*warnings, line] if level == logging.WARNING else warnings:
        log.warning("%s", text)


def attention_row(attention: object) -> dict[str, str]:
    """Return the table row with the attention backend of a run; no row if *attention* is empty."""
    return {"attention": str(attention)} if attention else {}


def describe_run(config: RunConfig, splits: Sequence[PlannedSplit], schedule: EpochSchedule) -> dict[str, str]:
    """
    Return at most 14 rows for the table of a planned run.

    Args:
        config: The run.
        splits: Planned splits, `train` first.
        schedule: Schedule of the packs of `train`.
    """
    train = splits[0]
    rows = describe_training(train.raw, train.lengths, schedule, packed=train.policy.packing)
    training: dict[str, str] = {name: rows.pop(name) for name in ("training", "resumed") if name in rows}
    supervised = int(column(train.table, "supervised")[train.raw.packs.indices].sum(dtype=np.int64))
    rows["supervised"] = f"{counted(supervised, 'token')} ({supervised / train.raw.planned_tokens:.1%} of the planned)"
    if dropped := len(train.raw.dropped_packs):
        rows["left out"] += f"; training.packing_drop_last: false keeps {verb_for(dropped, 'it', 'them')}"
    if train.raw.auto_packs and config.command is None:
        rows["better"] = f"training.packing_algorithm: auto needs about {counted(train.raw.auto_packs, 'pack')}"
    rows["plan"] = (row_checksum(train) if config.command else train.raw_checksum)[:12]
    rows |= {split.name: describe_evaluation(split) for split in splits[1:]}
    if train.epochs is not None:
        packs = [one.num_packs for one in train.epochs.records]
        own = "each epoch has its own plan, and the rows above are of the first epoch"
        rows["epochs"] = f"{min(packs):,} to {max(packs):,} packs: {own}"
    rows |= training
    level, line = partial_window_line(config, schedule) or (logging.WARNING, "")
    if level == logging.INFO:
        rows["unusual"] = line
    rows["ranks"] = _ranks_text(train)
    if (size := config.training.row_ranks) > 1:
        rows["ranks"] += f"; {size} share each row, and count as one (training.sequence_parallel_size)"
    elif schedule.works is not None and schedule.world_size > 1:
        rows["ranks"] += f"; packs are assigned to ranks for equal work in each {schedule.sync_at}"
    return rows


def describe_evaluation(split: PlannedSplit) -> str:
    """Return the table row about the packs of a planned evaluation."""
    raw, same = split.raw, split.raw_checksum[:12]
    aligned = "" if (digest := split.checksum[:12]) == same else f", aligned {len(split.aligned.packs):,} ({digest})"
    held = f"{counted(len(raw.packs), 'pack')}, fill {raw.fill:.4f}" if split.policy.packing else "padded batches"
    size = f"{counted(raw.num_samples, 'sample')}, {counted(raw.num_tokens, 'token')}"
    return f"{size} in {held}, plan {same}{aligned}"


def _ranks_text(split: PlannedSplit) -> str:
    """
    Describe how the packs of an epoch are dropped or repeated to give all ranks the same number.
    """
    aligned, unit = split.aligned, "pack" if split.policy.packing else "sample"
    spread = f"{counted(len(split.raw.packs), unit)} on {counted(aligned.world_size, 'rank')}"
    if aligned.num_dropped:
        return f"{spread}, the last {aligned.num_dropped:,} dropped"
    repeated = f"{aligned.pad_needed:,} repeated ({format_ranges(aligned.repeated, most=SHOWN)})"
    return f"{spread}, {repeated if aligned.pad_needed else 'none repeated'}"


def _alignment_text(split: PlannedSplit) -> str:
    """Return the numbers of packs and the checksums of a stored plan as text."""
    aligned = split.aligned
    return (
        f"N_raw_packs {len(split.raw.packs):,}, N_aligned_packs {len(aligned.packs):,}, world_size "
        f"{aligned.world_size}, dataloader_drop_last {str(aligned.dataloader_drop_last).lower()}, pad_needed "
        f"{aligned.pad_needed:,}, raw_plan checksum {split.raw_checksum}, aligned_plan checksum {split.checksum}"
    )


def row_checksum(split: PlannedSplit, *, with_lengths: bool = False) -> str:
    """
    Return a plan's checksum over row indices that count only the rows that ms-swift keeps.

    With *with_lengths*, the checksum also covers the lengths of these rows, as in the plugin.
    """
    kept = column(split.table, "bad") == 0
    packs = split.raw.with_indices(np.cumsum(kept) - 1).packs
    return plan_checksum(packs, lengths=split.lengths[kept] if with_lengths else None)


def _log_epochs(split: PlannedSplit, schedule: EpochSchedule) -> None:
    """Log the number of samples, packs and steps of each epoch, if each epoch has its own plan."""
    if split.epochs is None:
        return
    files = split.encoder.data_files()
    for one in split.epochs.records:
        log.debug(
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
    Return the number of samples and the share of tokens that an epoch draws from each source.

    The text is empty if there is only one source.

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


def plan_warnings(planned: PlannedSplit) -> Iterator[str]:
    """Yield a sentence about each property of a planned split that the user may want to change."""
    yield from _untrained_warnings(planned)
    yield from _length_warnings(planned)


def _untrained_warnings(planned: PlannedSplit) -> Iterator[str]:
    """Yield sentences about samples and packs that are not trained or have no supervised tokens."""
    raw, aligned = planned.raw, planned.aligned
    if nothing := planned.unsupervised.size:
        cut = int(column(planned.table, "cut")[planned.unsupervised].sum())
        which = f": {format_ranges(planned.unsupervised.tolist(), most=SHOWN)}"
        if not planned.is_supervised:
            which = ", so training " + ("refuses the plan" if planned.name == "train" else "leaves the evaluation out")
        yield (
            f"{counted(nothing, 'planned sample')} {verb_for(nothing, 'has', 'have')} no supervised token"
            f"{f', {cut:,} of which {verb_for(cut)} truncated (template.max_length)' if cut else ''}{which}"
        )
    if aligned.num_dropped:
        first = len(raw.packs) - aligned.num_dropped
        yield (
            f"the last {counted(aligned.num_dropped, 'pack')} (from {first:,}) "
            f"{verb_for(aligned.num_dropped)} not trained{'' if planned.recipe else ', in no epoch'}; "
            f"training.dataloader_drop_last: false trains {verb_for(aligned.num_dropped, 'it', 'them')}"
        )
    if raw.dropped_share > Fraction(planned.policy.max_dropped_share):
        number = len(raw.dropped_packs)
        yield (
            f"{counted(number, 'pack')} filled below {planned.policy.min_fill_ratio} {verb_for(number)} dropped "
            f"({counted(raw.dropped_samples, 'sample')}, {counted(raw.dropped_tokens, 'token')}, "
            f"{float(raw.dropped_share):.2%} of all); "
            f"training.packing_drop_last: false keeps {verb_for(number, 'it', 'them')}, a lower "
            "training.packing_min_fill_ratio keeps more"
        )


def _length_warnings(planned: PlannedSplit) -> Iterator[str]:
    """Yield sentences about samples that are truncated, longer than a pack, or skipped."""
    raw, limit = planned.raw, planned.raw.packing_length
    if planned.policy.packing and (text := describe_long_samples(raw, planned.lengths, "template.max_length:")):
        yield text
    lengths, cut = planned.lengths, column(planned.table, "cut") != 0
    long = list(raw.single_long) if planned.policy.packing else []
    ranks = pack_degrees(lengths[long], limit, planned.aligned.max_degree)
    shares, shared = -(-lengths[long] // ranks), " on each of its ranks" * (planned.aligned.max_degree > 1)
    if over := int((shares * 10 > limit * 11).sum()):
        yield (
            f"{counted(over, 'pack')} {verb_for(over, 'exceeds', 'exceed')} the packing length by more than 10 %, up "
            f"to {int(shares.max()):,} tokens{shared}. Set training.packing_allow_single_long: false to skip each "
            f"sample of {limit:,} tokens or more: {format_ranges(long, most=SHOWN)}"
        )
    if num_cut := int(cut.sum()):
        longest = int(lengths[cut].max())
        more = "; truncated samples are long samples" if longest >= limit else ""
        yield (
            f"{counted(num_cut, 'sample')} {verb_for(num_cut)} truncated to at most {counted(longest, 'token')} "
            f"(template.truncation_strategy){more}"
        )
    if number := len(raw.skipped_long):
        yield (
            f"{counted(number, 'sample')} ({number / raw.num_samples:.2%} of all; "
            f"{counted(raw.skipped_tokens, 'token')}, {raw.skipped_tokens / raw.num_tokens:.2%} of all) "
            f"{verb_for(number, 'has', 'have')} {limit:,} tokens or more and {verb_for(number)} skipped: "
            f"{format_ranges(raw.skipped_long, most=SHOWN)}. "
            "Raise template.max_length, lower template.max_pixels, or set training.packing_allow_single_long: true"
        )
