"""Callbacks of the trainer: a clean end on SIGTERM, no duplicate final evaluation."""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from packplan.core.ports import RankGroup


class SkipDuplicateFinalEval(TrainerCallback):
    """
    Skips the second evaluation and save after the last step.

    ms-swift evaluates and saves at the last step, and again at the end of its epoch.
    """

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:  # noqa: ARG002
        """Cancel evaluation and saving if the last step has done both."""
        if state.global_step == state.max_steps:
            control.should_evaluate = control.should_save = False


class FinishStream(TrainerCallback):
    """Evaluates and saves after the last step of a stream, which is known when the epoch ends."""

    def __init__(self, ends_training: Callable[[], bool]) -> None:
        """
        Finish a stream.

        Args:
            ends_training: Function that returns whether the last epoch is over.
        """
        self.ends_training = ends_training

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        """Evaluate and save if the last step has not."""
        if not self.ends_training():
            return
        if args.eval_strategy == "steps" and state.global_step % state.eval_steps:
            control.should_evaluate = True
        if args.save_strategy == "steps" and state.global_step % state.save_steps:
            control.should_save = True


class SaveOnSigterm(TrainerCallback):
    """On SIGTERM, saves one checkpoint of all ranks after the running step, and ends training."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.received = False
        self._before: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Install the signal handler."""
        with contextlib.suppress(ValueError):  # only the main thread may handle signals
            self._before = signal.signal(signal.SIGTERM, self._note)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the previous signal handler."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:  # noqa: ARG002
        """Save and stop if any rank received SIGTERM."""
        if self.group.any(self.received):
            self.received = control.should_save = control.should_training_stop = True

    def _note(self, _: int, __: FrameType | None) -> None:
        self.received = True
