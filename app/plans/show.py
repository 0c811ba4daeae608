"""
Show what is stored: what the plan takes in and leaves out, how full its packs are, and what training over it looks like.

Reads the artefacts of build alone: no data, no model, neither torch nor ms-swift. Whether they still fit the data is
what verify finds. With --pack or --sample, one pack or sample is explained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from app import wiring_light
from app.command import positive_number, whole_number
from app.explaining import Explainer, as_text
from app.looking import Look, as_document, look, splits_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("config", metavar="run.yaml", help="the run; see docs/configuration.md")
    parser.add_argument("--split", choices=["train", "eval"], help="only this one (default: all that the run has)")
    parser.add_argument(
        "--world-size", type=positive_number, metavar="N", help="ranks (default: the most that were built for)"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--pack", type=whole_number, metavar="N", help="explain this pack of the plan, from 0")
    one.add_argument("--sample", type=whole_number, metavar="N", help="explain this sample, from 0")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Look, then print."""
    config = wiring_light.read_config(options.config)
    explained = options.pack is not None or options.sample is not None
    splits = splits_of(config, options.split or ("train" if explained else None))
    seen = [look(config, split, world_size=options.world_size) for split in splits]
    if explained:
        explainer = Explainer.of(config, seen[0])
        document = explainer.sample(options.sample) if options.pack is None else explainer.pack(options.pack)
        print(json.dumps(document, indent=2) if options.json else "\n".join(as_text(document)))
    elif options.json:
        print(json.dumps({"splits": {one.stored.name: as_document(one) for one in seen}}, indent=2))
    else:
        for one in seen:
            _print(one)


def _print(seen: Look) -> None:
    console = Console(width=None if Console().is_terminal else 100, highlight=False)
    console.print(f"{seen.stored.name}: {seen.stored.folder}", style="bold", markup=False, soft_wrap=True)
    for line in seen.warnings:
        console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for row in figures(seen):
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    console.print(table)
    for name, digest in as_document(seen)["checksums"].items():
        console.print(f"{name} {digest}", markup=False, soft_wrap=True)
    for name, key in (("lengths", seen.stored.lengths.origin.key), ("plan", seen.stored.plan.key)):
        console.print(f"fingerprint of the {name} {key.digest}", markup=False, soft_wrap=True)


def figures(seen: Look) -> Iterator[tuple[str, str, str] | None]:
    """Yield the figures of a look for people: what, how much, and a remark; None between groups."""
    plan, course = seen.plan_summary, seen.course_summary
    packed = seen.stored.packed
    yield "samples", f"{plan.num_samples:,}", f"{plan.num_tokens:,} tokens"
    yield "  planned", f"{plan.planned_samples:,}", f"{plan.planned_tokens:,} tokens, {plan.token_coverage:.2%}"
    if packed:
        yield "  long, packs of their own", f"{plan.long_samples:,}", f"{plan.long_tokens:,} tokens"
        yield "  dropped, in underfilled packs", f"{plan.dropped_samples:,}", f"{plan.dropped_tokens:,} tokens"
    yield "  skipped, too long", f"{plan.skipped_samples:,}", f"{plan.skipped_tokens:,} tokens"
    yield None
    if packed and plan.gap is not None and plan.padding_saved is not None:
        yield (
            "packs",
            f"{plan.num_packs:,}",
            f"of {plan.packing_length:,} tokens, {plan.samples_per_pack:.2f} samples each",
        )
        yield "  dropped, underfilled", f"{plan.dropped_packs:,}", ""
        yield (
            "  above the lower bound",
            f"{plan.gap:.3%}",
            f"dropped ones counted; no plan has fewer than {plan.lower_bound:,}",
        )
        yield (
            "fill",
            f"{plan.fill_mean:.4f}",
            f"95 % of the packs reach {plan.fill_p5:.4f}, the worst has {plan.fill_worst:.4f}",
        )
        yield "saved against padding", f"{plan.padding_saved:.1%}", "of the positions, estimated"
        yield None
    unit = "packs" if packed else "samples"
    step = "optimizer steps" if seen.stored.name == "train" else "forward passes"
    yield "ranks", f"{course.world_size:,}", f"{course.packs_per_rank:,} {unit} each in an epoch"
    yield f"  repeated {unit}", f"{course.repeated_packs:,}", "to fill the ranks"
    yield f"  dropped {unit}", f"{course.unaligned_packs:,}", "that do not fill the ranks"
    if seen.stored.name == "train":
        yield (
            "effective batch", f"{course.effective_batch_size:,}",
            f"{unit} a step, {course.gradient_accumulation_steps:,} batches of each rank",
        )  # fmt: skip
    yield step, f"{course.steps_per_epoch:,}", f"an epoch, {course.total_steps:,} in total"
    if course.last_step_batches < course.gradient_accumulation_steps:
        yield "  ragged window", f"{course.last_step_batches:,}", "batches of each rank in an epoch's last step"
    yield "attention work", f"{course.work_per_step:,.4g}", "a step, all ranks: sum of the squared lengths"
    yield (
        "  imbalance", f"{course.work_imbalance:.3f}",
        f"the busiest rank over the mean; {course.worst_work_imbalance:.3f} in the worst step",
    )  # fmt: skip
