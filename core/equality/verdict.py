"""
Whether a model may pack, and how: a verdict by probe, not by the model's name.

A model may pack under the first strategy under which the samples of a row are apart (no gradient
reaches from one sample to another: exactly 0) and equal to the samples alone, as transformers
computes them. Exactly 0 needs no threshold; equality has one, since sums are taken in another
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs

from packplan.core.equality.equality import Precision
from packplan.core.equality.names import AUTO, FLASH_BACKENDS, MASKED, VARLEN

Strategy = Literal["flash", "varlen", "own", "masked"]

STRATEGIES: Mapping[Strategy, str] = MappingProxyType(
    {
        "flash": "flash attention, told where samples begin",
        "varlen": "our attention of variable length, sample by sample",
        "own": "the model's own attention, which reads the samples off positions that restart",
        "masked": "the model's own mask, with the samples of a row apart",
    }
)
"""What a strategy does, in the order in which they are tried."""

PROBE_VERSION = 2
"""Raised when a probe would find what an earlier one did not, so that models are asked again."""

EQUAL: Mapping[Precision, float] = MappingProxyType({"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1})
"""Largest relative difference between a packed sample and the same one alone."""

_SUMMED_ALIKE = 2.0**-20
"""Types below this step add in steps of their own; types above it are added in float32."""

_SUMS = 32
"""Steps that sums of a layer add to a number where they are taken in steps of their own."""


def loaded_limit(epsilon: float, *, layers: int) -> float:
    """
    Return the largest relative difference of logits between a packed sample and the same one alone
    that rounding explains, on the model that is about to train.

    Rounding grows slowly with depth, for layers add to what came before. Between two right ways to
    compute one model, eager attention and sdpa, logits of 16 bits were measured to differ by 2.3
    steps at 2 layers and 4.3 at 32, of float32 by 8 and 11, and by 126 in one family.

    Args:
        epsilon: The step between 1 and the next number of the type that is computed in.
        layers: Of the text model, >= 1.

    >>> [round(loaded_limit(2.0**-step, layers=36), 6) for step in (7, 10, 23)]
    [0.071640, 0.008955, 3.5e-05]
    """
    sums = _SUMS if epsilon < _SUMMED_ALIKE else 1
    return epsilon * sums * (4 + math.log2(layers))


@attrs.frozen
class Trial:
    """One way to pack that is tried."""

    strategy: Strategy

    attention: str
    """Name of the attention; `masked` is ours too."""

    follows_rows: bool = False
    """
    The model is told which samples lie in its row, in case its positions do not reach its masks.
    """


def trials(attn_impl: str, *, native: str, flash: bool) -> Iterator[Trial]:
    """
    Yield what may be tried for a run, in order.

    Args:
        attn_impl: Attention that the run asks for, one of `BACKENDS`.
        native: The attention of transformers that computes what the model means: sdpa or eager.
        flash: Whether flash attention runs here.

    >>> [trial.strategy for trial in trials("auto", native="sdpa", flash=False)]
    ['varlen', 'varlen', 'own', 'masked']
    """
    if attn_impl in FLASH_BACKENDS:
        yield Trial("flash", attn_impl)
        return
    if attn_impl not in (AUTO, VARLEN):
        yield Trial("own", attn_impl)
        yield Trial("own", attn_impl, follows_rows=True)
        return
    if attn_impl == AUTO and flash:
        yield Trial("flash", FLASH_BACKENDS[0])
    yield Trial("varlen", VARLEN)
    yield Trial("varlen", VARLEN, follows_rows=True)
    if attn_impl == AUTO:
        yield Trial("own", native, follows_rows=True)
        yield Trial("masked", MASKED, follows_rows=True)


@attrs.frozen
class ProbeResult:
    """What a trial of a probe gave."""

    isolation: float
    """
    Largest gradient of a sample's logits with respect to another sample, over the largest of its
    own; 0 where samples are apart.
    """

    logits: float
    """Largest difference of a logit between packed and alone, over the largest logit."""

    losses: float = 0.0
    """Largest relative difference of a sample's loss."""

    gradients: float = 0.0
    """Norm of the difference of the weights' gradients, over the sum of the samples' norms."""

    @property
    def equality(self) -> float:
        """The largest of the differences; infinite where one is not a number."""
        values = (self.logits, self.losses, self.gradients)
        return max(values) if all(map(math.isfinite, values)) else math.inf

    def passes(self, precision: Precision = "float32") -> bool:
        """Whether samples are apart, and equal to the samples alone."""
        return self.why_not(limit=EQUAL[precision]) is None

    def why_not(self, *, limit: float) -> str | None:
        """
        Return why samples may not share a row, as a clause; None if they may.

        Args:
            limit: Largest relative difference from the samples alone.
        """
        if not math.isfinite(self.isolation):
            return "no gradient reaches a sample from its own logits, so nothing can be said"
        if self.isolation:
            return f"gradients pass between samples of a row: {self.isolation:.2g} of a sample's own, where 0 is due"
        if not self.equality <= limit:
            return (
                f"packed samples differ from themselves alone by {self.equality:.2g}, where {limit:.0e} is allowed, "
                "though no gradient passes between them"
            )
        return None

    def __str__(self) -> str:
        return f"isolation {self.isolation:.2g} (must be 0), equality {self.equality:.2g}"


_LISTS = ("split", "not_exercised", "loaded_on")


@attrs.frozen
class PackingVerdict:
    """Whether a model may pack, how, and by which numbers."""

    model_type: str
    """As in the model's config.json."""

    strategy: Strategy | None
    """None if nothing that was tried passes."""

    attention: str
    """The attention that a packed run takes; what was tried last, if none passes."""

    native: str
    """The attention of transformers that the samples alone were computed by."""

    split: tuple[str, ...]
    """Classes of layers that carry a state along the row, and run sample by sample."""

    follows_rows: bool
    """Whether the model is told which samples lie in its row."""

    measured: ProbeResult | None
    """The best that was measured; None if nothing could be."""

    reason: str
    """Why it passes or does not, as a clause."""

    not_exercised: tuple[str, ...] = ()
    """Parts of the model that the probe does not reach; they carry no text sample's state."""

    loaded_on: tuple[str, ...] = ()
    """Where the model that trains was asked too, with its own weights: `cpu, float32`."""

    @property
    def passes(self) -> bool:
        """Whether the model may pack."""
        return self.strategy is not None

    @property
    def isolation(self) -> float | None:
        """See `ProbeResult`."""
        return None if self.measured is None else self.measured.isolation

    @property
    def equality(self) -> float | None:
        """See `ProbeResult`."""
        return None if self.measured is None else self.measured.equality

    def __str__(self) -> str:
        by = f", with {' and '.join(self.split)} run sample by sample" if self.split else ""
        measured = "" if self.measured is None else f" ({self.measured})"
        unasked = f"; not asked: {' and '.join(self.not_exercised)}" if self.not_exercised else ""
        return f"{self.reason}{by}{measured}{unasked}"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON's values; infinite numbers as null."""
        document = attrs.asdict(self)
        if self.measured is not None:
            numbers = attrs.asdict(self.measured)
            document["measured"] = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**document, **{name: list(document[name]) for name in _LISTS}}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PackingVerdict:
        """Return the verdict that `to_dict` gave."""
        numbers = document["measured"]
        if numbers is not None:
            numbers = ProbeResult(**{name: math.inf if value is None else value for name, value in numbers.items()})
        lists = {name: tuple(document[name]) for name in _LISTS}
        return cls(**{**document, **lists, "measured": numbers})
