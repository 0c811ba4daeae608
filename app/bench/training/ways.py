"""
Ways to train the same samples, and the figures of what they cost; without torch, so that the
command can refuse its options.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from packplan.app.bench.table import aligned
from packplan.core.schedule import EpochStats

AUTO, SDPA, FLEX, FLASH = "auto", "sdpa", "flex_attention", "flash_attention_2"
"""Values of `model.attn_impl`."""

REFERENCE_PACK = 2048
"""Tokens of the pack that others are compared with, where it is among them."""

_NEAR_EQUAL = "padded-sorted"

_PADDED = "padded"


@attrs.frozen
class Way:
    """How samples become forward passes."""

    rows: Literal["packs", "padded", "sorted", "alone"]
    """
    What one forward pass sees: a pack; a padded batch of random samples, or of samples of like
    length; one sample.
    """

    attn_impl: str

    whole_rows: bool
    """
    Whether attention compares all positions of a row with each other, because a dense mask says
    which it needs; else each token with those before it in its sample.
    """

    def pairs(self, epoch: EpochStats, num_steps: int) -> float:
        """
        Return the pairs of positions that attention compares in the first *num_steps* steps of an
        epoch, at least one.
        """
        # The squares of the samples' lengths where samples are packed; else of what each takes in
        # its batch.
        squares = int(epoch.works(0, num_steps).sum())
        if not self.whole_rows:
            return (squares + epoch.tokens(0, num_steps).total) / 2
        if not epoch.pack_stats.packed:
            return squares
        rows = epoch.pack_stats.tokens[epoch.order[: num_steps * epoch.packs_per_step]]
        return float((rows**2).sum())


WAYS = {
    "packed": Way("packs", AUTO, whole_rows=False),
    "packed-dense": Way("packs", SDPA, whole_rows=True),
    "packed-flex": Way("packs", FLEX, whole_rows=False),
    "packed-flash": Way("packs", FLASH, whole_rows=False),
    "padded": Way("padded", AUTO, whole_rows=True),
    "padded-sorted": Way("sorted", AUTO, whole_rows=True),
    "alone": Way("alone", AUTO, whole_rows=False),
}
"""Name -> way: the one place that says which attention each way trains with."""

DEFAULT_WAYS = ("packed", "packed-dense", "padded", "padded-sorted", "alone")
"""Ways that need neither a GPU nor a package more."""


@attrs.frozen
class Setting:
    """What all cases share."""

    device: str
    """`cpu` or `cuda`."""

    shape: str
    """Layout of the model: `tiny` or `3b`."""

    num_samples: int
    """Samples of each kind."""

    repeat: int
    """Epochs that count, beside one before them that warms up."""


@attrs.frozen
class Ratio:
    """
    How many times as fast one case is as another, over rounds in which both trained an epoch one
    after the other.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], others: Sequence[float]) -> Ratio:
        """
        Return the ratios of two speeds, round by round.

        >>> Ratio.of([2.0, 6.0, 9.0], [1.0, 2.0, 6.0])
        Ratio(median=2.0, low=1.5, high=3.0)
        """
        ratios = [one / other for one, other in zip(mine, others, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@attrs.frozen(kw_only=True)
class Row:
    """One kind of samples at one budget, trained in one way."""

    kind: str
    budget: int
    """Tokens of a pack; a padded batch holds as many samples as a pack does on average."""

    way: str

    attention: str
    """The backend that the model attends by."""

    batch_size: int
    """Packs or samples of a forward pass."""

    num_steps: int
    """Optimizer steps of an epoch."""

    padding_share: float
    """
    Padding among the positions that the forward passes compute; packs that are not full are
    shorter, not padded.
    """

    flops: float
    """Forward operations of the epochs, by `core.work`."""

    speeds: tuple[float, ...]
    """Useful tokens per second of each epoch, in the order of rounds."""

    peak_mb: float
    """
    Megabytes that training takes beyond the loaded model and the encoded samples; of the GPU, all
    that it takes.
    """

    encode_ms: float
    """CPU time to encode a sample, which is left out of the others."""

    over_padded: Ratio | None = None
    over_sorted: Ratio | None = None
    """How many times as fast as padded batches, random and of like length."""

    over_reference: Ratio | None = None
    """
    How many times as fast as the same way with packs of `REFERENCE_PACK` tokens, or of the fewest
    measured.
    """

    at_most: float | None = None
    """What `over_padded` were if time were the number of operations alone."""

    @property
    def useful_tokens_per_s(self) -> float:
        """The median over the epochs."""
        return statistics.median(self.speeds)

    def document(self) -> dict[str, object]:
        """Return the figures by name, as JSON can say them."""
        return {**attrs.asdict(self), "useful_tokens_per_s": self.useful_tokens_per_s}


def compared(rows: Sequence[Row]) -> list[Row]:
    """
    Return rows that were measured in the same rounds, each with how it compares with the others.
    """
    by_case = {(row.kind, row.budget, row.way): row for row in rows}
    reference = _reference(rows)

    def over(row: Row, other: Row | None) -> Ratio | None:
        return Ratio.of(row.speeds, other.speeds) if other is not None and other is not row else None

    complete = []
    for row in rows:
        padded = by_case.get((row.kind, row.budget, _PADDED))
        complete.append(
            attrs.evolve(
                row,
                over_padded=over(row, padded),
                over_sorted=over(row, by_case.get((row.kind, row.budget, _NEAR_EQUAL))),
                over_reference=over(row, by_case[row.kind, reference, row.way]),
                at_most=padded.flops / row.flops if padded is not None and padded is not row else None,
            )
        )
    return complete


def ways_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table of ways beside each other."""
    head = (
        "samples", "pack", "way", "attention", "batch", "steps", "padding", "useful tokens/s", "over padded", "at most",
        "over padded-sorted", "peak MB",
    )  # fmt: skip
    cells = [
        (
            row.kind, f"{row.budget:,}", row.way, row.attention, str(row.batch_size), str(row.num_steps),
            f"{row.padding_share:.1%}", f"{row.useful_tokens_per_s:,.0f}", _said(row.over_padded),
            "" if row.at_most is None else f"{row.at_most:.2f}", _said(row.over_sorted), f"{row.peak_mb:,.0f}",
        )
        for row in rows
    ]  # fmt: skip
    return aligned([head, *cells], left={0, 2, 3})


def scaling_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table of packs of growing length."""
    head = (
        "samples",
        "pack",
        "way",
        "attention",
        "steps",
        "µs/useful token",
        "speed over 2,048",
        "peak MB",
        "kB/token",
    )
    cells = [
        (
            row.kind, f"{row.budget:,}", row.way, row.attention, str(row.num_steps),
            f"{1e6 / row.useful_tokens_per_s:.1f}", _said(row.over_reference), f"{row.peak_mb:,.0f}",
            f"{1e3 * row.peak_mb / row.budget:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    return aligned([head, *cells], left={0, 2, 3})


def _reference(rows: Sequence[Row]) -> int:
    """Return the budget that others are compared with."""
    budgets = {row.budget for row in rows}
    return REFERENCE_PACK if REFERENCE_PACK in budgets else min(budgets)


def _said(ratio: Ratio | None) -> str:
    return "" if ratio is None else str(ratio)
