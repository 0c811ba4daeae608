"""
Times the steps of a trainer that trains, logs and saves as usual.

The caller chooses the training data and their order.
"""

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import attrs
import torch
from swift.trainers.patcher import ProgressCallbackNew
from transformers import TrainerCallback

from packplan.core.forecast import Calibration, MeasuredStep, StepFlops

_WARM_UP = 2
"""Number of first steps that are not counted, since they allocate memory and choose kernels."""


@attrs.define(eq=False)
class StepClock(TrainerCallback):  # type: ignore[misc]  # its library has no types
    """Trainer callback that times each optimizer step, and the last evaluation and checkpoint."""

    trainer: Any
    clock: Callable[[], float]
    step_s: list[float] = attrs.field(factory=list)
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    _since: float = 0.0
    _waited_s: float = 0.0
    """Seconds spent waiting for loaders before the epoch; -1 after the epoch's first step."""

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Start timing the first step of the epoch."""
        self._since, self._waited_s = self._synced_now(), self.trainer.wait_seconds

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the seconds of an optimizer step, not counting the time to start the loaders."""
        now = self._synced_now()
        # Loader processes start in an epoch's first step; for later steps they load ahead.
        starting = self.trainer.wait_seconds - self._waited_s if self._waited_s >= 0 else 0.0
        self.step_s.append(now - self._since - (starting if self.trainer.args.dataloader_num_workers else 0.0))
        self._since, self._waited_s = now, -1.0

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Record the seconds of an evaluation, which follows the last step."""
        now = self._synced_now()
        self.evaluation_s, self._since = now - self._since, now

    def on_save(self, *_: Any, **__: Any) -> None:
        """Record the seconds of a checkpoint, which follows the last step and its evaluation."""
        now = self._synced_now()
        self.checkpoint_s, self._since = now - self._since, now

    def _synced_now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()


def measure_steps(
    trainer: Any,
    terms: StepFlops,
    *,
    evaluation_terms: StepFlops | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """
    Train, and return the seconds of this rank's steps, evaluation and checkpoint.

    The first `_WARM_UP` steps are left out.

    Args:
        trainer: Trainer that trains the same packs in the same order in each epoch. The trainer may
            evaluate and save only after its last step.
        terms: FLOPs of the steps of an epoch.
        evaluation_terms: FLOPs of the trainer's evaluation, counted as one step; None if the
            trainer does not evaluate.
        clock: Function that returns the current time in seconds.
    """
    clocked = StepClock(trainer, clock)
    trainer.remove_callback(ProgressCallbackNew)  # the console, which derives from it
    trainer.add_callback(clocked)
    trainer.train()
    steps = pair_with_flops(terms, clocked.step_s)
    evaluation = None
    if evaluation_terms is not None:
        (evaluation,) = pair_with_flops(evaluation_terms, [clocked.evaluation_s])
    return Calibration(tuple(steps[_WARM_UP:]), evaluation, clocked.checkpoint_s)


def pair_with_flops(terms: StepFlops, seconds: Sequence[float]) -> list[MeasuredStep]:
    """
    Return the seconds of each step, its number of microbatches and the FLOPs of its busiest ranks.

    Args:
        terms: FLOPs of the steps of an epoch.
        seconds: Seconds of each step, over one or more epochs.
    """
    steps = zip(cycle(terms.counts.tolist()), cycle(terms.busiest_flops().tolist()), seconds, strict=False)
    return [MeasuredStep(count, text, attention, vision, one) for count, (text, attention, vision), one in steps]
