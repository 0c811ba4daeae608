"""
Show the stored plan: which samples it leaves out, how full its packs are, and how many steps
training takes. `--all` shows every figure.

For a YAML, the command reads only the files that `packplan plan build` has stored. It needs no
data, no model, no torch and no ms-swift. `packplan plan verify` checks whether the plan still
matches the data. `--pack` and `--sample` explain one pack or one sample.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from packplan.app.cli.command import add_config_arguments, parse_number, parse_ranks, plain_console
from packplan.app.opening.commands import read_run_or_command
from packplan.app.plan.explain import explain_pack, explain_sample, explanation_lines
from packplan.app.plan.stored import StoredSplit, open_split, selected_splits
from packplan.app.planning.log_lines import source_draws_text
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, counted
from packplan.core.inspection import (
    PlanSummary,
    ScheduleSummary,
    SourceSummary,
    summarise,
    summarise_schedule,
    summarise_sources,
)
from packplan.core.samples.tables import column, video_totals
from packplan.core.surface import Figure, pack_figures, sample_figures

SHOWN = 10
"""Maximum number of epochs that are printed without --all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--split", choices=["train", "eval"], help="only this split (default: all splits of the run)")
    parser.add_argument(
        "--world-size", type=parse_ranks, metavar="N",
        help="number of ranks (a group that shares rows counts as one; default: the largest that a plan was built for)",
    )  # fmt: skip
    parser.add_argument(
        "--epoch", type=parse_number, metavar="N", help="epoch to show, if each epoch has its own plan (default: 0)"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--pack", type=parse_number, metavar="N", help="index of a pack to explain, from 0")
    one.add_argument("--sample", type=parse_number, metavar="N", help="index of a sample to explain, from 0")
    parser.add_argument(
        "--text", action="store_true", help="with --sample: print its text, with the trained parts marked"
    )
    parser.add_argument("--all", action="store_true", help="show all figures, digests, sources and bad records")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def run(options: argparse.Namespace) -> None:
    """Open the stored plans, and print their figures."""
    if options.text and options.sample is None:
        raise ConfigError.for_key("--text", "shows one sample: name it by --sample")
    config = read_run_or_command(options.config, options.overrides, world_size=options.world_size)
    explained = options.pack is not None or options.sample is not None
    splits = [
        # An evaluation has one epoch.
        open_split(config, name, world_size=options.world_size, epoch=options.epoch if name == "train" else None)
        for name in selected_splits(config, options.split or ("train" if explained else None))
    ]
    if explained:
        if options.sample is None:
            document = explain_pack(config, splits[0], options.pack)
        else:
            document = explain_sample(config, splits[0], options.sample, text=options.text)
        print(json.dumps(document, indent=2) if options.json else "\n".join(explanation_lines(document)))
    elif options.json:
        print(json.dumps({"splits": {one.split.name: as_document(one) for one in splits}}, indent=2))
    else:
        for one in splits:
            _print(config, one, everything=options.all)


def plan_summary(opened: StoredSplit) -> PlanSummary:
    """Return the plan's figures for the chosen epoch."""
    supervised = column(opened.split.table, "supervised")
    return summarise(opened.split.raw, opened.lengths.tokens, packed=opened.packed, supervised=supervised)


def schedule_summary(opened: StoredSplit) -> ScheduleSummary:
    """Return the figures of training the chosen epoch, and the number of steps of all epochs."""
    summary = summarise_schedule(
        opened.split.raw, opened.lengths.tokens, opened.schedule, packed=opened.packed, works=opened.split.works,
        epoch=opened.epoch,
    )  # fmt: skip
    return summary if opened.epochs is None else attrs.evolve(summary, total_steps=opened.epochs.total_steps)


def source_summaries(opened: StoredSplit) -> tuple[SourceSummary, ...]:
    """Return the plan's figures for each source; empty if no data files are stored with lengths."""
    files, rows = opened.lengths.origin.files, opened.lengths.rows
    return summarise_sources(opened.split.raw, rows.table, files, media=rows.media) if files else ()


def as_document(opened: StoredSplit) -> dict[str, Any]:
    """Return the figures of a split as values of a JSON document."""
    split, origin, epochs = opened.split, opened.lengths.origin, opened.epochs
    steps = (lambda _: 0) if epochs is None else epochs.num_epoch_steps
    records = [{**attrs.asdict(one), "steps": steps(one.epoch)} for one in opened.plan.epochs]
    return {
        "warnings": list(opened.warnings),
        "plan": attrs.asdict(plan_summary(opened)),
        "sources": [attrs.asdict(one) for one in source_summaries(opened)],
        "videos": attrs.asdict(video_totals(split.table, opened.lengths.rows.media)),
        "bad_records": [attrs.asdict(one) for one in origin.bad],
        "schedule": attrs.asdict(schedule_summary(opened)),
        "epochs": epochs and {"shown": opened.epoch, "total_steps": epochs.total_steps, "epochs": records},
        "checksums": _checksums(opened),
        "fingerprints": {
            name: {"sha256": key.digest, "inputs": dict(key.inputs)}
            for name, key in (("lengths", origin.key), ("plan", opened.plan.key))
        },
        "aligned_for": list(opened.plan.world_sizes),
    }


def _checksums(opened: StoredSplit) -> dict[str, str]:
    split = opened.split
    return {
        "raw_plan": split.raw_checksum, "aligned_plan": split.checksum, "lengths": opened.lengths.digest,
        "data": split.data_digest,
    }  # fmt: skip


def _print(config: RunConfig, opened: StoredSplit, *, everything: bool) -> None:
    console, name = plain_console(100), opened.split.name
    console.print(f"{name}:", style="bold")
    for line in opened.warnings:
        console.print(f"warning: {line}", style="yellow")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for group in figure_groups(opened):
        for figure in group:
            if figure.decides or everything:
                table.add_row(figure.name, figure.value, figure.remark)
        if everything:
            table.add_section()
    console.print(table, soft_wrap=False)
    _print_epochs(console, opened, most=None if everything else SHOWN)
    checksums = _checksums(opened)
    if not everything:
        console.print(f"raw_plan {checksums['raw_plan']}; --all prints every figure")
        return
    for bad in opened.lengths.origin.bad:
        console.print(config.name_settings(f"left out: {bad.where}: {bad.reason}"))
    for what, digest in checksums.items():
        console.print(f"{what} {digest}")
    for what, key in (("lengths", opened.lengths.origin.key), ("plan", opened.plan.key)):
        console.print(f"fingerprint of the {what} {key.digest}")


def _print_epochs(console: Console, opened: StoredSplit, *, most: int | None) -> None:
    """
    Print a line for each epoch, if epochs have their own plans: the first *most* epochs, or all if
    None.
    """
    epochs, records = opened.epochs, opened.plan.epochs
    if epochs is None:
        return
    table = Table()
    for name in ("epoch", "samples", "tokens", "packs", "fill", "steps", "sources"):
        table.add_column(name, justify="left" if name == "sources" else "right", overflow="fold")
    for one in records[:most]:
        table.add_row(
            f"{one.epoch:,}", f"{one.num_samples:,}", f"{one.num_tokens:,}", f"{one.num_packs:,}", f"{one.fill:.4f}",
            f"{epochs.num_epoch_steps(one.epoch):,}", source_draws_text(one, opened.lengths.origin.files),
        )  # fmt: skip
    console.print(table, soft_wrap=False)
    if most is not None and len(records) > most:
        console.print(f"… and {counted(len(records) - most, 'epoch')}; --all prints each")


def figure_groups(opened: StoredSplit) -> Iterator[Iterator[Figure]]:
    """Yield all figures of a split, in groups."""
    plan = plan_summary(opened)
    yield sample_figures(plan, packed=opened.packed)
    yield _source_figures(opened)
    yield _video_figures(opened)
    if opened.packed:
        yield pack_figures(plan)
    yield _schedule_figures(opened)


def _source_figures(opened: StoredSplit) -> Iterator[Figure]:
    sources = source_summaries(opened)
    if sources:
        yield Figure("sources", "sources", f"{len(sources):,}", "samples of each:")
    for one in sources:
        shapes = sorted({file.shape for file in one.files})
        parts = [
            counted(one.num_tokens, "token"),
            f"{one.supervised_tokens:,} supervised",
            f"longest {one.longest_sample:,}",
            counted(one.images, "image") if one.images else "",
            _describe_videos(one) if one.videos else "",
            f"in {counted(one.num_packs, 'pack')}" if opened.packed else "",
            f"{one.dropped_samples:,} dropped" if one.dropped_samples else "",
            f"{one.skipped_samples:,} skipped" if one.skipped_samples else "",
            f"{counted(one.bad_records, 'record')} left out" if one.bad_records else "",
        ]
        said = ", ".join(part for part in parts if part)
        yield Figure("num_samples", f"  {one.name}", f"{one.num_samples:,}", f"{said}; {' / '.join(shapes)}")
        if one.num_samples:
            low, median, high = one.length_quantiles
            remark = f"tokens, the median; 5 % have up to {low:,}, 95 % up to {high:,}"
            yield Figure("length_quantiles", "    lengths", f"{median:,}", remark)


def _describe_videos(source: SourceSummary) -> str:
    """Return text about the videos of a source."""
    seconds = f"{source.video_milliseconds / 1000:,.1f} s"
    return f"{counted(source.videos, 'video')} ({seconds}, {source.frames:,} frames, {source.video_patches:,} patches)"


def _video_figures(opened: StoredSplit) -> Iterator[Figure]:
    videos = video_totals(opened.split.table, opened.lengths.rows.media)
    if not videos.videos:
        return
    remark = f"{videos.seconds:,.1f} s; {videos.decoded:,} were decoded to be measured"
    yield Figure("videos", "videos", f"{videos.videos:,}", remark)
    yield Figure("frames", "  frames", f"{videos.frames:,}", "that are sampled from all videos")
    yield Figure("patches", "  patches", f"{videos.patches:,}", "of two frames each, before merging")


def _schedule_figures(opened: StoredSplit) -> Iterator[Figure]:
    schedule, trains = schedule_summary(opened), opened.split.name == "train"
    unit, several = "packs" if opened.packed else "samples", schedule.world_size > 1
    when = "an epoch" if opened.epochs is None else f"in epoch {opened.epoch}"
    remark = f"{when}, {schedule.total_steps:,} in total; {schedule.effective_batch_size:,} {unit} a step"
    name = "optimizer steps" if trains else "forward passes"
    yield Figure("steps_per_epoch", name, f"{schedule.steps_per_epoch:,}", remark, decides=trains)
    remark = f"of each rank in a step; {schedule.last_step_batches:,} in an epoch's last step"
    yield Figure("gradient_accumulation_steps", "  batches", f"{schedule.gradient_accumulation_steps:,}", remark)
    repeated = f"; {schedule.repeated_packs:,} repeated in all" if schedule.repeated_packs else ""
    left = f"; {schedule.unaligned_packs:,} dropped in all" if schedule.unaligned_packs else ""
    remark = f"{schedule.packs_per_rank:,} {unit} each in an epoch{repeated}{left}"
    yield Figure("world_size", "ranks", f"{schedule.world_size:,}", remark, decides=several)
    for ranks, packs in schedule.packs_by_degree.items() if len(schedule.packs_by_degree) > 1 else ():
        remark = f"{counted(int(ranks), 'rank')}; no rank computes more than {schedule.rank_tokens:,} tokens at once"
        yield Figure("packs_by_degree", "  packs on", f"{packs:,}", remark, decides=several)
    padded = "" if opened.packed else ", padded to the longest of a batch"
    remark = f"FLOPs of a step, all ranks, of {'an ordinary' if opened.estimated else 'the'} model{padded}"
    yield Figure("work_per_step", "  work", f"{schedule.work_per_step:,.4g}", remark)
    remark = f"busiest rank over the mean; worst step {schedule.worst_work_imbalance:.3f}"
    yield Figure("work_imbalance", "  imbalance", f"{schedule.work_imbalance:.4f}", remark, decides=several)
    remark = "imbalance if ranks wait for each other in each microbatch"
    yield Figure("microbatch_imbalance", "  of microbatches", f"{schedule.microbatch_imbalance:.4f}", remark)
