"""Assertion that `unpad` leaves the loss and the gradients of a trainer unchanged."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import attrs

from packplan.adapters.hf.packed_calls import HOOKED
from packplan.adapters.hf.unpad import unpad
from packplan.adapters.models import Gradients, add_gradients, weight_gradients
from packplan.adapters.proof.comparison import Outcome, compare
from packplan.adapters.proof.steps import rounding_limit_of, trying_losses
from packplan.core.errors import ArgumentError, MismatchError


@attrs.frozen
class UnpaddedStep:
    """Loss and gradients of a trainer's batch, with and without padding."""

    loss: float
    """Loss without padding."""

    padded_loss: float
    """Loss with padding."""

    gradients: float
    """Norm of the difference of gradients, divided by the norm of the gradients with padding."""

    real: int
    """Positions that were computed without padding."""

    padded: int
    """Positions that were computed with padding."""


def assert_unpadded_equal(trainer: Any, *, limit: float | None = None) -> UnpaddedStep:
    """
    Assert that a batch of a trainer has the same loss and gradients with and without padding.

    The trainer's first batch is computed twice with the trainer's loss: with padding, and without
    padding by the hooks of `unpad`. If the model has no hooks, they are added for this comparison
    only. Dropout is off. Weights, gradients, random state and the trainer are restored afterwards.

    Args:
        trainer: Trainer of transformers or TRL; its reference model is compared too.
        limit: Largest allowed relative difference. None takes the rounding error of the trainer's
            precision.

    Raises:
        MismatchError: The loss or the gradients differ.
        ArgumentError: The batch has no padding, so nothing is compared.
        ModelError: The model cannot be hooked.
    """
    model = trainer.model
    models = [one for one in (model, getattr(trainer, "ref_model", None)) if one is not None]
    with ExitStack() as stack:
        hooks = [HOOKED[module] for one in models for module in one.modules() if module in HOOKED]
        for one in models if not hooks else ():
            hooks.append(unpad(one))
            stack.callback(hooks[-1].remove)
        stack.enter_context(trying_losses(trainer, batches=trainer.args.gradient_accumulation_steps))
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))  # noqa: SLF001  # GRPO draws answers here
        before = [attrs.evolve(one.counts) for one in hooks]
        loss, gradients = _loss_and_gradients(trainer, inputs)
        real = sum(one.counts.real - then.real for one, then in zip(hooks, before, strict=True))
        padded = sum(one.counts.padded - then.padded for one, then in zip(hooks, before, strict=True))
        for one in hooks:
            stack.enter_context(one.paused())
        due, expected = _loss_and_gradients(trainer, inputs)
    if not padded:
        fact = "the trainer's batch has no padding to leave out: raise per_device_train_batch_size"
        raise ArgumentError("packed_batch", fact)
    apart = compare(Outcome(loss, gradients), Outcome(due, expected, add_gradients({}, expected)))
    found = UnpaddedStep(loss, due, apart.gradients, real, padded)
    limit = rounding_limit_of(trainer) if limit is None else limit
    if not max(apart.loss, apart.gradients) <= limit:
        fact = (
            f"without padding the loss is {loss:.7g} instead of {due:.7g}, and gradients differ by "
            f"{found.gradients:.2g} of their norm (allowed: {limit:.0e})"
        )
        raise MismatchError("unlike_padded", fact, attrs.asdict(found))
    return found


def _loss_and_gradients(trainer: Any, inputs: Any) -> tuple[float, Gradients]:
    """Return the trainer's loss of a batch, and the gradients of the weights."""
    given = dict(inputs) if isinstance(inputs, Mapping) else inputs  # trainers take labels out
    loss = trainer.compute_loss(trainer.model, given)
    return float(loss.detach()), weight_gradients(trainer.model, loss)
