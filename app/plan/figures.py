"""The figures of a split, for people to read: in a terminal, on a page."""

from __future__ import annotations

from collections.abc import Iterator

from app.plan.stored import Look
from app.planning.log_lines import BOUNDS
from core.errors import agree, counted

Row = tuple[str, str, str]
"""What, how much, and a remark."""


def figures(seen: Look) -> list[list[Row]]:
    """Return the figures of a look, in groups."""
    groups = [_samples(seen), _packs(seen), _epoch(seen)]
    return [rows for group in groups if (rows := list(group))]


def _samples(seen: Look) -> Iterator[Row]:
    plan, packed = seen.plan_summary, seen.stored.packed
    yield "samples", f"{plan.num_samples:,}", counted(plan.num_tokens, "token")
    yield (
        "  planned",
        f"{plan.planned_samples:,}",
        f"{counted(plan.planned_tokens, 'token')}, {plan.token_coverage:.2%}",
    )
    if packed:
        yield "  long, packs of their own", f"{plan.long_samples:,}", counted(plan.long_tokens, "token")
        yield "  dropped, in underfilled packs", f"{plan.dropped_samples:,}", counted(plan.dropped_tokens, "token")
    yield "  skipped, too long", f"{plan.skipped_samples:,}", counted(plan.skipped_tokens, "token")


def _packs(seen: Look) -> Iterator[Row]:
    plan = seen.plan_summary
    if plan.gap is None or plan.padding_saved is None:
        return
    yield (
        "packs",
        f"{plan.num_packs:,}",
        f"of {counted(plan.packing_length, 'token')}, {plan.samples_per_pack:.2f} samples each",
    )
    yield (
        "  longest",
        f"{plan.longest_pack:,}",
        f"tokens; {plan.oversized_packs:,} {agree(plan.oversized_packs, 'exceeds', 'exceed')} 110 % of the packing length",
    )
    yield "  dropped, underfilled", f"{plan.dropped_packs:,}", ""
    yield (
        "  above the lower bound",
        f"{plan.gap:.3%}",
        f"dropped ones counted; no plan has fewer than {plan.lower_bound:,} ({BOUNDS[plan.bound_kind]})",
    )
    yield (
        "fill",
        f"{plan.fill_mean:.4f}",
        f"95 % of packs reach {plan.fill_p5:.4f}, the worst {plan.fill_worst:.4f}"
        + ("; a long pack counts as full" if plan.long_samples else ""),
    )
    yield "saved against padding", f"{plan.padding_saved:.1%}", "of the positions, estimated"


def _epoch(seen: Look) -> Iterator[Row]:
    course, packed = seen.course_summary, seen.stored.packed
    unit = "packs" if packed else "samples"
    if seen.attention is not None:
        yield "attention", seen.attention.name, seen.attention.reason
    step = "optimizer steps" if seen.stored.name == "train" else "forward passes"
    yield "ranks", f"{course.world_size:,}", f"{course.packs_per_rank:,} {unit} each in an epoch"
    yield f"  repeated {unit}", f"{course.repeated_packs:,}", "to fill the ranks"
    yield f"  dropped {unit}", f"{course.unaligned_packs:,}", "that do not fill the ranks"
    if seen.stored.name == "train":
        yield (
            "effective batch", f"{course.effective_batch_size:,}",
            f"{unit} a step, {counted(course.gradient_accumulation_steps, 'batch')} of each rank",
        )  # fmt: skip
    yield step, f"{course.steps_per_epoch:,}", f"an epoch, {course.total_steps:,} in total"
    if course.last_step_batches < course.gradient_accumulation_steps:
        yield "  ragged window", f"{course.last_step_batches:,}", "batches of each rank in an epoch's last step"
    squared = "squared lengths" if packed else "squared lengths, padded to the longest of a batch"
    yield "attention work", f"{course.work_per_step:,.4g}", f"a step, all ranks: sum of the {squared}"
    yield (
        "  imbalance", f"{course.work_imbalance:.3f}",
        f"busiest rank over the mean; worst step {course.worst_work_imbalance:.3f}",
    )  # fmt: skip
