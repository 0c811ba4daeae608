"""
Seconds of an optimizer step from what its busiest rank computes, fitted to measured steps.

    seconds = step + pack * packs + text * FLOPs + attention * FLOPs + vision * FLOPs

The ranks of a run exchange the same bytes in each step, or in each microbatch. So the exchange does
not vary by itself, and is a part of the first two terms.

The fit minimises the sum of relative deviations under coefficients >= 0, which is a linear program.
A few steps that another program slowed down do not move it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.schedule import EpochStats
from packplan.core.work import Meeting, SampleWorks

Floats = NDArray[np.float64]

EVALUATION = 1 / 3
"""Seconds of an evaluation over those of training, by FLOPs: a forward pass of three passes."""

_FOLDS = 7
"""Parts of the measured steps that are left out in turn."""

_VARIES = 1e-6
"""Smallest spread of a term over its largest value at which the term is fitted."""


@attrs.frozen
class StepTime:
    """Coefficients of the seconds of an optimizer step."""

    step: float
    """Seconds of each step: the optimizer, and what ranks exchange once a step."""

    pack: float
    """Seconds of each microbatch: its start, and what ranks exchange in it."""

    text: float
    """Seconds per FLOP of the matrix products of text positions."""

    attention: float
    """Seconds per FLOP of attention between text tokens."""

    vision: float
    """Seconds per FLOP of the vision tower."""


@attrs.frozen
class MeasuredStep:
    """One optimizer step that was measured."""

    packs: int
    """Microbatches of a rank."""

    text: float
    """FLOPs of the matrix products of text positions, on the busiest rank."""

    attention: float
    """FLOPs of attention between text tokens, on the busiest rank."""

    vision: float
    """FLOPs of the vision tower, on the busiest rank."""

    seconds: float
    """Seconds from the end of the step before, without logs, evaluations and checkpoints."""

    def predicted(self, time: StepTime) -> float:
        """Return the seconds by some coefficients."""
        flops = time.text * self.text + time.attention * self.attention + time.vision * self.vision
        return time.step + time.pack * self.packs + flops


@attrs.frozen
class Timing:
    """Seconds of the parts of a run on one machine."""

    time: StepTime

    basis: str
    """Origin of the seconds, for people to read."""

    evaluation: float = EVALUATION
    """Seconds of an evaluation over those of training on its packs; 0 if steps have its time."""

    checkpoint: float = 0.0
    """Seconds of saving a checkpoint."""

    others: tuple[StepTime, ...] = ()
    """Coefficients with each part of the measured steps left out; none of an earlier run."""

    step_error: float | None = None
    """Relative error that 95 % of steps that the fit has not seen stay below; None if not known."""

    def uncertainty(self, seconds: float, others: Sequence[float]) -> float | None:
        """
        Return the relative uncertainty of a prediction, two standard errors; None if not known.

        The standard error is the jackknife's, over the parts that are left out.

        Args:
            seconds: Prediction by `time`.
            others: The same by each of `others`.
        """
        if not self.others or not seconds:
            return None
        count = len(others)
        return 2 * float(np.sqrt((count - 1) * np.mean((np.array(others) / seconds - 1) ** 2)))


@attrs.frozen
class Calibration:
    """Measured steps of a run on one machine."""

    machine: str
    """Name of the machine and its device."""

    steps: tuple[MeasuredStep, ...]
    """At least one."""

    evaluation: MeasuredStep | None = None
    """An evaluation, with the FLOPs of training on its packs; None without one."""

    checkpoint: float = 0.0
    """Seconds of saving a checkpoint; 0 if the run saves none."""

    def timing(self) -> Timing:
        """Return the fit of these steps, with its error on steps that were left out."""
        time, errors, others = fit(self.steps), [], []
        for part in range(min(_FOLDS, len(self.steps))):
            left_out = self.steps[part::_FOLDS]
            others.append(fit([one for one in self.steps if one not in left_out] or self.steps))
            errors += [abs(one.predicted(others[-1]) / one.seconds - 1) for one in left_out]
        evaluated, share = self.evaluation, EVALUATION
        if evaluated is not None and (trained := evaluated.predicted(time) - time.step) > 0:
            share = evaluated.seconds / trained
        return Timing(
            time=time,
            basis=f"{len(self.steps)} steps measured on {self.machine}",
            evaluation=share,
            checkpoint=self.checkpoint,
            others=tuple(others),
            step_error=float(np.quantile(errors, 0.95)),
        )


def fit(steps: Sequence[MeasuredStep]) -> StepTime:
    """
    Return the coefficients of least relative deviations; those of terms that do not vary are 0.

    >>> steps = [MeasuredStep(1, flops, 0, 0, 2 + 3 * flops) for flops in (1, 2, 4)]
    >>> [round(one, 6) for one in attrs.astuple(fit(steps))]
    [2.0, 0.0, 3.0, 0.0, 0.0]
    """
    # Takes a third of a second to import, which guesses do not need.
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
    return StepTime(*found.tolist())


@attrs.frozen(eq=False)
class StepTerms:
    """FLOPs of the microbatches of an epoch, of which the seconds of its steps are sums."""

    counts: IntArray
    """Microbatches of a rank in each step; shape (num_steps,)."""

    flops: Floats
    """FLOPs of text, attention and vision; shape (num_microbatches, world_size, 3)."""

    meeting: Meeting
    """Point where the ranks wait for each other."""

    @classmethod
    def from_epoch(cls, trained: EpochStats, flops: SampleWorks, *, meeting: Meeting) -> StepTerms:
        """
        Return the terms of an epoch, or of what is left of it.

        Args:
            trained: Packs of the epoch in their order.
            flops: Works of the samples in FLOPs.
            meeting: Point where the ranks wait for each other.
        """
        by_term = (trained.pack_stats.with_works(flops.weighed(*weights)) for weights in np.eye(3))
        terms = [attrs.evolve(trained, pack_stats=one).batch_works() for one in by_term]
        batches, window = len(terms[0]), trained.packs_per_step // (trained.world_size * trained.batch_size)
        counts = np.minimum(window, batches - np.arange(0, batches, window))
        return cls(counts, np.stack(terms, axis=-1), meeting)

    def seconds(self, time: StepTime) -> Floats:
        """Return the seconds of each step; shape (num_steps,)."""
        batches = self.flops @ np.array([time.text, time.attention, time.vision])
        if self.meeting == "step":
            busiest: Floats = self._of_steps(batches).max(axis=1)
        else:
            busiest = self._of_steps(batches.max(axis=1))
        return time.step + time.pack * self.counts + busiest

    def busiest(self) -> Floats:
        """Return the FLOPs of each step on its busiest ranks; shape (num_steps, 3)."""
        totals = self.flops.sum(axis=2)
        ranks = totals.argmax(axis=1)
        if self.meeting == "step":
            ranks = np.repeat(self._of_steps(totals).argmax(axis=1), self.counts)
        return self._of_steps(self.flops[np.arange(len(ranks)), ranks])

    def _of_steps(self, batches: Floats) -> Floats:
        """Return the sums of rows of microbatches by step."""
        sums: Floats = np.add.reduceat(batches, np.cumsum(self.counts) - self.counts, axis=0)
        return sums
