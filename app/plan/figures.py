"""The figures of a split, for people to read: in a terminal, on a page."""

from collections.abc import Iterator, Sequence

from packplan.app.cli.forecasts import time_rows
from packplan.app.plan.stored import PlanView
from packplan.app.planning.log_lines import BOUNDS, auto_line, drawn_of_sources
from packplan.core.errors import agree, counted
from packplan.core.inspection import Meetings, SourceSummary
from packplan.core.memory import MARGIN, with_margin, written_bytes
from packplan.core.samples import video_totals

_BARS = " ▁▂▃▄▅▆▇█"

FigureRow = tuple[str, str, str]
"""Name of a figure, its value, and a remark."""

_Row = tuple[bool, str, str, str]
"""Whether a figure decides something, as losses, packs and steps do; its name, value and remark."""


def deciding(view: PlanView) -> Iterator[FigureRow]:
    """Yield the dozen figures of a plan that decide something."""
    return ((name, value, remark) for rows in _groups(view) for decides, name, value, remark in rows if decides)


def figures(view: PlanView) -> list[list[FigureRow]]:
    """Return all figures of a plan, in groups."""
    groups = ([(name, value, remark) for _, name, value, remark in rows] for rows in _groups(view))
    return [rows for rows in groups if rows]


def _groups(view: PlanView) -> Iterator[Iterator[_Row]]:
    yield _samples(view)
    yield ((False, *row) for part in (_sources(view), _videos(view)) for row in part)
    if view.stored.packed:
        yield _packs(view)
    yield _epoch(view)
    yield ((True, *row) for row in _time(view))


def _samples(view: PlanView) -> Iterator[_Row]:
    plan, packed = view.plan_summary, view.stored.packed
    yield True, "samples", f"{plan.num_samples:,}", counted(plan.num_tokens, "token")
    remark = f"{counted(plan.planned_tokens, 'token')}, {plan.token_coverage:.2%}"
    yield False, "  planned", f"{plan.planned_samples:,}", remark
    if packed:
        remark = f"{counted(plan.dropped_tokens, 'token')}, in {counted(plan.dropped_packs, 'underfilled pack')}"
        yield plan.dropped_samples > 0, "  dropped", f"{plan.dropped_samples:,}", remark
    remark = counted(plan.skipped_tokens, "token")
    yield plan.skipped_samples > 0, "  skipped, too long", f"{plan.skipped_samples:,}", remark
    if packed:
        remark = counted(plan.long_tokens, "token")
        yield plan.long_samples > 0, "  long, packs of their own", f"{plan.long_samples:,}", remark
    if plan.supervised_tokens is not None and plan.unsupervised_samples is not None:
        remark = f"{plan.supervised_tokens / plan.planned_tokens:.1%} of the planned ones: the loss counts them"
        yield False, "supervised tokens", f"{plan.supervised_tokens:,}", remark
        remark, none = "nothing is learned from them", plan.unsupervised_samples
        yield none > 0, "  without supervised tokens", f"{none:,}", remark


def _sources(view: PlanView) -> Iterator[FigureRow]:
    sources = view.stored.sources()
    if sources:
        yield "sources", f"{len(sources):,}", "samples of each:"
    for one in sources:
        shapes = sorted({file.shape for file in one.files})
        parts = [
            counted(one.num_tokens, "token"),
            f"{one.supervised_tokens:,} supervised" if view.plan_summary.supervised_tokens is not None else "",
            f"longest {one.longest_sample:,}",
            counted(one.images, "image") if one.images else "",
            _describe_videos(one) if one.videos else "",
            f"in {counted(one.num_packs, 'pack')}" if view.stored.packed else "",
            f"{one.dropped_samples:,} dropped" if one.dropped_samples else "",
            f"{one.skipped_samples:,} skipped" if one.skipped_samples else "",
            f"{counted(one.bad_records, 'record')} left out" if one.bad_records else "",
        ]
        said = ", ".join(part for part in parts if part)
        yield f"  {one.name}", f"{one.num_samples:,}", f"{said}; {' / '.join(shapes)}"
        if one.num_samples:
            low, median, high = one.length_quantiles
            bars, first = _bars(one.length_histogram)
            remark = f"tokens, the median; 5 % have up to {low:,}, 95 % up to {high:,}; {bars} by powers of two"
            yield "    lengths", f"{median:,}", f"{remark} from {first:,}"


def _bars(counts: Sequence[int]) -> tuple[str, int]:
    """
    Return a bar for each power of two of lengths, the highest of the most samples, and the least
    length of the first.
    """
    first = next(place for place, count in enumerate(counts) if count)
    shown, most = counts[first:], max(counts)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in shown), 2**first


def _describe_videos(source: SourceSummary) -> str:
    """Return a source's videos in words."""
    seconds = f"{source.video_milliseconds / 1000:,.1f} s"
    return f"{counted(source.videos, 'video')} ({seconds}, {source.frames:,} frames, {source.video_patches:,} patches)"


def _videos(view: PlanView) -> Iterator[FigureRow]:
    rows = view.stored.lengths.rows
    videos = video_totals(rows.table, rows.media)
    if not videos.videos:
        return
    yield "videos", f"{videos.videos:,}", f"{videos.seconds:,.1f} s; {videos.decoded:,} were decoded to be measured"
    yield "  frames", f"{videos.frames:,}", "that are sampled of them"
    yield "  patches", f"{videos.patches:,}", "of two frames each, before merging"


def _packs(view: PlanView) -> Iterator[_Row]:
    plan = view.plan_summary
    remark = f"of {counted(plan.packing_length, 'token')}; no plan has fewer than {plan.lower_bound:,}"
    yield True, "packs", f"{plan.num_packs:,}", remark
    if line := auto_line(view.planned):
        yield True, "  with auto", "fewer", line
    yield False, "  samples of each", f"{plan.samples_per_pack:.2f}", "on average"
    exceed = agree(plan.oversized_packs, "exceeds", "exceed")
    remark = f"tokens; {plan.oversized_packs:,} {exceed} 110 % of the packing length"
    yield False, "  longest", f"{plan.longest_pack:,}", remark
    yield False, "  above the lower bound", f"{plan.gap:.3%}", f"dropped ones counted; {BOUNDS[plan.bound_kind]}"
    yield True, "  fill", f"{plan.fill_mean:.4f}", f"95 % of packs reach {plan.fill_p5:.4f}"
    yield False, "  worst fill", f"{plan.fill_worst:.4f}", "a long pack counts as full"
    yield True, "  saved against padding", f"{plan.padding_saved:.1%}", "of the positions, estimated"


def _time(view: PlanView) -> Iterator[FigureRow]:
    """Say how long training takes, and how much memory; nothing of an evaluation."""
    if view.forecast is not None:
        yield from time_rows(view.forecast, world_size=view.schedule.world_size, price=view.price)
    if view.peak is not None:
        margin = f"{written_bytes(with_margin(view.peak))} with a margin of {MARGIN:.0%}"
        yield "predicted memory", written_bytes(view.peak), f"of each rank, at the peak of a step; {margin}"


def _epoch(view: PlanView) -> Iterator[_Row]:
    schedule, trains = view.schedule_summary, view.stored.name == "train"
    unit, several = "packs" if view.stored.packed else "samples", schedule.world_size > 1
    when = "an epoch" if view.epochs is None else f"in epoch {view.epoch}"
    remark = f"{when}, {schedule.total_steps:,} in total; {schedule.effective_batch_size:,} {unit} a step"
    yield trains, "optimizer steps" if trains else "forward passes", f"{schedule.steps_per_epoch:,}", remark
    remark = f"of each rank in a step; {schedule.last_step_batches:,} in an epoch's last"
    yield False, "  batches", f"{schedule.gradient_accumulation_steps:,}", remark
    repeated = f", {schedule.repeated_packs:,} repeated" if schedule.repeated_packs else ""
    left = f", {schedule.unaligned_packs:,} dropped" if schedule.unaligned_packs else ""
    remark = f"{schedule.packs_per_rank:,} {unit} each in an epoch{repeated}{left}"
    yield several, "ranks", f"{schedule.world_size:,}", remark
    padded = "" if view.stored.packed else ", padded to the longest of a batch"
    yield False, "  work", f"{schedule.work_per_step:,.4g}", f"a step, all ranks: {view.work.unit}{padded}"
    remark = f"busiest rank over the mean; worst step {schedule.worst_work_imbalance:.3f}"
    yield several, "  imbalance", f"{schedule.work_imbalance:.4f}", remark
    remark = "the same where ranks wait for each other in each microbatch"
    yield False, "  of microbatches", f"{schedule.microbatch_imbalance:.4f}", remark
    remark = (
        f"busiest of {counted(schedule.world_size, 'pack')} over the mean; no others of these samples are below "
        f"{schedule.pack_imbalance_floor:.4f}"
    )
    yield False, "  of random packs", f"{schedule.pack_imbalance:.4f}", remark
    if view.schedule.group_by_work:
        remark = f"of the mean, standard deviation; {schedule.ungrouped_work_spread:.2%} if not grouped by work"
        yield False, "  steps differ by", f"{schedule.work_spread:.2%}", remark
    if schedule.above_bound is not None:
        remark = (
            f"microbatches {schedule.unbalanced_microbatch_imbalance:.4f}; now even in each {view.schedule.meeting}, "
            f"{schedule.above_bound:.3%} above the bound"
        )
        yield False, "  not assigned by work", f"{schedule.unbalanced_work_imbalance:.4f}", remark
    if view.attention is not None:
        yield True, "attention", view.attention.name, view.attention.why
    if (verdict := view.verdict) is not None:
        how = "packs" if verdict.passes else "may not pack"
        yield not verdict.passes, f"  {verdict.model_type}", how, str(verdict)


def epoch_rows(view: PlanView) -> Iterator[tuple[str, ...]]:
    """Yield the head of a table of the epochs that have plans of their own, and a row for each."""
    epochs = view.epochs
    if epochs is None:
        return
    yield "epoch", "samples", "tokens", "packs", "fill", "steps", "sources"
    for record in epochs.records:
        steps, sources = epochs.schedule.steps_in(record.epoch), view.stored.lengths.origin.files
        yield (
            f"{record.epoch:,}", f"{record.num_samples:,}", f"{record.num_tokens:,}", f"{record.num_packs:,}",
            f"{record.fill:.4f}", f"{steps:,}", drawn_of_sources(record, sources),
        )  # fmt: skip


def epoch_lines(view: PlanView) -> Iterator[str]:
    """Yield what the epoch that is shown draws of each source, and how its pairs meet again."""
    epochs = view.epochs
    if epochs is None:
        return
    for one in epochs.shares:
        yield (
            f"epoch {epochs.epoch}: {one.file}: {one.share:.4%} drawn, {one.asked_share:.4%} asked for "
            f"({counted(one.samples, 'sample')}, {counted(one.tokens, 'token')})"
        )
    if epochs.meetings is not None:
        told = told_meetings(epochs.meetings, mixed=bool(epochs.shares))
        yield f"epochs {epochs.epoch} and {epochs.epoch + 1}: {told}"


def told_meetings(found: Meetings, *, mixed: bool) -> str:
    """
    Return in words how often pairs of samples meet again.

    Args:
        found: Pairs of two epochs.
        mixed: Whether the epochs draw other samples too.
    """
    only = "" if mixed else ": no other packing of that quality was found"
    if not found.pairs:
        return f"no pack has two samples of both{only}"
    meet = agree(found.pairs_again, "meets", "meet")
    again = f"{found.pairs_again:,} of {counted(found.pairs, 'pair')} of samples {meet} again"
    if found.pairs_again == found.pairs and only:
        return f"{again}{only}"
    if not found.expected:
        return f"{again}, and none would in random packs"
    return f"{again}, {found.pairs_again / found.expected:.2f} times as many as in random packs"
