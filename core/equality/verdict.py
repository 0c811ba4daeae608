"""
Verdict of a probe: whether a model may pack, and by which strategy.

The probe tries strategies in order, and does not use the model's name. A strategy passes under two
conditions. Gradients between samples of a row are exactly 0. Packed samples equal the samples
alone, as transformers computes them, within a limit for the order of sums.
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

PROBE_VERSION = 2
"""
Version of the probe. It is raised if a probe can find new faults, so that stored verdicts are
renewed.
"""

EQUAL: Mapping[Precision, float] = MappingProxyType({"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1})
"""Largest relative difference between a packed sample and the same one alone."""

_SUMMED_ALIKE = 2.0**-20
"""
Types with a smaller step than this are summed in their own steps. Others are summed in float32.
"""

_SUMS = 32
"""Steps that the sums of a layer add to a number if they are taken in the type's own steps."""


def loaded_limit(epsilon: float, *, layers: int) -> float:
    """
    Return the limit of relative differences of logits between packed and alone that rounding
    explains, for the loaded model.

    Rounding grows slowly with depth. Logits of eager attention and of sdpa, both correct, were
    measured to differ in 16 bits by 2.3 steps at 2 layers and 4.3 at 32. In float32 it was 8 and 11
    steps, and 126 in one family.

    Args:
        epsilon: Step between 1 and the next number of the type.
        layers: Layers of the text model, >= 1.

    >>> [round(loaded_limit(2.0**-step, layers=36), 6) for step in (7, 10, 23)]
    [0.07164, 0.008955, 3.5e-05]
    """
    sums = _SUMS if epsilon < _SUMMED_ALIKE else 1
    return epsilon * sums * (4 + math.log2(layers))


@attrs.frozen
class Trial:
    """One strategy to try, with its attention."""

    strategy: Strategy

    attention: str
    """Name of the attention; `masked` is ours too."""

    follows_rows: bool = False
    """
    Whether the model receives the sample boundaries of its row, for models whose masks do not use
    positions.
    """


def trials(attn_impl: str, *, native: str, flash: bool) -> Iterator[Trial]:
    """
    Yield the trials for a run, in order.

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
    """Isolation and equality that a probe measured."""

    isolation: float
    """
    Largest gradient of a sample's logits with respect to another sample, over the largest with
    respect to itself. 0 if samples are apart.
    """

    logits: float
    """Largest difference of a logit between packed and alone, over the largest logit."""

    losses: float = 0.0
    """Largest relative difference of a sample's loss."""

    gradients: float = 0.0
    """Norm of the difference of the weights' gradients, over the sum of the samples' norms."""

    @property
    def equality(self) -> float:
        """Largest of the differences; infinite if one is not a finite number."""
        values = (self.logits, self.losses, self.gradients)
        return max(values) if all(map(math.isfinite, values)) else math.inf

    def passes(self, precision: Precision = "float32") -> bool:
        """Return whether samples are apart, and equal to the samples alone."""
        return self.why_not(limit=EQUAL[precision]) is None

    def why_not(self, *, limit: float) -> str | None:
        """
        Return the reason why samples may not share a row, as a clause, or None.

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


@attrs.frozen
class PackingVerdict:
    """Verdict on a model, with strategy, attention and measured numbers."""

    model_type: str
    """Model type in the config.json."""

    strategy: Strategy | None
    """Strategy that passed; None if none did."""

    attention: str
    """Attention of a packed run; the last one tried if none passed."""

    native: str
    """Attention of transformers that computed the samples alone."""

    split: tuple[str, ...]
    """Classes of layers that carry a state along the row, and therefore run sample by sample."""

    follows_rows: bool
    """Whether the model receives the sample boundaries of its row."""

    measured: ProbeResult | None
    """Best measured result; None if nothing could be measured."""

    reason: str
    """Reason for the verdict, as a clause."""

    not_exercised: tuple[str, ...] = ()
    """Parts of the model that the probe does not reach. They carry no state of text samples."""

    loaded_on: tuple[str, ...] = ()
    """Devices and types on which the loaded model was probed too, such as `cpu, float32`."""

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
        """Return the verdict as a JSON document, with infinite numbers as null."""
        return attrs.asdict(self, value_serializer=_finite)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PackingVerdict:
        """Return the verdict of a document of `to_dict`."""
        numbers = document["measured"]
        if numbers is not None:
            numbers = ProbeResult(**{name: math.inf if value is None else value for name, value in numbers.items()})
        lists = {name: tuple(held) for name, held in document.items() if isinstance(held, list)}
        return cls(**{**document, **lists, "measured": numbers})


def _finite(_: object, __: object, value: Any) -> Any:
    """Return a value of a field, or None for a number that JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
