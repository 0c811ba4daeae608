"""Forecast of a run: seconds of its steps, epochs, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from packplan.core.forecast.fit import Floats, StepTerms, Timing
from packplan.core.schedule import EpochSchedule, EpochStats
from packplan.core.work import SampleWorks


@attrs.frozen
class Pause:
    """Interruptions of training at an interval of steps: evaluations, or checkpoints."""

    seconds: float
    """Seconds of each."""

    every: int
    """Optimizer steps between two; 0 if there is none. The last step always has one."""

    at_start: bool = False
    """Whether there is one before the first step too."""

    def total(self, start: int, stop: int, last: int) -> float:
        """
        Return the seconds of the one at the start, and of those after the steps from *start* + 1 to
        *stop*.

        Args:
            start: Optimizer steps before.
            stop: Optimizer steps at the end.
            last: Optimizer steps of the whole run.

        >>> Pause(2.0, every=4).total(4, 10, 10)
        4.0
        """
        count = int(self.at_start)
        if self.every:
            count += stop // self.every - start // self.every + (start < stop == last and stop % self.every > 0)
        return count * self.seconds


@attrs.frozen(eq=False)
class RunForecast:
    """Predicted seconds of a run from its start, or from the checkpoint that it resumes."""

    timing: Timing

    steps: Floats
    """Seconds of each step of the first epoch; shape (num_steps,)."""

    others: Floats
    """Seconds of that epoch by each of `timing.others`; shape (num_others,)."""

    first: int
    """Optimizer steps before."""

    last: int
    """Optimizer steps at the end."""

    tokens: int
    """Tokens of samples in the first epoch, without padding and repeated packs."""

    evaluation: Pause
    checkpoint: Pause

    @property
    def epoch_seconds(self) -> float:
        """Seconds of the steps of the first epoch, or of what is left of it."""
        return float(self.steps.sum())

    @property
    def mean_step(self) -> float:
        """Seconds of a mean step of the first epoch."""
        return float(self.steps.mean())

    @property
    def seconds(self) -> float:
        """Seconds of the run, evaluations and checkpoints included."""
        return self._steps(self.last) + self._pauses(self.last)

    @property
    def uncertainty(self) -> float | None:
        """Relative uncertainty of the seconds of steps, two standard errors; None if not known."""
        return self.timing.uncertainty(self.epoch_seconds, self.others.tolist())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of samples trained in a second, without evaluations and checkpoints."""
        return self.tokens / self.epoch_seconds

    def until(self, step: int) -> float:
        """
        Return the seconds from the start to the end of an optimizer step, without an evaluation or
        a checkpoint that follows it.
        """
        return self._steps(step) + self._pauses(max(self.first, step - 1))

    def _steps(self, step: int) -> float:
        """Return the seconds of steps; later epochs have the mean step of the first."""
        done = step - self.first
        within = min(done, len(self.steps))
        return float(self.steps[:within].sum()) + (done - within) * self.mean_step

    def _pauses(self, step: int) -> float:
        return sum(one.total(self.first, step, self.last) for one in (self.evaluation, self.checkpoint))


def forecast_run(
    timing: Timing,
    trained: EpochStats,
    schedule: EpochSchedule,
    flops: SampleWorks,
    *,
    evaluated: StepTerms | None = None,
    every: Sequence[int] = (0, 0),
    evaluates_first: bool = False,
) -> RunForecast:
    """
    Return the forecast of a run.

    Args:
        timing: Seconds of the parts of the run.
        trained: Packs of the epoch of the schedule's next step, in their order.
        schedule: Order of the packs; it has a next step.
        flops: Works of the samples in FLOPs.
        evaluated: Terms of the evaluation; None without one.
        every: Optimizer steps between two evaluations, and between two checkpoints; 0 for none.
        evaluates_first: Whether an evaluation comes before the first step.
    """
    terms = StepTerms.from_epoch(trained, flops, meeting=schedule.meeting)
    evaluation = 0.0
    if evaluated is not None:
        forward = evaluated.seconds(attrs.evolve(timing.time, step=0.0))
        evaluation = timing.evaluation * float(forward.sum())
    return RunForecast(
        timing=timing,
        steps=terms.seconds(timing.time),
        others=np.array([terms.seconds(other).sum() for other in timing.others]),
        first=schedule.start.step,
        last=max(schedule.total_steps, schedule.start.step),
        tokens=trained.tokens(0, len(terms.counts)).useful,
        evaluation=Pause(evaluation, every[0], at_start=evaluates_first),
        checkpoint=Pause(timing.checkpoint, every[1]),
    )
