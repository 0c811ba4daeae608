"""
Console of a run: a progress bar on a terminal, and a line for each logged step, evaluation or save.

All numbers, also those that the console omits, are written to `logging.jsonl` and sent to the
services of `report_to`.
"""

import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from swift.trainers.patcher import ProgressCallbackNew
from transformers.trainer_utils import has_length
from transformers.utils.logging import disable_progress_bar

from packplan.adapters.progress import TrainingBar

log = logging.getLogger(__name__)

STEP = MappingProxyType(
    {
        "loss": "loss {:.4f}",
        "learning_rate": "lr {:.2e}",
        "fill": "fill {:.3f}",
        "tokens_per_second": "{:>7,.0f} tokens/s",
        "remaining_time": "{} left",
    }
)
"""Name of a logged number -> its format in the line of a logging step."""

OTHERS = MappingProxyType(
    {
        "eval_loss": "evaluation loss {:.4f}",
        "eval_token_acc": "token accuracy {:.4f}",
        "eval_runtime": "in {:.1f} s",
        "train_runtime": "trained in {:.1f} s",
    }
)
"""Name of a logged number -> its format in the line after an evaluation, or after training."""


class RunConsole(ProgressCallbackNew):  # type: ignore[misc]  # its library has no types
    """
    Callback for the console, in place of ms-swift's callbacks, which print all numbers of a step.
    """

    def __init__(self, *, draws: bool) -> None:
        """
        Prepare the console.

        Args:
            draws: Whether to show a progress bar if the standard error stream is a terminal.
        """
        super().__init__()
        self._draws = draws and sys.stderr.isatty()
        self._bar: TrainingBar | None = None
        self._num_evaluated, self._numbers = 0, ""
        # ms-swift sets these when training begins, and fails on earlier logs.
        self.start_time, self.start_step = time.time(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # transformers passes them
        """Show the bar, and hide bars of transformers."""
        self.start_time, self.start_step = time.time(), state.global_step
        disable_progress_bar()  # transformers' bar of weight files that are written
        if self._draws and state.is_world_process_zero:
            self._bar = TrainingBar(state.max_steps, done=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(done=state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Show the number of batches that an evaluation has computed."""
        self._num_evaluated += 1
        if self._bar is not None and has_length(eval_dataloader):
            self._bar.update(text=f"evaluating {self._num_evaluated:,}/{len(eval_dataloader):,}")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Show the numbers of the last step again."""
        self._num_evaluated = 0
        if self._bar is not None:
            self._bar.update(text=self._numbers)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        """
        Write all numbers to `logging.jsonl`, and log a line of the numbers that have a format.
        """
        super().on_log(args, state, control, logs, **options)
        numbers = logs | {"remaining_time": " ".join(logs["remaining_time"].split()[:2])}  # two units of time
        step = numbers_text(numbers, STEP if "loss" in logs else OTHERS)
        if step:
            self._log_line(state, step)
        if self._bar is not None and "loss" in logs:
            self._numbers = step.rpartition("  ")[0]  # the bar has the time left itself
            self._bar.update(text=self._numbers)
        log.debug("%s", logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Log the name of the checkpoint that was saved."""
        self._log_line(state, f"saved checkpoint-{state.global_step}")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Remove the bar."""
        self.close()

    @staticmethod
    def _log_line(state: Any, text: str) -> None:
        end = f"{state.max_steps:,}"
        log.info("step %s/%s  %s", f"{state.global_step:,}".rjust(len(end)), end, text)

    def close(self) -> None:
        """Remove the progress bar, also after an interrupted training."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def numbers_text(logs: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """
    Return the logged numbers that have a format in *texts*, formatted and in the order of *texts*.

    >>> numbers_text({"loss": 6.2925, "grad_norm": 2.1, "fill": 0.984}, STEP)
    'loss 6.2925  fill 0.984'
    """
    return "  ".join(text.format(logs[name]) for name, text in texts.items() if name in logs)
