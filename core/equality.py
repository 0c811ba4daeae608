"""
Equality of packed samples with the samples alone, and the choice of attention.

Verdicts of `packplan check` and of the probe say whether they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import attrs
import numpy as np

from packplan.core.errors import ModelError
from packplan.core.packs import Packs
from packplan.core.samples.tables import Table, column, num_media

AUTO = "auto"

VARLEN = "varlen"
"""Packplan's attention of variable length: each sample of a pack by itself, without a mask."""

NATIVE = "sdpa"
"""Default attention of transformers. If it is exact, the samples alone are computed with it."""

FLEX = "flex_attention"

FLASH_BACKENDS = ("flash_attention_2", "flash_attention_3", "flash_attn")

BACKENDS = (AUTO, VARLEN, NATIVE, "eager", FLEX, *FLASH_BACKENDS)
"""
Values of `attn_impl`, besides transformers' kernels from a hub (with a slash) and its paged
attention (with a bar).
"""


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
        "isolation": "largest gradient of a sample's logits with respect to another sample, over its own",
    }
)
"""Name of a check -> meaning of its number."""

EQUALITY_LIMITS: Mapping[Precision, float] = MappingProxyType({"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1})
"""Largest relative difference between a packed sample and the same one alone."""

_LOSS_LIMITS: Mapping[Precision, float] = MappingProxyType({"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2})
"""Largest relative difference of mean losses, which does not grow with depth."""

_LOSS_SHARE = 0.1
"""
A loss below this share of its terms is compared relative to that share, since rounding grows with
the logits.
"""


PROBE_VERSION = 3
"""
Version of the probe. It is raised if a probe can find new faults, so that stored verdicts are
renewed.
"""

_FINE_EPSILON = 2.0**-20
"""
Types with an epsilon below this accumulate sums in their own precision. Others accumulate them in
float32.
"""

_SUMS = 32
"""Error of a layer's sums, in epsilons, if they are accumulated in the type's own precision."""


@attrs.frozen
class Deviation:
    """Difference that one check found between a pack and its samples computed alone."""

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


def loss_difference(found: float, expected: float, *, term_size: float) -> float:
    """
    Return the distance of a mean loss from the expected one, relative to the bound of its rounding.

    Args:
        found: Mean loss in the pack.
        expected: Mean loss of the samples alone, >= 0.
        term_size: Mean size of the terms of a token's loss: its log-sum-exp and the absolute logit
            of the target. At least *expected*.

    >>> loss_difference(2.5, 2.0, term_size=4.0), loss_difference(0.5, 0.0, term_size=20.0)
    (0.25, 0.25)
    """
    if found == expected:
        return 0.0
    scale = max(expected, _LOSS_SHARE * term_size)
    return abs(found - expected) / scale if scale else math.inf


def judge(findings: Iterable[Deviation], *, precision: Precision, limit: float) -> tuple[Verdict, ...]:
    """
    Return the verdict of each check that has deviations, in the order of `CHECKS`.

    Args:
        findings: Deviations of all packs.
        precision: Precision that the model computes in, which decides the limit of losses.
        limit: Largest difference of logits and gradients; 0 for checks other than these and losses.

    >>> findings = [Deviation("logits", 3e-6, 0, 1), Deviation("logits", 2.0, 0, 4)]
    >>> judge(findings, precision="float32", limit=2e-5)[0].worst.sample
    4
    """
    limits = dict.fromkeys(("logits", "gradients"), limit)
    limits |= dict.fromkeys(("sample loss", "step loss"), _LOSS_LIMITS[precision])
    found: dict[str, list[Deviation]] = {}
    for finding in findings:
        found.setdefault(finding.check, []).append(finding)
    verdicts = []
    for check in filter(found.get, CHECKS):
        worst = max(found[check], key=lambda finding: (math.isnan(finding.value), finding.value))
        allowed = limits.get(check, 0.0)
        verdicts.append(Verdict(check, worst, allowed, passed=worst.value <= allowed))
    return tuple(verdicts)


def pack_kind(media: Sequence[int]) -> str:
    """
    Return the kind of a pack by its media: `text`, `image`, `several images`, or `mixed`.

    Args:
        media: Number of images and videos of each sample.
    """
    kinds = {min(number, 2) for number in media}
    if len(kinds) > 1 and 0 in kinds:
        return "mixed"
    return {0: "text", 1: "image", 2: "several images"}[max(kinds)]


def packs_to_compare(packs: Packs, table: Table, *, count: int) -> list[int]:
    """
    Return the indices of up to *count* packs of several samples to compare, ascending.

    The pack with the most samples of each kind is chosen first, then packs spread over the plan.

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


Strategy = Literal["flash", "varlen", "own"]
"""
Attention that keeps the samples of a row apart: flash attention, Packplan's `varlen`, or another of
transformers' own.
"""


def rounding_limit(epsilon: float, *, layers: int) -> float:
    """
    Return the largest relative difference of logits that rounding in a loaded model explains.

    Rounding grows slowly with depth. Logits of eager attention and of sdpa, both correct, were
    measured to differ in 16 bits by 2.3 epsilons at 2 layers and 4.3 at 32. In float32 it was 8 and
    11 epsilons, and 126 in one family.

    Args:
        epsilon: Difference between 1 and the next number of the type.
        layers: Layers of the text model, >= 1.

    >>> [round(rounding_limit(2.0**-step, layers=36), 6) for step in (7, 10, 23)]
    [0.07164, 0.008955, 3.5e-05]
    """
    sums = _SUMS if epsilon < _FINE_EPSILON else 1
    return epsilon * sums * (4 + math.log2(layers))


@attrs.frozen
class StrategyTrial:
    """Trial of a probe: a strategy that may keep samples apart, and the attention it runs with."""

    strategy: Strategy

    attention: str

    keeps_rows: bool = False
    """
    Whether the model receives the sample boundaries of its row, for models whose masks do not use
    positions.
    """


def yield_trials(attn_impl: str, *, native: str, flash: bool) -> Iterator[StrategyTrial]:
    """
    Yield the trials of a probe for a run, best first; the probe takes the first that passes.

    Args:
        attn_impl: Attention that the run asks for, one of `BACKENDS`.
        native: Attention of transformers that computes the model correctly: sdpa or eager.
        flash: Whether flash attention runs here.

    >>> [trial.strategy for trial in yield_trials("auto", native="sdpa", flash=False)]
    ['varlen', 'varlen', 'own']
    """
    if attn_impl in FLASH_BACKENDS:
        yield StrategyTrial("flash", attn_impl)
        return
    if attn_impl not in (AUTO, VARLEN):
        yield StrategyTrial("own", attn_impl)
        yield StrategyTrial("own", attn_impl, keeps_rows=True)
        return
    if attn_impl == AUTO and flash:
        yield StrategyTrial("flash", FLASH_BACKENDS[0])
    yield StrategyTrial("varlen", VARLEN)
    yield StrategyTrial("varlen", VARLEN, keeps_rows=True)
    if attn_impl == AUTO:
        yield StrategyTrial("own", native, keeps_rows=True)


@attrs.frozen
class ProbeResult:
    """Isolation of samples and equality with samples alone, as a probe measured them."""

    isolation: float
    """
    Largest gradient of a sample's logits with respect to another sample, divided by the largest
    with respect to itself. 0 if no gradient passes between samples.
    """

    logits: float
    """Largest difference of a logit between packed and alone, divided by the largest logit."""

    losses: float = 0.0
    """Largest relative difference of a sample's loss."""

    gradients: float = 0.0
    """
    Norm of the difference of the weights' gradients, divided by the sum of the samples' norms.
    """

    @property
    def equality(self) -> float:
        """Largest difference of logits, losses and gradients; infinity if one is not finite."""
        values = (self.logits, self.losses, self.gradients)
        return max(values) if all(map(math.isfinite, values)) else math.inf

    def reason_against_packing(self, *, limit: float) -> str | None:
        """
        Return why samples may not share a row, as a clause; None if they may.

        Args:
            limit: Largest relative difference from the samples alone.
        """
        if not math.isfinite(self.isolation):
            return "no gradient of a sample's logits reaches its tokens, so the test proves nothing"
        if self.isolation:
            return f"gradients pass between samples of a row ({self.isolation:.2g} of a sample's own instead of 0)"
        if not self.equality <= limit:
            return (
                f"packed samples differ from the same samples alone by {self.equality:.2g}, where {limit:.0e} is "
                "allowed, although no gradient passes between them"
            )
        return None

    def __str__(self) -> str:
        return f"isolation {self.isolation:.2g}, largest difference {self.equality:.2g}"


@attrs.frozen
class PackingVerdict:
    """Whether a model may pack, by which strategy and attention, and the measured differences."""

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

    keeps_rows: bool
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

    def __str__(self) -> str:
        by = f", with {' and '.join(self.split)} run sample by sample" if self.split else ""
        measured = "" if self.measured is None else f" ({self.measured})"
        unasked = f"; not tested: {' and '.join(self.not_exercised)}" if self.not_exercised else ""
        return f"{self.reason}{by}{measured}{unasked}"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON document; infinite numbers are null."""
        return attrs.asdict(self, value_serializer=_finite_or_none)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PackingVerdict:
        """Return the verdict in a document that `to_dict` made."""
        numbers = document["measured"]
        if numbers is not None:
            numbers = ProbeResult(**{name: math.inf if value is None else value for name, value in numbers.items()})
        lists = {name: tuple(held) for name, held in document.items() if isinstance(held, list)}
        return cls(**{**document, **lists, "measured": numbers})


def _finite_or_none(_: object, __: object, value: Any) -> Any:
    """Return a field's value, or None for an infinite or undefined number, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@attrs.frozen
class AttentionChoice:
    """Attention that a run uses, and why."""

    name: str
    """`varlen`, or a name of transformers' own."""

    why: str = ""
    """Reason for this attention, as a clause."""

    native: str = NATIVE
    """Attention of transformers that computes the samples alone."""

    split: tuple[str, ...] = ()
    """Classes of layers that run sample by sample."""

    keeps_rows: bool = False
    """Whether the model receives the sample boundaries of its row."""

    verdict: PackingVerdict | None = None
    """Verdict of the probe that the choice follows from; None if the model was not probed."""

    leak: str | None = None
    """
    Reason why samples may not share packs under this attention here, as a clause. None if they
    may, or the model was not probed.
    """

    @property
    def loaded_backend(self) -> str:
        """Attention of transformers with which the model is loaded."""
        return self.native if self.name == VARLEN else self.name

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose_attention(
    attn_impl: str, verdict: PackingVerdict | None, *, flash_installed: bool = True, on_cpu: bool = False
) -> AttentionChoice:
    """
    Return a run's attention; its `leak` says why samples may not share packs, if so.

    Args:
        attn_impl: Value of `attn_impl`.
        verdict: Verdict of the probe on the model; None if it was not probed.
        flash_installed: Whether the package flash-attn is installed.
        on_cpu: Whether the model trains on a CPU.

    Raises:
        ModelError: `varlen` is requested by name, and the probe did not pass.

    >>> choose_attention("sdpa", None).name
    'sdpa'
    >>> choose_attention("flash_attention_2", None, on_cpu=True).leak
    'flash attention runs only on a GPU'
    """
    passes = verdict is not None and verdict.passes
    leak = reason_against_backend(attn_impl, flash_installed=flash_installed, on_cpu=on_cpu)
    if leak is None and verdict is not None and not passes:
        leak = verdict.reason
    if attn_impl == VARLEN and verdict is not None and not passes:
        raise ModelError("attention", f"attn_impl {VARLEN} cannot be used: {verdict.reason}")
    why = "attn_impl names it" if attn_impl != AUTO else f"attn_impl is {AUTO}"
    if verdict is None:
        return AttentionChoice(NATIVE if attn_impl == AUTO else attn_impl, why, leak=leak)
    if not passes:
        native = verdict.native or NATIVE
        why += f", but samples must not share packs: {verdict.reason}"
        return AttentionChoice(native if attn_impl == AUTO else attn_impl, why, native, verdict=verdict, leak=leak)
    if attn_impl == AUTO:
        why += f", and {verdict.model_type} was shown to pack by it"
    return AttentionChoice(
        verdict.attention, why, verdict.native, verdict.split, verdict.keeps_rows, verdict=verdict, leak=leak
    )


def reason_against_backend(attn_impl: str, *, flash_installed: bool, on_cpu: bool) -> str | None:
    """
    Return why an attention backend cannot train on this machine; None if it can.

    Args:
        attn_impl: Name of the backend.
        flash_installed: Whether the package flash-attn is installed.
        on_cpu: Whether the model trains on a CPU.
    """
    if attn_impl in FLASH_BACKENDS and not flash_installed:
        return "the package flash-attn is not installed"
    if attn_impl in FLASH_BACKENDS and on_cpu:
        return "flash attention runs only on a GPU"
    if attn_impl == FLEX and on_cpu:
        return "flex attention has no backward pass on a CPU"
    return None
