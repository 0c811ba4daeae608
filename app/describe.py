"""What there is to say of a planned split, in the words that the documentation explains."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType

from app.planning import Knobs, PlannedSplit
from core.errors import counted
from core.patterns.certificate import BoundKind
from core.review import LowFill, longest_pack, low_fill
from core.samples import column

WORTH_A_WARNING = Fraction(1, 100)
"""Share of the tokens that may be dropped without a warning, where `training.packing_max_dropped_share` is no lower."""

BOUNDS: Mapping[BoundKind, str] = MappingProxyType(
    {"quick": "quick bound", "relaxation": "linear relaxation", "reached": "a packing reaches it"}
)
"""What is said of each kind of lower bound."""


def describe(planned: PlannedSplit, knobs: Knobs, *, world_size: int) -> Iterator[tuple[int, str]]:
    """Yield what there is to say of a planned split, each line with its log level."""
    raw, aligned, name = planned.raw, planned.aligned, planned.name
    info, warning = logging.INFO, logging.WARNING
    held = "padded batches; each counts as a pack of its own below"
    if knobs.packing:
        counts = f", {len(raw.dropped_packs):,} dropped ones counted" if raw.dropped_packs else ""
        held = (
            f"{len(raw.packs):,} packs, fill {raw.fill:.4f}, no plan has fewer than {raw.lower_bound:,} packs{counts} "
            f"({BOUNDS[raw.bound_kind]})"
        )
    yield (
        info,
        (
            f"{name}: {raw.num_samples:,} samples, {raw.num_tokens:,} tokens; packing_length {raw.packing_length:,}; "
            f"{raw.planned_samples:,} samples in {held}"
        ),
    )
    yield (
        info,
        (
            f"{name}: N_raw_packs {len(raw.packs):,}, N_aligned_packs {len(aligned.packs):,}, world_size {world_size}, "
            f"dataloader_drop_last {str(knobs.dataloader_drop_last).lower()}"
        ),
    )
    if aligned.pad_needed:
        shown = ", ".join(map(str, aligned.repeated[:20])) + (", …" if aligned.pad_needed > 20 else "")
        yield info, f"{name}: pad_needed {aligned.pad_needed:,}, repeated packs of the raw plan [{shown}]"
    if aligned.num_dropped:
        first = len(raw.packs) - aligned.num_dropped
        yield (
            warning,
            (
                f"{name}: the last {aligned.num_dropped:,} packs (from {first:,}) are not trained, in no epoch; "
                "training.dataloader_drop_last: false trains them"
            ),
        )
    if knobs.packing:
        yield from _describe_packs(planned, knobs)
    yield info, f"{name}: raw_plan checksum {planned.raw_checksum}"
    yield info, f"{name}: aligned_plan checksum {planned.checksum} (world_size {world_size})"
    yield from _describe_exceptions(planned, knobs)


def _describe_packs(planned: PlannedSplit, knobs: Knobs) -> Iterator[tuple[int, str]]:
    """Yield how long packs are, and why many of them are filled badly."""
    raw, name = planned.raw, planned.name
    lengths = column(planned.table, "length")
    longest = longest_pack(raw, lengths)
    line = f"{name}: the longest pack has {counted(longest.tokens, 'token')}"
    if longest.num_oversized:
        number = longest.num_oversized
        line += (
            f"; {counted(number, 'pack')}, {'a long sample' if number == 1 else 'each a long sample'}, "
            f"{'exceeds' if number == 1 else 'exceed'} the packing length of {raw.packing_length:,} by more than 10 %; "
            "training.packing_allow_single_long: false skips long samples"
        )
    yield logging.WARNING if longest.num_oversized else logging.INFO, line
    low = low_fill(raw, lengths)
    if low is not None:
        yield logging.WARNING, f"{name}: fill is {low.fill:.4f}, since {_reason(low, knobs)}"


def _reason(low: LowFill, knobs: Knobs) -> str:
    longer = "a higher template.max_length may fit them (python -m app.plan whatif compares)"
    if low.reason == "algorithm":
        way = "no other finds fewer" if knobs.algorithm == "certified" else "certified finds the fewest"
        return (
            f"training.packing_algorithm {knobs.algorithm} makes {low.num_packs:,} packs of samples for which "
            f"{low.lower_bound:,} may be enough; {way}"
        )
    if low.reason == "partners":
        return (
            f"{low.num_alone:,} samples of more than half the packing length are packs by themselves: no other sample is "
            f"left that fits beside them; {longer}"
        )
    return (
        f"the lengths (median {low.median:,} tokens) do not add up to the packing length, and no plan has fewer than "
        f"{low.lower_bound:,} packs of them; {longer}"
    )


def _describe_exceptions(planned: PlannedSplit, knobs: Knobs) -> Iterator[tuple[int, str]]:
    raw, name = planned.raw, planned.name
    info, warning = logging.INFO, logging.WARNING
    cut = int(column(planned.table, "cut").sum())
    if cut:
        yield (
            warning,
            (
                f"{name}: {cut:,} samples are cut to {raw.packing_length:,} tokens (template.truncation_strategy); "
                "cut samples are long samples"
            ),
        )
    if raw.single_long and knobs.packing:
        yield (
            info,
            (
                f"{name}: {len(raw.single_long):,} samples have {raw.packing_length:,} tokens or more and are packs of "
                f"their own, {len(raw.single_long) - cut:,} of them uncut: {_shown(raw.single_long)}"
            ),
        )
    if raw.skipped_long:
        yield (
            warning,
            (
                f"{name}: {len(raw.skipped_long):,} samples ({raw.skipped_tokens:,} tokens) have {raw.packing_length:,} "
                f"tokens or more and are skipped: {_shown(raw.skipped_long)}; raise template.max_length, lower "
                "template.max_pixels, or set training.packing_allow_single_long: true"
            ),
        )
    if len(raw.dropped_packs):
        are = "pack filled below {} is" if len(raw.dropped_packs) == 1 else "packs filled below {} are"
        yield (
            (warning if raw.dropped_share > min(WORTH_A_WARNING, Fraction(knobs.max_dropped_share)) else info),
            (
                f"{name}: {len(raw.dropped_packs):,} {are.format(knobs.min_fill_ratio)} dropped "
                f"({counted(raw.dropped_samples, 'sample')}, {counted(raw.dropped_tokens, 'token')}, "
                f"{float(raw.dropped_share):.2%} of all); "
                "training.packing_drop_last: false keeps them, a lower training.packing_min_fill_ratio keeps more"
            ),
        )


def _shown(indices: tuple[int, ...]) -> str:
    return ", ".join(map(str, indices[:10])) + (", …" if len(indices) > 10 else "")
