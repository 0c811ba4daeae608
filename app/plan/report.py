"""
Write a page about a stored plan.

The page shows lengths by source, the fill of packs, left-out samples, work by step and rank, and
numbers of packs by other algorithms. It also has all figures of `plan show --all`. If the run was
trained, the page shows the time and memory of its training. The page is one HTML file that loads no
other files and runs no scripts. It supports light and dark mode, and phones.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from packplan.adapters.report import HEAD, ReportedPlan, Row, render_page
from packplan.app.cli.command import add_config_arguments, parse_ranks, time_text
from packplan.app.opening.commands import read_run_or_command
from packplan.app.opening.stores import write_new_file
from packplan.app.plan.show import figure_groups, plan_summary
from packplan.app.plan.stored import StoredSplit, open_split, selected_splits
from packplan.core.errors import counted
from packplan.core.inspection import packs_by_algorithm, work_of_steps
from packplan.core.lengths import IntArray
from packplan.core.schedule import EpochStats, PackStats
from packplan.core.surface import COLOURS, Figure, draw_first_packs

SHOWN = 50
"""Maximum number of rows of a table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="page (default: report.html)"
    )
    parser.add_argument("--split", choices=["train", "eval"], help="only this split (default: all splits of the run)")
    parser.add_argument(
        "--world-size",
        type=parse_ranks,
        metavar="N",
        help="number of ranks (default: the largest that a plan was built for)",
    )


def run(options: argparse.Namespace) -> None:
    """Open the stored plans, and write the page about them."""
    config = read_run_or_command(options.config, options.overrides, world_size=options.world_size)
    names = selected_splits(config, options.split)
    opened = [open_split(config, name, world_size=options.world_size) for name in names]
    folder = Path(config.training.output_dir)
    plans = [reported_plan(one, _measured(folder) if one.split.name == "train" else ()) for one in opened]
    write_new_file(options.output, render_page(str(folder), plans), replaces=HEAD)
    print(f"the report is in {options.output}")


def reported_plan(opened: StoredSplit, measured: Iterable[Figure] = ()) -> ReportedPlan:
    """
    Return a split's plan as the content of the page.

    Args:
        opened: Stored lengths and plan of the split.
        measured: Figures that a training run has measured.
    """
    split, schedule, lengths = opened.split, opened.schedule, opened.lengths.tokens
    stats = PackStats.from_plan(split.raw, lengths, packed=opened.packed, works=split.works)
    works = EpochStats.from_schedule(stats, schedule, opened.epoch).step_works(0, schedule.steps_per_epoch)
    others, packed = split.policy.max_images is None, opened.packed
    return ReportedPlan(
        split.name, split.raw, lengths, plan_summary(opened), [*figure_groups(opened), measured],
        _source_lengths(opened),
        needs=packs_by_algorithm(split.raw, lengths, others=others) if packed else {},
        drawings=draw_first_packs(split.raw, lengths) if packed else (),
        works=work_of_steps(works),
        tables=[table for table in _tables(opened) if table[2]],
        warnings=opened.warnings,
    )  # fmt: skip


def _source_lengths(opened: StoredSplit) -> dict[str, IntArray]:
    """
    Return the sample lengths of each of the largest sources, and of all other sources together.
    """
    lengths, files = opened.lengths.tokens, opened.lengths.origin.files
    if not files:
        return {"samples": lengths[lengths > 0]}
    names = np.repeat([file.source for file in files], [file.records for file in files])
    found = {name: lengths[(names == name) & (lengths > 0)] for name in dict.fromkeys(file.source for file in files)}
    ranked = sorted((name for name in found if found[name].size), key=lambda name: -int(found[name].sum()))
    first, others = ranked[: len(COLOURS) - 1], ranked[len(COLOURS) - 1 :]
    joined = {counted(len(others), "other source"): np.concatenate([found[name] for name in others])} if others else {}
    return {name: found[name] for name in first} | joined


def _tables(opened: StoredSplit) -> Iterator[tuple[str, Row, Sequence[Row]]]:
    plan, bad = plan_summary(opened), opened.lengths.origin.bad
    rows = [
        ("packs below training.packing_min_fill_ratio", plan.dropped_samples, plan.dropped_tokens),
        ("long, and training.packing_allow_single_long is false", plan.skipped_samples, plan.skipped_tokens),
    ]
    left_out = [(reason, f"{samples:,}", f"{tokens:,}") for reason, samples, tokens in rows if samples]
    reasons = Counter(one.reason for one in bad).most_common(SHOWN)
    left_out += [(reason, f"{number:,}", "not measured") for reason, number in reasons]
    yield "Left out, and why", ("reason", "records", "tokens"), left_out
    epochs = opened.epochs
    if epochs is not None:
        numbers = [
            (one.epoch, one.num_samples, one.num_packs, epochs.num_epoch_steps(one.epoch)) for one in opened.plan.epochs
        ]
        shown = [tuple(f"{number:,}" for number in row) for row in numbers[:SHOWN]]
        yield f"Steps of {counted(len(numbers), 'epoch')}", ("epoch", "samples", "packs", "steps"), shown


def _measured(folder: Path) -> Iterator[Figure]:
    """Yield step time and peak memory from the log of a training run, if there is a log."""
    log = folder / "logging.jsonl"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    seconds, memory = (
        [float(number) for number in re.findall(rf'"{re.escape(key)}": ([\d.]+)', text)]
        for key in ("train_speed(s/it)", "memory(GiB)")
    )
    if seconds:
        remark = "mean of the last training run"
        yield Figure("step_seconds", "seconds of a step, measured", time_text(seconds[-1]), remark)
    if memory:
        yield Figure("peak_memory", "peak memory, measured", f"{max(memory):.2f} GiB", "of rank 0")
