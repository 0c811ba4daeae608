"""
Figures of a plan in words: one list for `plan show`, its report, scripts and notebooks.

What shows them lays them out, and words none again. JSON documents have the same figures by key.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from packplan.core.errors import counted, verb_for
from packplan.core.inspection import BOUNDS, PlanSummary


@attrs.frozen
class Figure:
    """One figure of a plan or of its training, in words."""

    key: str
    """Field of `PlanSummary` or another summary: its name in a JSON document."""

    name: str
    """Name for people; indented below the figure that it is a part of."""

    value: str

    remark: str
    """Unit, and what else belongs to the value."""

    decides: bool = False
    """Whether it is shown where not all figures are."""


def sample_figures(plan: PlanSummary, *, packed: bool = True) -> Iterator[Figure]:
    """
    Yield the figures of a plan's samples and tokens.

    Args:
        plan: Figures as numbers.
        packed: Whether samples share packs.
    """
    yield Figure("num_samples", "samples", f"{plan.num_samples:,}", counted(plan.num_tokens, "token"), decides=True)
    remark = f"{counted(plan.planned_tokens, 'token')}, {plan.token_coverage:.2%}"
    yield Figure("planned_samples", "  planned", f"{plan.planned_samples:,}", remark)
    if packed:
        remark = f"{counted(plan.dropped_tokens, 'token')}, in {counted(plan.dropped_packs, 'underfilled pack')}"
        yield _left_out("dropped_samples", "  dropped", plan.dropped_samples, remark)
    remark = counted(plan.skipped_tokens, "token")
    yield _left_out("skipped_samples", "  skipped, too long", plan.skipped_samples, remark)
    if packed:
        remark = counted(plan.long_tokens, "token")
        yield _left_out("long_samples", "  long, packs of their own", plan.long_samples, remark)
    if plan.supervised_tokens is not None and plan.unsupervised_samples is not None:
        remark = f"{plan.supervised_tokens / plan.planned_tokens:.1%} of the planned ones: the loss counts them"
        yield Figure("supervised_tokens", "supervised tokens", f"{plan.supervised_tokens:,}", remark)
        name, remark = "  without supervised tokens", "nothing is learned from them"
        yield _left_out("unsupervised_samples", name, plan.unsupervised_samples, remark)


def pack_figures(plan: PlanSummary) -> Iterator[Figure]:
    """Yield the figures of packs of several samples."""
    remark = f"of {counted(plan.packing_length, 'token')}; no plan has fewer than {plan.lower_bound:,}"
    yield Figure("num_packs", "packs", f"{plan.num_packs:,}", remark, decides=True)
    if plan.auto_packs:
        remark = "about, by packing_algorithm: auto"
        yield Figure("auto_packs", "  by auto", f"{plan.auto_packs:,}", remark, decides=True)
    yield Figure("samples_per_pack", "  samples of each", f"{plan.samples_per_pack:.2f}", "on average")
    exceed = verb_for(plan.oversized_packs, "exceeds", "exceed")
    remark = f"tokens; {plan.oversized_packs:,} {exceed} 110 % of the packing length"
    yield Figure("longest_pack", "  longest", f"{plan.longest_pack:,}", remark)
    remark = f"dropped ones counted; {BOUNDS[plan.bound_kind]}"
    yield Figure("gap", "  above the lower bound", f"{plan.gap:.3%}", remark)
    remark = f"95 % of packs reach {plan.fill_p5:.4f}"
    yield Figure("fill_mean", "  fill", f"{plan.fill_mean:.4f}", remark, decides=True)
    yield Figure("fill_worst", "  worst fill", f"{plan.fill_worst:.4f}", "a long pack counts as full")
    remark = "of the positions, estimated"
    yield Figure("padding_saved", "  saved against padding", f"{plan.padding_saved:.1%}", remark, decides=True)


def _left_out(key: str, name: str, number: int, remark: str) -> Figure:
    """Return a figure that matters only if it is not 0."""
    return Figure(key, name, f"{number:,}", remark, decides=number > 0)
