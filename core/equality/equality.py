"""
Check that packed training equals unpacked training: choice of packs, limits of deviations,
verdicts.

Rounding differs between a pack and its samples alone, since sums are taken in another order. So
numbers are compared relative to their scale, with limits by precision. The scale is that of the
terms, not of their sum: a loss is a difference of a log-sum-exp and a logit, and gradients of
samples cancel. Whole numbers have to be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import attrs
import numpy as np

from packplan.core.packs import Packs
from packplan.core.samples import Table, column, num_media

Precision = Literal["float32", "float16", "bfloat16"]

CHECKS = MappingProxyType(
    {
        "positions": "position ids, row by row, that differ from those of the samples alone",
        "labels": "targets of the loss that differ from those of the samples alone",
        "logits": "largest difference of a logit, over the largest logit",
        "sample loss": "difference of a sample's mean loss, "
        "over that loss, or over a tenth of the logits where that is more",
        "step loss": "difference of the pack's loss as training computes it, over the scale of 'sample loss'",
        "gradients": "norm of the gradients' difference, over the sum of the norms of each sample's own",
        "isolation": "largest move of a logit when another sample changes, over the largest logit",
        "sensitivity": "largest move of a changed sample's own logits, over the largest logit",
    }
)
"""Checks -> meaning of their number."""

# A leak was measured to move logits by their own scale. Rounding moves them by the precision times
# some hundred.
_LIMITS: Mapping[str, Mapping[Precision, float]] = MappingProxyType(
    {
        "positions": {"float32": 0, "float16": 0, "bfloat16": 0},
        "labels": {"float32": 0, "float16": 0, "bfloat16": 0},
        "logits": {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2},
        "sample loss": {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2},
        "step loss": {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2},
        "gradients": {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1},
        "isolation": {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3},
    }
)

_LOSS_SHARE = 0.1
"""
A loss below this share of its terms is compared with that share of them, since rounding follows the
logits.
"""

SENSITIVITY_FACTOR = 100
"""A changed sample's own logits have to move by this factor times the limit for other samples."""


@attrs.frozen
class Deviation:
    """Difference of one number between a pack and its samples alone."""

    check: str
    """A key of `CHECKS`."""

    value: float

    pack: int
    """Pack index in the plan."""

    sample: int | None = None
    """Index of the sample; None if the number belongs to the whole pack."""

    detail: str = ""
    """Place inside the sample or pack."""


@attrs.frozen
class Verdict:
    """Worst deviation of a check, and whether it is within the limit."""

    check: str
    worst: Deviation
    limit: float
    passed: bool


def loss_difference(found: float, expected: float, *, terms: float) -> float:
    """
    Return the difference of a mean loss from the expected one, relative to the scale of its
    rounding.

    Args:
        found: Mean loss in the pack.
        expected: Mean loss of the samples alone, >= 0.
        terms: Mean size of the terms of a token's loss: its log-sum-exp and the absolute logit of
            the target. At least *expected*.

    >>> loss_difference(2.5, 2.0, terms=4.0), loss_difference(0.5, 0.0, terms=20.0)
    (0.25, 0.25)
    """
    if found == expected:
        return 0.0
    scale = max(expected, _LOSS_SHARE * terms)
    return abs(found - expected) / scale if scale else math.inf


def judge(findings: Iterable[Deviation], *, precision: Precision) -> tuple[Verdict, ...]:
    """
    Return the verdict on each check that has a deviation, in the order of `CHECKS`.

    >>> findings = [Deviation("logits", 3e-6, 0, 1), Deviation("logits", 2.0, 0, 4)]
    >>> judge(findings, precision="float32")[0].worst.sample
    4
    """
    found: dict[str, list[Deviation]] = {}
    for finding in findings:
        found.setdefault(finding.check, []).append(finding)
    verdicts = []
    for check in filter(found.get, CHECKS):
        # The sensitivity has to be high, all else low. NaN is worse than any number.
        sign, of, factor = (1, "isolation", SENSITIVITY_FACTOR) if check == "sensitivity" else (-1, check, 1)
        limit = factor * _LIMITS[of][precision]
        worst = min(found[check], key=lambda finding: (not math.isnan(finding.value), sign * finding.value))
        verdicts.append(Verdict(check, worst, limit, passed=sign * worst.value >= sign * limit))
    return tuple(verdicts)


def kind(images: Sequence[int]) -> str:
    """
    Return the kind of a pack by its images: `text`, `image`, `several images`, or `mixed`.

    Args:
        images: Number of images of each sample.
    """
    kinds = {min(number, 2) for number in images}
    if len(kinds) > 1 and 0 in kinds:
        return "mixed"
    return {0: "text", 1: "image", 2: "several images"}[max(kinds)]


def choose_packs(packs: Packs, table: Table, *, count: int) -> list[int]:
    """
    Return the indices of up to *count* packs of several samples, in their order.

    The pack of most samples of each kind comes first, then packs spread over the plan.

    Args:
        packs: Packs of the plan.
        table: Measurements of all samples.
        count: Limit of packs, >= 1.
    """
    sizes = packs.sizes()
    several = np.flatnonzero(sizes > 1)
    images = np.minimum(num_media(table), 2)
    if not several.size:
        return []
    # Media of a pack's samples as bits: 1 for none, 2 for one image or video, 4 for several.
    held = np.bitwise_or.reduceat(1 << images[packs.indices], packs.offsets[:-1])[several]
    mixed = (held > 1) & (held % 2 == 1)
    kinds = np.where(mixed, 3, np.where(held >= 4, 2, np.where(held >= 2, 1, 0)))
    shows = np.bitwise_or.reduceat(column(table, "videos")[packs.indices] > 0, packs.offsets[:-1])[several]
    kinds = np.where(shows, kinds + 4, kinds)
    chosen = [int(several[kinds == one][np.argmax(sizes[several][kinds == one])]) for one in np.unique(kinds)[::-1]]
    spread = several[np.linspace(0, several.size - 1, num=min(several.size, 2 * count)).astype(int)].tolist()
    chosen += [position for position in spread if position not in chosen]
    return sorted(chosen[:count])
