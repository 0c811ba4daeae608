"""
Forecasts of the time and the memory of a run.

The time is computed from the seconds and FLOPs of measured steps. The memory is computed from the
blocks that a traced step allocates. A search over traced steps also finds the longest packing
length that fits into memory.
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
Time of an evaluation divided by the time of training on the same packs, used if no evaluation was
measured. The forward pass has a third of the FLOPs of training.
"""

_FOLDS = 7
"""
Maximum number of parts into which the measured steps are divided. Each part is left out of one fit.
"""

_VARIES = 1e-6
"""Smallest spread of a term, relative to its largest value, for which a coefficient is fitted."""

REPEATS = 3
"""Number of times that each step is measured."""

_QUANTILES = (1.0, 0.0, 0.5, 0.75, 0.25)
"""Quantiles of work at which packs are measured, the heaviest packs first."""

_WINDOW = 8
"""
Divisor of the number of packs. A measured step of similar packs has at most an eighth of all packs,
but at least one pack. The packs are neighbours in the order of work. The step may contain a pack
several times.
"""

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(iB|B|)", re.IGNORECASE)

MARGIN = 0.1
"""
Share that is added to a traced peak, to allow for rounded block sizes, fragmentation, and the
memory of CUDA and of collectives. This margin is an assumption, and was not measured on a GPU.
"""

_STEP = 64
"""Packing lengths are rounded down to a multiple of this number of tokens."""

_ENOUGH = 0.03
"""
Share of a traced peak: the search for a longer packing length ends once less than this share of the
peak is free.
"""

_ATTEMPTS = 2


@attrs.frozen
class Pause:
    """Interruption of training at regular steps: an evaluation, or a checkpoint."""

    seconds: float
    """Seconds of each pause."""

    every: int
    """
    Number of optimizer steps between two pauses, with another pause at the end of the run. 0 means
    no pause after any step.
    """

    at_start: bool = False
    """Whether there is also a pause before the first step."""

    def total_seconds(self, num_steps: int) -> float:
        """
        Return the total seconds of all pauses in a run.

        Args:
            num_steps: Number of optimizer steps of the run.

        >>> Pause(2.0, every=4).total_seconds(10)
        6.0
        """
        count = int(self.at_start) + (-(-num_steps // self.every) if self.every else 0)
        return count * self.seconds


@attrs.frozen(eq=False)
class RunForecast:
    """Forecast of the time of a run, in seconds."""

    timing: Timing

    steps: Floats
    """Seconds of each step of the first epoch; shape (num_steps,)."""

    refit_seconds: Floats
    """Seconds of the first epoch, as each of `timing.refits` predicts them; shape (num_refits,)."""

    total_steps: int
    """Number of optimizer steps of the run."""

    tokens: int
    """Number of sample tokens in the first epoch, without padding and repeated packs."""

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
        Seconds of the run, pauses included. A step of a later epoch counts as a mean step of the
        first epoch.
        """
        first, num = self.steps[: self.total_steps], self.total_steps
        later = (num - len(first)) * self.mean_step
        return float(first.sum()) + later + sum(one.total_seconds(num) for one in (self.evaluation, self.checkpoint))

    @property
    def uncertainty(self) -> float | None:
        """
        Relative uncertainty of the first epoch's seconds, as two standard errors; None if unknown.
        """
        return self.timing.uncertainty(self.epoch_seconds, self.refit_seconds.tolist())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that all ranks together train, without evaluations and checkpoints."""
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
    Return the forecast of a run's time.

    Args:
        timing: Fitted coefficients of a step, and the seconds of a checkpoint.
        trained: Statistics of the first epoch.
        schedule: Schedule of the run from its first step.
        flops: Work of each sample in FLOPs.
        evaluated: FLOPs of training on the packs of the evaluation; None without an evaluation.
        every: Number of optimizer steps between two evaluations, and between two checkpoints; 0 if
            there are none.
        evaluates_first: Whether there is an evaluation before the first step.
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
    """Coefficients that predict the seconds of an optimizer step."""

    step: float
    """Seconds of each step for the optimizer, and for communication that ranks do once per step."""

    microbatch: float
    """Seconds of each microbatch for its start and for communication between ranks."""

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
    """Number of microbatches of a rank."""

    text: float
    """FLOPs of the matrix products of text positions, on the busiest rank."""

    attention: float
    """FLOPs of attention between text tokens, on the busiest rank."""

    vision: float
    """FLOPs of the vision tower, on the busiest rank."""

    seconds: float
    """Seconds since the end of the previous step, without logging, evaluations and checkpoints."""

    def predict_seconds(self, time: TimeModel) -> float:
        """Return the seconds that the coefficients in *time* predict for this step."""
        flops = time.text * self.text + time.attention * self.attention + time.vision * self.vision
        return time.step + time.microbatch * self.microbatches + flops


@attrs.frozen
class Timing:
    """Coefficients fitted to measured steps, and the time of evaluations and checkpoints."""

    step_time: TimeModel

    num_measured: int
    """Number of measured steps to which the coefficients were fitted."""

    evaluation: float = EVALUATION_SHARE
    """Time of an evaluation divided by the time of training on the same packs."""

    checkpoint: float = 0.0
    """Seconds of saving a checkpoint."""

    refits: tuple[TimeModel, ...] = ()
    """Coefficients of further fits, each fitted without one part of the measured steps."""

    step_error: float | None = None
    """
    Relative error that 95 % of the measured steps do not exceed; None if unknown. The error of a
    step comes from the fit that leaves this step out.
    """

    def uncertainty(self, seconds: float, refit_seconds: Sequence[float]) -> float | None:
        """
        Return the relative uncertainty of a prediction, as two standard errors; None if unknown.

        The standard error is a jackknife estimate over the left-out parts of the measured steps.

        Args:
            seconds: Prediction of `step_time`.
            refit_seconds: Prediction of each of `refits`.
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
    """
    A measured evaluation, with the FLOPs of training on its packs; None without an evaluation.
    """

    checkpoint: float = 0.0
    """Seconds of saving a checkpoint; 0 if the run saves none."""

    def fit_timing(self) -> Timing:
        """Fit a timing to these steps, and compute its error on left-out steps."""
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
    Fit the coefficients, each at least 0, with the smallest sum of absolute relative errors. The
    coefficient of a term that does not vary is 0, apart from `step`.

    >>> steps = [MeasuredStep(1, flops, 0, 0, 2 + 3 * flops) for flops in (1, 2, 4)]
    >>> [round(one, 6) for one in attrs.astuple(fit_steps(steps))]
    [2.0, 0.0, 3.0, 0.0, 0.0]
    """
    # The import takes a third of a second, and no other function of this module needs it.
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
    """FLOPs of the microbatches of an epoch, from which the seconds of the steps are predicted."""

    counts: IntArray
    """Number of microbatches of a rank in each step; shape (num_steps,)."""

    flops: Floats
    """FLOPs of text, attention and vision; shape (num_microbatches, world_size, 3)."""

    sync_at: SyncPoint
    """Where ranks wait for each other: after each step, or after each microbatch."""

    @classmethod
    def from_epoch(cls, trained: EpochStats, flops: SampleWorks, *, sync_at: SyncPoint) -> StepFlops:
        """
        Return the FLOPs of an epoch, or of the rest of a resumed epoch.

        Args:
            trained: Statistics of the epoch.
            flops: Work of each sample in FLOPs.
            sync_at: Where ranks wait for each other: after each step, or after each microbatch.
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
        """
        Return the FLOPs of each step on the busiest ranks: text, attention, vision; shape
        (num_steps, 3).
        """
        totals = self.flops.sum(axis=2)
        ranks = totals.argmax(axis=1)
        if self.sync_at == "step":
            ranks = np.repeat(self._sum_by_step(totals).argmax(axis=1), self.counts)
        return self._sum_by_step(self.flops[np.arange(len(ranks)), ranks])

    def _sum_by_step(self, batches: Floats) -> Floats:
        """
        Sum values of microbatches, shape (num_microbatches, …), over each step; shape (num_steps,
        …).
        """
        return np.add.reduceat(batches, np.cumsum(self.counts) - self.counts, axis=0)


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
    Choose the packs that are trained to measure time; return the samples of each pack, in the order
    of the steps.

    Each of the first steps has packs of similar work: the heaviest, the lightest, or packs in
    between. Further steps have the packs with the most FLOPs of images, halves of packs, or the
    packs of the run's first two steps. If steps have several microbatches, the last step has only
    one.

    Args:
        packs: Packs of the plan.
        work: FLOPs of each pack; shape (num_packs,).
        vision: FLOPs of each pack's images; shape (num_packs,).
        order: Pack indices in the order of training, over all ranks.
        world_size: Number of data-parallel ranks.
        batches: Number of microbatches of a rank in a step.
        batch_size: Number of packs in a microbatch; above 1 only if each pack is one sample.
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
    """
    Return *window* neighbouring packs of a ranking, starting at the relative *place* from 0 to 1.
    """
    start = round(place * (ranked.size - window))
    return ranked[start : start + window]


def parse_bytes(text: str) -> int:
    """
    Parse a text such as `80GiB` to a number of bytes. A GiB has 2 ** 30 bytes, a GB or G has 10 **
    9.

    Raises:
        ValueError: The text is not a positive amount of whole bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 GB"), parse_bytes("24G")
    (85899345920, 1500000000, 24000000000)
    """
    found = _FORM.fullmatch(text)
    amount = Decimal(0)
    if found is not None and (found[2] or found[3].upper() == "B"):
        amount = Decimal(found[1]) * (1024 if len(found[3]) == 2 else 1000) ** _PREFIXES[found[2].upper()]
    if amount < 1 or amount != int(amount):
        raise ValueError(f"{text!r} is not an amount of memory: write 80GiB, 80GB or 24G")
    return int(amount)


def bytes_text(number: float) -> str:
    """
    Return a number of bytes as readable text with units of powers of 1,024.

    >>> bytes_text(85899345920), bytes_text(1500)
    ('80.00 GiB', '1.46 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:,.2f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


ModelSharding = Literal["ddp", "fsdp2"]
"""
How ranks share a model: `ddp` keeps the whole model on each rank, `fsdp2` shards it by FSDP 2.
"""

MemoryKind = Literal["weights", "gradients", "optimizer", "activations", "temporaries"]

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
"""
Kinds of memory. Weights include buffers. Activations are the batch and the tensors that the forward
pass keeps for the backward pass. Temporaries are all other tensors of the forward pass, the
backward pass and the update.
"""


@attrs.frozen
class PeakMemory:
    """Memory of one rank at its peak, in bytes for each kind of memory."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        """Total bytes of all kinds of memory."""
        return sum(attrs.astuple(self))


@attrs.frozen(eq=False)
class StepTrace:
    """
    Memory blocks of one optimizer step after the first: forward pass, backward pass and update.

    Time is counted in events: the time of an event is the number of earlier allocations and frees.
    """

    allocated: NDArray[np.int64]
    """Time at which each block is allocated; shape (num_blocks,)."""

    freed: NDArray[np.int64]
    """Time at which each block is freed; shape (num_blocks,)."""

    sizes: NDArray[np.int64]
    """Size of each block in bytes; shape (num_blocks,)."""

    kinds: NDArray[np.int64]
    """
    Index in `MEMORY_KINDS` of each block, or -1 for activations and temporaries; shape
    (num_blocks,).
    """

    logits: NDArray[np.bool_]
    """
    Whether a block is as wide as the vocabulary, like logits and their gradients; shape
    (num_blocks,).
    """

    forward_end: int
    """Time at which the forward pass ends."""

    buckets: int = 0
    """
    Size in bytes of the buckets in which ranks sum gradients. The buckets are allocated during the
    whole step.
    """

    def peak(self, *, fused_loss: bool = False) -> PeakMemory:
        """
        Return the peak memory of the step.

        Args:
            fused_loss: Whether to leave out logits, which a fused loss never stores completely.
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
    Return the indices of the packs that may need the most memory.

    The candidates are the packs with the most tokens, supervised tokens and patches. A further
    candidate is the pack with the largest sum of the three numbers, each divided by its maximum.

    Args:
        tokens: Number of tokens of each pack; shape (num_packs,).
        supervised: Number of supervised tokens of each pack; shape (num_packs,).
        patches: Number of vision patches of each pack; shape (num_packs,).

    >>> peak_candidates(*np.array([[9, 8, 8], [1, 2, 3], [0, 0, 0]]))
    (0, 2)
    """
    shares = [one / one.max() for one in (tokens, supervised, patches) if one.any()]
    return tuple(dict.fromkeys(int(one.argmax()) for one in (*shares, np.sum(shares, axis=0))))


@attrs.frozen
class LongestFit:
    """Longest packing length with which a step fits into memory."""

    tokens: int
    """Packing length in tokens; 0 if no traced length fits."""

    peak: int
    """
    Peak memory at this length in bytes, without the margin; the lowest traced peak if no length
    fits.
    """

    limited: bool
    """Whether the model's number of positions is the limit, not the memory."""


def add_margin(peak: float) -> int:
    """Return the bytes that a GPU needs for a traced peak, margin included."""
    return math.ceil(peak * (1 + MARGIN))


def longest_fit(peak_at: Callable[[int], int], *, start: int, limit: int, most: int) -> LongestFit:
    """
    Search for the longest packing length whose peak memory fits.

    Memory is nearly linear in tokens. A line through the peaks of two lengths therefore gives a
    third length to trace, and then perhaps a fourth. The longest traced length whose peak fits is
    returned.

    Args:
        peak_at: Function that returns the peak of a step in bytes, given the tokens of a full pack.
        start: Length to trace first, >= 1.
        limit: Maximum size of a peak in bytes, margin included.
        most: Longest length that the model has positions for.

    >>> longest_fit(lambda tokens: 10 * tokens, start=512, limit=110_000, most=32768).tokens
    9984
    """
    room = limit / (1 + MARGIN)
    # The second length is twice the first, or half of it if twice is too long.
    second = 2 * start if 2 * start <= most else max(1, start // 2)
    known = {one: peak_at(one) for one in {start, second}}
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


def _extrapolate(known: dict[int, int], room: float, *, most: int) -> int:
    """
    Return the length at which a line through the two peaks nearest to *room* reaches *room* bytes.
    The length is rounded down, and is at most *most*.
    """
    (length, peak), (other, other_peak) = sorted(known.items(), key=lambda one: abs(one[1] - room))[:2]
    slope = (other_peak - peak) / (other - length)
    found = length + (room - peak) / slope if slope > 0 else most
    return most if found >= most else max(_STEP, int(found) // _STEP * _STEP)
