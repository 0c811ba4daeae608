"""
Mixin that ends training at the first loss, gradient norm or evaluation loss that is not finite.
"""

import math
from typing import Any

import torch

from packplan.core.errors import RunError


def not_finite_error(what: str, number: float) -> RunError:
    """Return the error that ends a run whose loss, gradient or weights are not finite."""
    ended = "the run ended before that step was saved, and earlier checkpoints are unchanged"
    return RunError("not_finite", f"{what} is {number}, so {ended}")


class StopsAtNonFinite:
    """
    Mixin that requires a finite loss and gradient norm in each optimizer step.

    Each evaluation loss has to be finite too. With fp16, the gradient norm is not checked.

    ms-swift skips updates with NaN, and transformers logs another loss in place of NaN, so later
    losses would not show the fault.
    """

    accelerator: Any
    eval_dataset: Any
    state: Any
    sum_over_ranks: Any

    _step_loss: torch.Tensor | float = 0.0

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """Train on one microbatch, and add its loss to the step's loss."""
        loss: torch.Tensor = super().training_step(model, inputs, *arguments, **options)  # type: ignore[misc]
        self._step_loss = self._step_loss + loss
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]  # of the trainer's class
        # ms-swift has already waited for the device, since it skips the update if the norm is NaN.
        # So has transformers, since it replaces a loss of NaN in its log.
        loss, self._step_loss = float(self._step_loss), 0.0
        # Overflowing gradients are normal under fp16's loss scaler, which skips the step and lowers
        # the scale. The loss is read before scaling.
        gradient = 0.0 if norm is None or self.accelerator.mixed_precision == "fp16" else float(norm)
        step = f"optimizer step {self.state.global_step + 1:,}"
        numbers = {f"the loss of {step}": loss, f"the gradient norm of {step}": gradient}
        # Summed over ranks, so that every rank ends with the same error. Finite numbers count as 0:
        # their sum might exceed float32, and some devices have no float64.
        faults = [0.0 if math.isfinite(number) else number for number in numbers.values()]
        sums = self.sum_over_ranks(torch.tensor(faults)).tolist()
        for what, number in zip(numbers, sums, strict=True):
            if not math.isfinite(number):
                raise not_finite_error(what, number)
        return norm

    def _evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        metrics: dict[str, float] = super()._evaluate(*arguments, **options)  # type: ignore[misc]
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        for name in ("eval_loss", *(f"eval_{one}_loss" for one in sets)):
            if not math.isfinite(loss := metrics.get(name, 0.0)):
                raise not_finite_error(name, loss)
        return metrics
