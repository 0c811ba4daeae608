"""
Comparison of packed samples with the same samples computed alone, and the choice of attention.

`packplan check` and the probe give verdicts on this comparison.
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
"""
Packplan's variable-length attention, which computes each sample of a pack separately, without a
mask.
"""

NATIVE = "sdpa"
"""
Default attention of transformers, with which single samples are computed if it is exact for the
model.
"""

FLEX = "flex_attention"

FLASH_3 = "flash_attention_3"

FLASH_BACKENDS = ("flash_attention_2", FLASH_3, "flash_attn")

BACKENDS = (AUTO, VARLEN, NATIVE, "eager", FLEX, *FLASH_BACKENDS)
"""
Names of attention backends. Other valid values of `attn_impl` are transformers' kernels from a hub
(with a slash) and its paged attention (with a bar).
"""


Precision = Literal["float32", "float16", "bfloat16"]

CHECKS = MappingProxyType(
    {
        "positions": "number of position ids that differ from those of the samples alone",
        "labels": "number of targets of the loss that differ from those of the samples alone",
        "logits": "largest difference of a logit, divided by the largest logit",
        "sample loss": "difference between a sample's mean losses in the pack and alone, divided "
        "by the loss alone, or by a tenth of the loss's terms if that is more",
        "step loss": "difference between a pack's training loss and that of its samples, divided as for 'sample loss'",
        "gradients": "norm of the gradients' difference, divided by the sum of the single samples' gradient norms",
        "isolation": "largest gradient of a sample's logits with respect to another sample, divided by the largest "
        "with respect to the sample itself",
    }
)
"""Name of a check -> meaning of its number."""

EQUALITY_LIMITS: Mapping[Precision, float] = MappingProxyType({"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1})
"""Largest relative difference allowed in logits and gradients between packed and single samples."""

_LOSS_LIMITS: Mapping[Precision, float] = MappingProxyType({"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2})
"""
Largest relative difference allowed between mean losses. The limit does not depend on the number of
layers.
"""

_LOSS_SHARE = 0.1
"""
Smallest divisor of a difference between losses, as a share of the loss's terms. Rounding errors
grow with these terms.
"""


PROBE_VERSION = 3
"""
Version of the probe, to be raised when the probe can find new faults. Stored verdicts of other
versions are computed again.
"""

_FINE_EPSILON = 2.0**-20
"""
Epsilon below which a data type accumulates sums in its own precision. Other types accumulate sums
in float32.
"""

_SUMS = 32
"""
Rounding error of a layer's sums, in epsilons, if sums are accumulated in the type's own precision.
"""


@attrs.frozen
class Deviation:
    """Difference between a pack and its samples computed alone, as one check measured it."""

    check: str
    """Name of the check, a key of `CHECKS`."""

    value: float

    pack: int
    """Pack index in the plan."""

    sample: int | None = None
    """Index of the sample; None if the value concerns the whole pack."""

    detail: str = ""
    """Place of the difference inside the sample or pack."""


@attrs.frozen
class Verdict:
    """Largest deviation that a check found, and whether it is within the limit."""

    check: str
    worst: Deviation
    limit: float
    passed: bool


def loss_difference(found: float, expected: float, *, term_size: float) -> float:
    """
    Return the difference between a mean loss and the expected loss, divided by the expected loss.
    The divisor is at least a tenth of *term_size*, because rounding errors grow with the terms.

    Args:
        found: Mean loss in the pack.
        expected: Mean loss of the samples alone, >= 0.
        term_size: Mean over tokens of the loss's terms: the log-sum-exp plus the absolute logit of
            the target. At least *expected*.

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
        precision: Precision in which the model computes; it decides the limit of the loss checks.
        limit: Largest allowed difference of logits and gradients. For losses, the precision sets
            the limit; for all other checks, the limit is 0.

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
    Return the kind of a pack by its media: `text`, `image`, `several images`, or `mixed`. A pack is
    `mixed` if some of its samples have media and others have none.

    Args:
        media: Number of images and videos of each sample.
    """
    kinds = {min(number, 2) for number in media}
    if len(kinds) > 1 and 0 in kinds:
        return "mixed"
    return {0: "text", 1: "image", 2: "several images"}[max(kinds)]


def packs_to_compare(packs: Packs, table: Table, *, count: int) -> list[int]:
    """
    Choose up to *count* packs of several samples to compare; return their indices, ascending.

    For each kind of pack, the pack with the most samples is chosen first. Further packs are spread
    evenly over the plan.

    Args:
        packs: Packs of the plan.
        table: Measurements of all samples.
        count: Maximum number of packs, >= 1.
    """
    sizes = packs.sizes()
    several = np.flatnonzero(sizes > 1)
    images = np.minimum(num_media(table), 2)
    if not several.size:
        return []
    # Bits of a pack: 1 if a sample has no media, 2 if one has a single image or video, 4 if more.
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
Kind of attention that keeps the samples of a row separate: flash attention, Packplan's `varlen`, or
another attention of transformers (`own`).
"""


def rounding_limit(epsilon: float, *, layers: int) -> float:
    """
    Return the largest relative difference of logits that rounding can cause.

    Rounding errors grow slowly with the number of layers. The logits of eager attention and of
    sdpa, both correct, were measured. In 16 bits, they differed by 2.3 epsilons at 2 layers and by
    4.3 epsilons at 32 layers. In float32, they differed by 8 and 11 epsilons, and by 126 epsilons
    in one model family.

    Args:
        epsilon: Difference between 1 and the next larger number of the data type.
        layers: Number of layers of the text model, >= 1.

    >>> [round(rounding_limit(2.0**-step, layers=36), 6) for step in (7, 10, 23)]
    [0.07164, 0.008955, 3.5e-05]
    """
    sums = _SUMS if epsilon < _FINE_EPSILON else 1
    return epsilon * sums * (4 + math.log2(layers))


@attrs.frozen
class StrategyTrial:
    """
    One trial of a probe: a strategy that may keep samples separate, and the attention that it uses.
    """

    strategy: Strategy

    attention: str

    keeps_rows: bool = False
    """
    Whether the model receives the sample boundaries of its row, for models whose masks do not use
    positions.
    """


def yield_trials(attn_impl: str, *, native: str, flash: bool) -> Iterator[StrategyTrial]:
    """
    Yield the trials of a probe for a run, fastest first. The probe uses the first trial that
    passes.

    Args:
        attn_impl: Attention backend that the run is configured with.
        native: Attention of transformers that computes the model correctly: sdpa or eager.
        flash: Whether flash attention runs on this machine.

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
    """
    Result of one trial: gradients between samples of a row, and differences from each sample alone.
    """

    isolation: float
    """
    Largest gradient of a sample's logits with respect to another sample, divided by the largest
    gradient with respect to the sample itself. The value is 0 if no gradient passes between
    samples.
    """

    logits: float
    """
    Largest difference between a logit of a packed sample and of the sample alone, divided by the
    largest logit.
    """

    losses: float = 0.0
    """Largest relative difference between the losses of a packed sample and of the sample alone."""

    gradients: float = 0.0
    """
    Norm of the difference of the weights' gradients, divided by the sum of the gradient norms of
    the single samples.
    """

    @property
    def equality(self) -> float:
        """
        Largest of the differences of logits, losses and gradients; infinity if a difference is not
        finite.
        """
        values = (self.logits, self.losses, self.gradients)
        return max(values) if all(map(math.isfinite, values)) else math.inf

    def reason_against_packing(self, *, limit: float) -> str | None:
        """
        Return a clause that says why samples must not share a row; None if they may share one.

        Args:
            limit: Largest allowed relative difference from the samples alone.
        """
        if not math.isfinite(self.isolation):
            return "gradients of a sample's logits are 0 or not finite, so the test proves nothing"
        if self.isolation:
            return f"gradients pass between samples of a row ({self.isolation:.2g} of a sample's own gradient, not 0)"
        if not self.equality <= limit:
            return (
                f"packed samples differ from the same samples alone by {self.equality:.2g}, but at most "
                f"{limit:.0e} is allowed, although no gradient passes between samples"
            )
        return None

    def __str__(self) -> str:
        return f"isolation {self.isolation:.2g}, largest difference {self.equality:.2g}"


@attrs.frozen
class PackingVerdict:
    """
    Verdict of a probe: whether the model may be packed, with which attention, and the measured
    differences.
    """

    model_type: str
    """`model_type` of the model's config.json."""

    strategy: Strategy | None
    """Strategy that passed; None if no strategy passed."""

    attention: str
    """
    Attention of a packed run. If no trial passed, the attention of the trial with the best result,
    or the configured attention if nothing could be measured.
    """

    native: str
    """Attention of transformers that computed single samples."""

    split: tuple[str, ...]
    """
    Names of layer classes that carry a state along the row, and are therefore run sample by sample.
    """

    keeps_rows: bool
    """Whether the model receives the sample boundaries of its row."""

    measured: ProbeResult | None
    """
    Result of the trial that passed, else the best result of all trials. None if nothing could be
    measured.
    """

    reason: str
    """Clause that gives the reason for the verdict."""

    not_exercised: tuple[str, ...] = ()
    """
    Parts of the model that the probe does not run, and that carry no state between text samples.
    """

    loaded_on: tuple[str, ...] = ()
    """
    Devices and data types with which the loaded model itself was probed, such as `cpu, float32`.
    """

    @property
    def passes(self) -> bool:
        """Whether samples may share packs."""
        return self.strategy is not None

    def __str__(self) -> str:
        by = f", with {' and '.join(self.split)} run sample by sample" if self.split else ""
        measured = "" if self.measured is None else f" ({self.measured})"
        unasked = f"; not tested: {' and '.join(self.not_exercised)}" if self.not_exercised else ""
        return f"{self.reason}{by}{measured}{unasked}"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON document. Infinite and undefined numbers become null."""
        return attrs.asdict(self, value_serializer=_finite_or_none)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PackingVerdict:
        """Restore a verdict from the document that `to_dict` returned."""
        numbers = document["measured"]
        if numbers is not None:
            numbers = ProbeResult(**{name: math.inf if value is None else value for name, value in numbers.items()})
        lists = {name: tuple(held) for name, held in document.items() if isinstance(held, list)}
        return cls(**{**document, **lists, "measured": numbers})


def _finite_or_none(_: object, __: object, value: Any) -> Any:
    """
    Return a field's value, or None for an infinite or undefined number, which JSON does not have.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


@attrs.frozen
class AttentionChoice:
    """Attention that a run uses, and the reason for it."""

    name: str
    """`varlen`, or the name of a transformers attention."""

    why: str = ""
    """Clause that gives the reason for this attention."""

    native: str = NATIVE
    """Attention of transformers that computes single samples."""

    split: tuple[str, ...] = ()
    """Names of layer classes that are run sample by sample."""

    keeps_rows: bool = False
    """Whether the model receives the sample boundaries of its row."""

    verdict: PackingVerdict | None = None
    """Verdict of the probe on which the choice is based; None if the model was not probed."""

    leak: str | None = None
    """
    Clause that says why samples must not share packs with this attention on this machine. None if
    samples may share packs, or if the model was not probed and no other reason is known.
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
    Return the attention of a run. The result's `leak` gives the reason if samples must not share
    packs.

    Args:
        attn_impl: Value of `attn_impl`.
        verdict: Verdict of the probe on the model; None if it was not probed.
        flash_installed: Whether the package of this attention is installed.
        on_cpu: Whether the model trains on a CPU.

    Raises:
        ModelError: `attn_impl` is `varlen`, and the probe did not pass.

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
    why = "attn_impl names this attention" if attn_impl != AUTO else f"attn_impl is {AUTO}"
    if verdict is None:
        return AttentionChoice(NATIVE if attn_impl == AUTO else attn_impl, why, leak=leak)
    if not passes:
        native = verdict.native or NATIVE
        why += f", but samples must not share packs: {verdict.reason}"
        return AttentionChoice(native if attn_impl == AUTO else attn_impl, why, native, verdict=verdict, leak=leak)
    if attn_impl == AUTO:
        why += f", and the probe of {verdict.model_type} passed with this attention"
    return AttentionChoice(
        verdict.attention, why, verdict.native, verdict.split, verdict.keeps_rows, verdict=verdict, leak=leak
    )


def reason_against_backend(attn_impl: str, *, flash_installed: bool, on_cpu: bool) -> str | None:
    """
    Return the reason why an attention backend cannot train on this machine; None if it can.

    Args:
        attn_impl: Name of the backend.
        flash_installed: Whether the package of this backend is installed.
        on_cpu: Whether the model trains on a CPU.
    """
    if attn_impl in FLASH_BACKENDS and not flash_installed:
        package = "flash-attn-3" if attn_impl == FLASH_3 else "flash-attn"
        return f"the package {package} is not installed"
    if attn_impl in FLASH_BACKENDS and on_cpu:
        return "flash attention runs only on a GPU"
    if attn_impl == FLEX and on_cpu:
        return "flex attention has no backward pass on a CPU"
    return None
