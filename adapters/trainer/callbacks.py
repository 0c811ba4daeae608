"""
What happens around the trainer's steps: a clean end on SIGTERM, and nothing done twice at the end.
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from packplan.core.ports import RankGroup


class SkipDuplicateFinalEval(TrainerCallback):
    """
    ms-swift evaluates and saves at the last step, and again at the end of its epoch; once is
    enough.
    """

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:  # noqa: ARG002
        """Take back what the last step has done."""
        if state.global_step == state.max_steps:
            control.should_evaluate = control.should_save = False


class SaveOnSigterm(TrainerCallback):
    """
    On SIGTERM, saves a checkpoint after the running step, on every rank the same one, and ends
    training.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.received = False
        self._before: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Listen for SIGTERM."""
        with contextlib.suppress(ValueError):  # not the main thread: the signal is its owner's
            self._before = signal.signal(signal.SIGTERM, self._note)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Give the signal back."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:  # noqa: ARG002
        """Save and stop if any rank was told to."""
        if self.group.any(self.received):
            self.received = control.should_save = control.should_training_stop = True

    def _note(self, _: int, __: FrameType | None) -> None:
        self.received = True
