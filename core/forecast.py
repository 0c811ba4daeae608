"""
Forecasts of the time and the memory of a run.

Its seconds follow from the seconds and FLOPs of measured steps. The memory of a step follows from
the blocks that a trace of it allocates, up to the longest packing length that fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.packs import Packs
from packplan.core.schedule import EpochSchedule, EpochStats
from packplan.core.work.assignment import SyncPoint
from packplan.core.work.model import SampleWorks

EVALUATION_SHARE = 1 / 3
"""
Seconds of an evaluation, divided by the seconds of training on its packs, if no evaluation was
measured. By FLOPs, the forward pass is a third.
"""

_FOLDS = 7
"""Number of parts of the measured steps, each left out of one fit."""

_VARIES = 1e-6
"""Least spread of a term, relative to its largest value, from which the term is fitted."""

REPEATS = 3
"""Number of times that the whole list of steps is measured."""

_QUANTILES = (1.0, 0.0, 0.5, 0.75, 0.25)
"""Quantiles of work whose packs are measured; the heaviest come first."""

_WINDOW = 8
"""
A measured step has packs of similar work, from at most one eighth of the plan. Packs may repeat.
"""

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(iB|B|)")

MARGIN = 0.1
"""
Share that is added to a peak for a GPU's rounding of blocks, their fragmentation, and the memory of
CUDA and of collectives. It is an assumption, and was not measured on a GPU.
"""

_STEP = 64
"""Lengths are multiples of this many tokens."""

_ENOUGH = 0.03
"""Memory that may stay free at the returned length, relative to its peak."""

_ATTEMPTS = 2


@attrs.frozen
class Pause:
    """Interruption of training at an interval of steps: an evaluation, or a checkpoint."""

    seconds: float
    """Seconds of each pause."""

    every: int
    """Optimizer steps between two pauses, the last of which ends the run; 0 for none."""

    at_start: bool = False
    """Whether there is also a pause before the first step."""

    def total_seconds(self, num_steps: int) -> float:
        """
        Return the seconds of all such pauses of a run.

        Args:
            num_steps: Optimizer steps of the run.

        >>> Pause(2.0, every=4).total_seconds(10)
        6.0
        """
        count = int(self.at_start) + (-(-num_steps // self.every) if self.every else 0)
        return count * self.seconds


@attrs.frozen(eq=False)
class RunForecast:
    """Predicted seconds of a run."""

    timing: Timing

    steps: Floats
    """Seconds of each step of the first epoch; shape (num_steps,)."""

    refit_seconds: Floats
    """Seconds of the first epoch by each of `timing.refits`; shape (num_refits,)."""

    total_steps: int
    """Optimizer steps of the run."""

    tokens: int
    """Tokens of samples in the first epoch, without padding and repeated packs."""

    evaluation: Pause
    checkpoint: Pause

    @property
    def epoch_seconds(self) -> float:
        """Seconds of all steps of the first epoch."""
        return float(self.steps.sum())

    @property
    def mean_step(self) -> float:
        """Mean seconds of a step of the first epoch."""
        return float(self.steps.mean())

    @property
    def seconds(self) -> float:
        """
        Seconds of the run with its pauses; steps of later epochs take the mean of the first epoch.
        """
        first, num = self.steps[: self.total_steps], self.total_steps
        later = (num - len(first)) * self.mean_step
        return float(first.sum()) + later + sum(one.total_seconds(num) for one in (self.evaluation, self.checkpoint))

    @property
    def uncertainty(self) -> float | None:
        """Relative uncertainty of the steps' seconds, as two standard errors; None if unknown."""
        return self.timing.uncertainty(self.epoch_seconds, self.refit_seconds.tolist())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all ranks train in a second, without evaluations and checkpoints."""
        return self.tokens / self.epoch_seconds


def forecast_run(
    timing: Timing,
    trained: EpochStats,
    schedule: EpochSchedule,
    flops: SampleWorks,
    *,
    evaluated: StepFlops | None = None,
    every: Sequence[int] = (0, 0),
    evaluates_first: bool = False,
) -> RunForecast:
    """
    Return the forecast of a run's seconds.

    Args:
        timing: Seconds of the parts of the run.
        trained: Statistics of the first epoch.
        schedule: Order of the packs, from the beginning.
        flops: Works of the samples in FLOPs.
        evaluated: FLOPs of the evaluation; None without one.
        every: Optimizer steps between two evaluations, and between two checkpoints; 0 for none.
        evaluates_first: Whether an evaluation comes before the first step.
    """
    terms = StepFlops.from_epoch(trained, flops, sync_at=schedule.sync_at)
    evaluation = 0.0
    if evaluated is not None:
        forward = evaluated.seconds(attrs.evolve(timing.step_time, step=0.0))
        evaluation = timing.evaluation * float(forward.sum())
    return RunForecast(
        timing=timing,
        steps=terms.seconds(timing.step_time),
        refit_seconds=np.array([terms.seconds(refit).sum() for refit in timing.refits]),
        total_steps=schedule.total_steps,
        tokens=trained.num_tokens(0, len(terms.counts)),
        evaluation=Pause(evaluation, every[0], at_start=evaluates_first),
        checkpoint=Pause(timing.checkpoint, every[1]),
    )


Floats = NDArray[np.float64]


@attrs.frozen
class TimeModel:
    """Coefficients by which the seconds of an optimizer step are predicted."""

    step: float
    """Seconds of each step: the optimizer, and the exchange between ranks once a step."""

    microbatch: float
    """Seconds of each microbatch: its start, and the exchange between ranks in it."""

    text: float
    """Seconds per FLOP of the matrix products of text positions."""

    attention: float
    """Seconds per FLOP of attention between text tokens."""

    vision: float
    """Seconds per FLOP of the vision tower."""


@attrs.frozen
class MeasuredStep:
    """Measured seconds and FLOPs of one optimizer step."""

    microbatches: int
    """Microbatches of a rank."""

    text: float
    """FLOPs of the matrix products of text positions, on the busiest rank."""

    attention: float
    """FLOPs of attention between text tokens, on the busiest rank."""

    vision: float
    """FLOPs of the vision tower, on the busiest rank."""

    seconds: float
    """Seconds from the end of the step before, without logs, evaluations and checkpoints."""

    def predict_seconds(self, time: TimeModel) -> float:
        """Return the seconds that the coefficients *time* predict for this step."""
        flops = time.text * self.text + time.attention * self.attention + time.vision * self.vision
        return time.step + time.microbatch * self.microbatches + flops


@attrs.frozen
class Timing:
    """Coefficients that are fitted to measured steps, and the seconds of pauses."""

    step_time: TimeModel

    num_measured: int
    """Measured steps from which the coefficients follow."""

    evaluation: float = EVALUATION_SHARE
    """Seconds of an evaluation, divided by those of training on its packs."""

    checkpoint: float = 0.0
    """Seconds of saving a checkpoint."""

    refits: tuple[TimeModel, ...] = ()
    """Coefficients of further fits, each without one part of the measured steps."""

    step_error: float | None = None
    """Relative error that 95 % of steps that the fit has not seen stay below; None if not known."""

    def uncertainty(self, seconds: float, refit_seconds: Sequence[float]) -> float | None:
        """
        Return a prediction's relative uncertainty, as two standard errors; None if unknown.

        The standard error is the jackknife's, over the parts that are left out.

        Args:
            seconds: Prediction by `step_time`.
            refit_seconds: Predictions by each of `refits`.
        """
        if not self.refits or not seconds:
            return None
        count = len(refit_seconds)
        return 2 * float(np.sqrt((count - 1) * np.mean((np.array(refit_seconds) / seconds - 1) ** 2)))


@attrs.frozen
class Calibration:
    """Measured steps of a run."""

    steps: tuple[MeasuredStep, ...]
    """Measured steps, at least one."""

    evaluation: MeasuredStep | None = None
    """An evaluation, with the FLOPs of training on its packs; None without one."""

    checkpoint: float = 0.0
    """Seconds of saving a checkpoint; 0 if the run saves none."""

    def fit_timing(self) -> Timing:
        """Return a timing that is fitted to these steps, with its error on left-out steps."""
        time, errors, refits = fit_steps(self.steps), [], []
        for part in range(min(_FOLDS, len(self.steps))):
            left_out = self.steps[part::_FOLDS]
            refits.append(fit_steps([one for one in self.steps if one not in left_out] or self.steps))
            errors += [abs(one.predict_seconds(refits[-1]) / one.seconds - 1) for one in left_out]
        evaluated, share = self.evaluation, EVALUATION_SHARE
        if evaluated is not None and (trained := evaluated.predict_seconds(time) - time.step) > 0:
            share = evaluated.seconds / trained
        return Timing(
            step_time=time,
            num_measured=len(self.steps),
            evaluation=share,
            checkpoint=self.checkpoint,
            refits=tuple(refits),
            step_error=float(np.quantile(errors, 0.95)),
        )


def fit_steps(steps: Sequence[MeasuredStep]) -> TimeModel:
    """
    Return the coefficients with the least absolute relative error; terms that do not vary are 0.

    >>> steps = [MeasuredStep(1, flops, 0, 0, 2 + 3 * flops) for flops in (1, 2, 4)]
    >>> [round(one, 6) for one in attrs.astuple(fit_steps(steps))]
    [2.0, 0.0, 3.0, 0.0, 0.0]
    """
    # Takes a third of a second to import, which others of this module do not need.
    from scipy.optimize import linprog  # noqa: PLC0415

    table = np.array([attrs.astuple(one) for one in steps], dtype=np.float64)
    terms, seconds = np.column_stack([np.ones(len(table)), table[:, :-1]]), table[:, -1]
    largest = terms.max(axis=0)
    kept = np.ptp(terms, axis=0) > _VARIES * largest
    kept[0] = True
    scaled = terms[:, kept] / largest[kept] / seconds[:, None]
    count, width = scaled.shape
    deviations = np.eye(count)
    solved = linprog(
        np.concatenate([np.zeros(width), np.ones(2 * count)]),
        A_eq=np.hstack([scaled, deviations, -deviations]),
        b_eq=np.ones(count),
    )
    found = np.zeros(terms.shape[1])
    found[kept] = solved.x[:width] / largest[kept]
    return TimeModel(*found.tolist())


@attrs.frozen(eq=False)
class StepFlops:
    """FLOPs of an epoch's microbatches, by which the seconds of its steps are predicted."""

    counts: IntArray
    """Microbatches of a rank in each step; shape (num_steps,)."""

    flops: Floats
    """FLOPs of text, attention and vision; shape (num_microbatches, world_size, 3)."""

    sync_at: SyncPoint
    """Point where the ranks wait for each other."""

    @classmethod
    def from_epoch(cls, trained: EpochStats, flops: SampleWorks, *, sync_at: SyncPoint) -> StepFlops:
        """
        Return the FLOPs of an epoch, or of the rest of a resumed one.

        Args:
            trained: Statistics of the epoch.
            flops: Works of the samples in FLOPs.
            sync_at: Point where the ranks wait for each other.
        """
        by_term = (trained.pack_stats.with_works(flops.scaled(*weights)) for weights in np.eye(3))
        terms = [attrs.evolve(trained, pack_stats=one).batch_works() for one in by_term]
        batches, window = len(terms[0]), trained.packs_per_step // (trained.world_size * trained.batch_size)
        counts = np.minimum(window, batches - np.arange(0, batches, window))
        return cls(counts, np.stack(terms, axis=-1), sync_at)

    def seconds(self, time: TimeModel) -> Floats:
        """Return the seconds of each step; shape (num_steps,)."""
        batches = self.flops @ np.array([time.text, time.attention, time.vision])
        if self.sync_at == "step":
            busiest: Floats = self._sum_by_step(batches).max(axis=1)
        else:
            busiest = self._sum_by_step(batches.max(axis=1))
        return time.step + time.microbatch * self.counts + busiest

    def busiest_flops(self) -> Floats:
        """Return the FLOPs of each step on its busiest ranks; shape (num_steps, 3)."""
        totals = self.flops.sum(axis=2)
        ranks = totals.argmax(axis=1)
        if self.sync_at == "step":
            ranks = np.repeat(self._sum_by_step(totals).argmax(axis=1), self.counts)
        return self._sum_by_step(self.flops[np.arange(len(ranks)), ranks])

    def _sum_by_step(self, batches: Floats) -> Floats:
        """Sum rows of microbatches, shape (num_microbatches, …), by step; shape (num_steps, …)."""
        sums: Floats = np.add.reduceat(batches, np.cumsum(self.counts) - self.counts, axis=0)
        return sums


def calibration_packs(
    packs: Packs,
    work: NDArray[np.float64],
    vision: NDArray[np.float64],
    order: IntArray,
    *,
    world_size: int,
    batches: int,
    batch_size: int = 1,
) -> list[list[int]]:
    """
    Return the samples of each pack that is trained to measure time, step after step.

    Some steps have packs of similar work, from the heaviest to the lightest. Others have the packs
    with the most images, or halves of packs, or are the run's own first steps. The last step has a
    single microbatch.

    Args:
        packs: Packs of the plan.
        work: FLOPs of each pack; shape (num_packs,).
        vision: FLOPs of each pack's images; shape (num_packs,).
        order: Packs in the order of training, over all ranks.
        world_size: Data-parallel learners.
        batches: Microbatches of a rank in a step.
        batch_size: Packs of a microbatch; above 1 only if each is one sample.
    """
    each = world_size * batches * batch_size
    by_work = np.argsort(work, kind="stable")
    window = max(1, min(each, len(by_work) // _WINDOW))
    steps = [_packs_around(by_work, place, window) for place in _QUANTILES]
    if np.ptp(vision):
        steps.append(_packs_around(np.argsort(vision, kind="stable"), 1.0, window))
    steps += [order[:each], order[each : 2 * each] if order.size > each else order[:each]]
    chosen = [packs[pack] for step in steps for pack in np.resize(step, each).tolist()]
    median = [packs[pack] for pack in np.resize(_packs_around(by_work, 0.5, window), each).tolist()]
    if batch_size == 1:
        chosen += [pack[: -(-len(pack) // 2)] for pack in median]
    return chosen + (median[: world_size * batch_size] if batches > 1 else [])


def _packs_around(ranked: IntArray, place: float, window: int) -> IntArray:
    """Return *window* neighbouring packs of a ranking, at a relative *place* from 0 to 1."""
    start = round(place * (ranked.size - window))
    return ranked[start : start + window]


def parse_bytes(text: str) -> int:
    """
    Return the bytes that a text such as `80GiB` names: a GiB has 2 ** 30, a GB or G 10 ** 9.

    Raises:
        ValueError: It is not a positive amount of whole bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 GB"), parse_bytes("24G")
    (85899345920, 1500000000, 24000000000)
    """
    found = _FORM.fullmatch(text)
    amount = Decimal(0)
    if found is not None and (found[2] or found[3] == "B"):
        amount = Decimal(found[1]) * (1024 if found[3] == "iB" else 1000) ** _PREFIXES[found[2]]
    if amount < 1 or amount != int(amount):
        raise ValueError(f"{text!r} is not an amount of memory: write 80GiB, 80GB or 24G")
    return int(amount)


def bytes_text(number: float) -> str:
    """
    Return a number of bytes as text for people, in powers of 1,024.

    >>> bytes_text(85899345920), bytes_text(1500)
    ('80.00 GiB', '1.46 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:,.2f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


ModelSharding = Literal["ddp", "fsdp2"]
"""Way in which ranks share a model: whole on each, or by FSDP 2."""

MemoryKind = Literal["weights", "gradients", "optimizer", "activations", "temporaries"]

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
"""
Kinds of memory. Weights include buffers. Activations are the batch, and the tensors that the
forward pass keeps for the backward pass; temporaries are everything else of the two passes, and of
the update.
"""


@attrs.frozen
class PeakMemory:
    """Memory of one rank when it is highest, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes of all kinds of memory together."""
        return sum(attrs.astuple(self))


@attrs.frozen(eq=False)
class StepTrace:
    """
    Memory blocks of one steady step, with its passes and its update.

    A time is the number of allocations and frees before it.
    """

    allocated: NDArray[np.int64]
    """Time at which each block is allocated; shape (num_blocks,)."""

    freed: NDArray[np.int64]
    """Time at which each block is freed; shape (num_blocks,)."""

    sizes: NDArray[np.int64]
    """Bytes of each block; shape (num_blocks,)."""

    kinds: NDArray[np.int64]
    """Index in `MEMORY_KINDS` of each block, or -1 for activations and temporaries; same shape."""

    logits: NDArray[np.bool_]
    """Whether a block has the vocabulary's width, as logits and their gradients; same shape."""

    forward_end: int
    """Time at which the forward pass ends."""

    buckets: int = 0
    """Bytes of the buckets in which ranks sum gradients, allocated during the whole step."""

    def peak(self, *, fused_loss: bool = False) -> PeakMemory:
        """
        Return the peak of the step.

        Args:
            fused_loss: Leave out logits, which fused losses never hold as a whole.
        """
        kept = ~self.logits if fused_loss else np.ones(len(self.sizes), dtype=bool)
        kinds, rows = self._kinds(), np.zeros((len(MEMORY_KINDS), 1 + int(self.freed.max(initial=1))), dtype=np.int64)
        for times, sign in ((self.allocated, 1), (self.freed, -1)):
            np.add.at(rows, (kinds[kept], times[kept]), sign * self.sizes[kept])
        held = rows.cumsum(axis=1)
        highest = dict(zip(MEMORY_KINDS, held[:, int(held.sum(axis=0).argmax())].tolist(), strict=True))
        highest["temporaries"] += self.buckets
        return PeakMemory(**highest)

    def _kinds(self) -> NDArray[np.int64]:
        """Return the index in `MEMORY_KINDS` of every block; shape (num_blocks,)."""
        kept = (self.allocated <= self.forward_end) & (self.freed > self.forward_end)
        passing = np.where(kept, MEMORY_KINDS.index("activations"), MEMORY_KINDS.index("temporaries"))
        return np.where(self.kinds < 0, passing, self.kinds)


def peak_candidates(tokens: NDArray[Any], supervised: NDArray[Any], patches: NDArray[Any]) -> tuple[int, ...]:
    """
    Return the packs that may need the most memory.

    These are the packs with the most tokens, the most supervised tokens, the most patches, or the
    largest sum of shares of all three.

    Args:
        tokens: Tokens of each pack; shape (num_packs,).
        supervised: Supervised tokens of each pack; same shape.
        patches: Vision patches of each pack; same shape.

    >>> peak_candidates(*np.array([[9, 8, 8], [1, 2, 3], [0, 0, 0]]))
    (0, 2)
    """
    shares = [one / one.max() for one in (tokens, supervised, patches) if one.any()]
    return tuple(dict.fromkeys(int(one.argmax()) for one in (*shares, np.sum(shares, axis=0))))


@attrs.frozen
class LongestFit:
    """Longest packing length whose step fits into the memory."""

    tokens: int
    """Packing length; 0 if none fits."""

    peak: int
    """Peak at that length in bytes, without the margin; the lowest traced one if none fits."""

    limited: bool
    """Whether the model's positions are the limit, and not the memory."""


def add_margin(peak: float) -> int:
    """Return the bytes that a GPU needs for a traced peak, with a margin."""
    return math.ceil(peak * (1 + MARGIN))


def longest_fit(peak_at: Callable[[int], int], *, start: int, limit: int, most: int) -> LongestFit:
    """
    Return the longest packing length whose peak fits into the memory.

    Memory is nearly linear in tokens. So the line through two lengths names a third one, whose own
    peak corrects it. A length is only returned if its own peak fits.

    Args:
        peak_at: Function from tokens of a full pack to the peak of a step, in bytes.
        start: Length to begin with, >= 1.
        limit: Bytes that a peak with its margin may have.
        most: Longest length that the model has positions for.

    >>> longest_fit(lambda tokens: 10 * tokens, start=512, limit=110_000, most=32768).tokens
    9984
    """
    room = limit / (1 + MARGIN)
    known = {one: peak_at(one) for one in {start, _second_length(start, most)}}
    for _ in range(_ATTEMPTS):
        length = _extrapolate(known, room, most=most)
        if length in known:
            length -= _STEP if known[length] > room else 0
        if length in known or length < 1:
            break
        known[length] = peak_at(length)
        if known[length] <= room < known[length] * (1 + _ENOUGH):
            break
    fitting = [one for one, peak in known.items() if peak <= room and one <= most]
    longest = max(fitting, default=0)
    return LongestFit(longest, known.get(longest, min(known.values())), limited=longest == most)


def _second_length(start: int, most: int) -> int:
    """Return a second length to trace: twice the first within *most* tokens, else half of it."""
    return 2 * start if 2 * start <= most else max(1, start // 2)


def _extrapolate(known: dict[int, int], room: float, *, most: int) -> int:
    """
    Return the length, rounded down, at which the line through the two nearest peaks reaches *room*
    bytes.
    """
    (length, peak), (other, other_peak) = sorted(known.items(), key=lambda one: abs(one[1] - room))[:2]
    slope = (other_peak - peak) / (other - length)
    found = length + (room - peak) / slope if slope > 0 else most
    return most if found >= most else max(_STEP, int(found) // _STEP * _STEP)
