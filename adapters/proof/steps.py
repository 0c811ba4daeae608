"""
Assertion that the loss of a user's optimizer step is the mean over the step's supervised tokens.

A trainer of transformers runs its own `train` to the end of the first step, with its loader,
gradient accumulation, `num_items_in_batch`, `training_step` and log. Only the update of the weights
is left out. If a function is passed instead of a trainer, it is called unchanged. Afterwards
weights, gradients, buffers, random state and the trainer's attributes are restored.

The reference computes the batches of the step again, without dropout. Its loss is the mean over the
supervised tokens of all ranks, computed in float32 from the logits. So no part of the reference
depends on the trainer's own loss. The assertions of `checks` test whether the samples of a batch
are kept apart.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch.utils.checkpoint import checkpoint

from packplan.adapters.attention.shared_rows import sharing_by
from packplan.adapters.models import Gradients, has_ranks, hold_buffers_and_rng, replace_attributes
from packplan.adapters.proof.batches import Sample, next_tokens, without_labels
from packplan.adapters.proof.checks import refuse_sharded_weights
from packplan.adapters.proof.comparison import Outcome, allow_for_cancelling, compare, difference_limit, run_alone
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ArgumentError, MismatchError, ModelError, PackplanError, RunError, counted

_TOKENS = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""Arguments of models whose first dimensions are rows and tokens, as those of labels."""

_RANDOM = re.compile("drop|noise")
"""Name pattern of attributes that are rates of dropout or noise."""

_TOLD = "is_told"
"""Attribute of an error that all ranks know."""

_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)
"""Whether this code runs within `failing_together`."""


NOISE = "neftune_noise_alpha"
"""
Attribute of an embedding layer: scale of the noise that transformers adds to its output (NEFTune).
"""


@attrs.frozen
class StepLoss:
    """
    Loss and gradients of an optimizer step, compared with the mean over its supervised tokens.
    """

    loss: float | None
    """Loss that the trainer reports; None if it reports none."""

    due: float
    """Expected loss: the mean over the supervised tokens."""

    gradients: float
    """Norm of the gradients' difference, divided by the sum of the batches' gradient norms."""

    factor: float
    """Scale of the gradients, relative to the gradients of the mean; 1 is correct."""

    tokens: int
    """Number of supervised tokens."""

    limit: float
    """Largest allowed relative difference."""


def assert_step_loss(
    trainer: Any,
    *,
    model: torch.nn.Module | None = None,
    labels: Iterable[torch.Tensor] | None = None,
    limit: float | None = None,
) -> StepLoss:
    """
    Assert that a step's loss is the mean over its supervised tokens, with the gradients of this
    mean.

    All forward and backward passes of the first training step are computed on all ranks, but
    weights are not updated. Every rank has to call this function. Dropout is off during the
    comparison. Afterwards weights, gradients, random state and the trainer's state are restored.

    Args:
        trainer: Trainer of transformers, or a function that computes the gradients of one step and
            returns the loss to report, or None.
        model: Model that the function calls; None takes the trainer's model.
        labels: Labels of each call of the model; each has the shape (rows, tokens). None takes the
            `labels` that the function passes to the model.
        limit: Largest allowed relative difference. None takes the difference that rounding can
            cause.

    Raises:
        MismatchError: The loss or the gradients differ. The error is an AssertionError, and names
            the factor between actual and expected values.
        ArgumentError: The trainer or its batches cannot be read, the function updates weights, or
            labels are not tensors of the shape of their call's tokens.
        RunError: Another rank has failed.
        ModelError: The model has no gradients to compare, or its weights are sharded.
    """
    is_trainer = hasattr(trainer, "get_batch_samples") and hasattr(trainer, "train")
    model = getattr(trainer, "model", None) if model is None else model
    if not isinstance(model, torch.nn.Module) or not (is_trainer or callable(trainer)):
        fact = "assert_step_loss takes a trainer of transformers, or a function and its model (model=…)"
        raise ArgumentError("host", f"{fact}, not a {type(trainer).__name__}")
    model = getattr(model, "module", model)
    refuse_sharded_weights(model)
    if not any(one.requires_grad for one in model.parameters()):
        raise ModelError("probe", "the model has no weight with requires_grad, so a step has no gradients")
    if is_trainer:
        _refuse_shared_or_scaled(trainer)
    autocast = trainer.accelerator.autocast if is_trainer else nullcontext
    with restoring_training_state(model), torch.enable_grad():
        loss, gradients, batches = _run_trainer(trainer, model) if is_trainer else _run_function(trainer, model, labels)
        counts = getattr(trainer, "counts", None)  # if ranks share a row, only one counts it
        batches = [*filter(counts, batches)] if counts else batches
        samples = [_read_sample(batch) for rank in gather_from_ranks(send_to_device(batches, "cpu")) for batch in rank]
        tokens = sum(int((one.targets != IGNORED_LABEL).sum()) for one in samples)
        if not tokens:
            raise ArgumentError("packed_batch", "the step has no supervised token, so it has no loss to compare")
        model.eval()
        run_again = partial(_run_for_mean, model, samples, tokens, autocast)
        with sharing_by(1), failing_together():  # a rank that shares rows has a part of their gradients
            expected = run_again()
            if not gradients:
                fact = "the step left no gradients in the weights: leave zero_grad out of the function"
                raise ArgumentError("host", fact)
            if limit is None:
                with autocast():
                    limit = difference_limit(model)
            apart = compare(Outcome(expected.loss if loss is None else loss, gradients), expected)
            apart = allow_for_cancelling(apart, expected, model, run_again, limit=limit)
    due = expected.gradients
    along = sum(float((gradients[name].double() * one).sum()) for name, one in due.items() if name in gradients)
    factor = along / (sum(float((one.double() ** 2).sum()) for one in due.values()) or 1.0)
    found, facts = StepLoss(loss, expected.loss, apart.gradients, factor, tokens, limit), []
    if loss is not None and not apart.loss <= limit:
        facts.append(f"the step's loss is {loss:.5g} instead of {found.due:.5g} (factor {loss / found.due:.4g})")
    if not found.gradients <= limit:
        facts.append(f"the gradients differ by {found.gradients:.2g} of their norm (factor {factor:.4g})")
    ranks = gather_from_ranks("; ".join(facts))
    for difference in filter(None, ranks):  # a rank may differ alone
        numbers = f"{counted(len(ranks), 'rank')} of {counted(len(batches), 'batch')} each"
        raise MismatchError("unlike_step", f"{difference}; the step had {numbers}", attrs.asdict(found))
    return found


def _refuse_shared_or_scaled(trainer: Any) -> None:
    """Raise ArgumentError if ranks share the model or rows, or the loss is scaled for float16."""
    accelerator = trainer.accelerator
    parallel = getattr(accelerator, "parallelism_config", None)
    shares = str(getattr(accelerator, "distributed_type", "")).endswith(("DEEPSPEED", "FSDP", "MEGATRON_LM"))
    shares |= any((getattr(parallel, one, None) or 1) > 1 for one in ("tp_size", "cp_size", "sp_size"))
    if shares or getattr(accelerator, "scaler", None) is not None:
        fact = "assert_step_loss cannot follow FSDP, DeepSpeed, ranks that share rows, or fp16: switch them off"
        raise ArgumentError("host", fact)


def _run_function(
    function: Callable[[], Any], model: torch.nn.Module, labels: Iterable[torch.Tensor] | None
) -> tuple[Any, Gradients, list[Any]]:
    """
    Run the step of a function; return its loss, gradients and batches.

    A batch is noted before hooks change it, and once, even if a hook of `unpad` calls the model
    again.
    """
    batches: list[Mapping[str, Any]] = []
    parameters = inspect.signature(model.forward).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] or ["input_ids"]
    depth = 0

    def enter(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal depth
        if not depth:
            batches.append({**dict(zip(names, positional, strict=False)), **named})
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    versions = [one._version for one in model.parameters()]  # noqa: SLF001  # has no public name
    entering = model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    with entering, model.register_forward_hook(leave, always_call=True):
        loss = function()
    with failing_together():
        if versions != [one._version for one in model.parameters()]:  # noqa: SLF001  # see above
            raise ArgumentError("host", "the step changed the weights: leave the optimizer's update out of it")
        batches = batches if labels is None else [*_add_labels(batches, [*labels])]
    return None if loss is None else float(torch.as_tensor(loss).detach()), _copy_gradients(model), batches


def _add_labels(batches: list[Mapping[str, Any]], labels: list[torch.Tensor]) -> Iterator[Mapping[str, Any]]:
    """Yield batches with their labels; ArgumentError if the number, type or shape is wrong."""
    if len(labels) != len(batches):
        calls = f"the step calls the model {counted(len(batches), 'time')}, but labels has {len(labels)}"
        raise ArgumentError("host", f"{calls}: pass the labels of each call")
    for number, (batch, own) in enumerate(zip(batches, labels, strict=True)):
        tokens = [one for key in _TOKENS if isinstance(one := batch.get(key), torch.Tensor)]
        due = tuple(tokens[0].shape[:2]) if tokens else "(rows, tokens)"
        if not isinstance(own, torch.Tensor) or (tokens and own.shape != due):
            kind = type(own).__name__ + (f" of shape {tuple(own.shape)}" if hasattr(own, "shape") else "")
            raise ArgumentError("host", f"labels[{number}] is a {kind}, but its call needs a Tensor of shape {due}")
        yield {**batch, "labels": own}


def _run_trainer(trainer: Any, model: torch.nn.Module) -> tuple[Any, Gradients, list[Any]]:
    """
    Run a trainer's first step without updating weights; return its loss, gradients and batches.
    """
    from transformers import TrainerCallback

    found: dict[str, Any] = {"loss": None, "gradients": {}}
    batches: list[Mapping[str, Any]] = []
    patches = ExitStack()

    class RecordWithoutUpdate(TrainerCallback):
        """
        Callback that copies the gradients, skips the update of weights, and ends training after one
        step.
        """

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found["gradients"] = _copy_gradients(model)
            for owner in (trainer.optimizer, trainer.lr_scheduler):
                patches.enter_context(replace_attributes(owner, step=lambda *_, **__: None))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # transformers passes them
            control.should_log = control.should_training_stop = True

        def on_log(self, *_: Any, logs: Mapping[str, Any], **__: Any) -> None:
            found["loss"] = logs.get("loss") if found["loss"] is None else found["loss"]

    serve = trainer.get_batch_samples

    def serve_and_note(*arguments: Any, **options: Any) -> Any:
        served = serve(*arguments, **options)
        batches.extend(dict(batch) for batch in served[0])
        return served

    handler = copy.copy(trainer.callback_handler)
    handler.callbacks = [RecordWithoutUpdate()]
    quiet = {"max_grad_norm": 0.0, "eval_on_start": False, "load_best_model_at_end": False, "report_to": []}
    # Restores the model's attributes too, since accelerate wraps its forward.
    with patches, replace_attributes(trainer.args, **quiet), restoring_attributes(trainer), restoring_attributes(model):
        vars(trainer).update(get_batch_samples=serve_and_note, callback_handler=handler, neftune_noise_alpha=None)
        trainer.control = type(trainer.control)()
        trainer.train()
        trainer.accelerator.free_memory()
    return found["loss"], found["gradients"], batches


def _copy_gradients(model: torch.nn.Module) -> Gradients:
    """Return a copy of the gradients of a model's weights."""
    return {name: one.grad.detach().clone() for name, one in model.named_parameters() if one.grad is not None}


def _read_sample(batch: Mapping[str, Any]) -> Sample:
    """Return a batch as one sample; ArgumentError if it has no labels."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        fact = "the model is given no labels, so there is no loss to compare: give it labels, or pass labels=[…]"
        raise ArgumentError("packed_batch", f"{fact} with those of each call")
    return Sample(without_labels(batch), next_tokens(labels).flatten())


def _run_for_mean(model: torch.nn.Module, samples: list[Sample], tokens: int, autocast: Callable[[], Any]) -> Outcome:
    """Return loss and gradients of the mean over the supervised tokens of some batches."""
    device = next(model.parameters()).device

    def call_model(**inputs: Any) -> Any:
        with autocast():
            return model(**send_to_device(inputs, device))

    weighted = [attrs.evolve(one, weights=torch.full(one.targets.shape, 1 / tokens)) for one in samples]
    return run_alone(model, weighted, call=call_model, keep_logits=False)


def gather_from_ranks(value: Any) -> list[Any]:
    """
    Return the values of all ranks, in rank order. Every rank has to call this function.

    RunError is raised if another rank has failed inside `failing_together`.
    """
    if not has_ranks():
        return [value]
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    for failure in (one for one in found if isinstance(one, RunError)):
        vars(failure)[_TOLD] = True
        raise failure
    return found


@contextmanager
def failing_together(any_rank: Callable[[bool], bool] | None = None) -> Iterator[None]:
    """
    Raise an error of one rank on all ranks, at their next `gather_from_ranks` or at the end. Under
    NCCL, they would wait in their next collective until its timeout.

    Every rank has to enter this context. Inside, ranks may exchange values only by
    `gather_from_ranks`.

    Args:
        any_rank: Function that returns whether a flag is set on any rank. With it, ranks exchange
            only a flag unless one of them has failed, and may exchange nothing inside.
    """
    is_outermost = not _INSIDE.get()
    inside = _INSIDE.set(True)
    try:
        yield
        if any_rank is None or any_rank(False):  # noqa: FBT003  # this rank has not failed
            gather_from_ranks(None)
    except Exception as error:
        if has_ranks() and not vars(error).get(_TOLD):
            vars(error)[_TOLD] = True
            advice = "; let every rank read the same files" if isinstance(error, OSError) else ""
            text = str(error) if isinstance(error, PackplanError) else f"{type(error).__name__}: {error}{advice}"
            with suppress(RunError, RuntimeError):  # of a rank that has failed, too, or has ended
                if any_rank is None or any_rank(True):  # noqa: FBT003  # this rank has failed
                    gather_from_ranks(RunError("rank_gone", f"rank {dist.get_rank()} failed: {text}"))
        if is_outermost:  # a data set may raise the same error again
            vars(error).pop(_TOLD, None)
        raise
    finally:
        _INSIDE.reset(inside)


@contextmanager
def restoring_training_state(model: torch.nn.Module) -> Iterator[None]:
    """
    Inside this context, compute without dropout and noise; restore the training state at its end.

    Weights have no gradients at the start, and inputs get gradients even under gradient
    checkpointing. Gradients, buffers, modes and random states are restored at the end.
    """
    with ExitStack() as stack:
        for weight in model.parameters():
            stack.callback(setattr, weight, "grad", weight.grad)
            weight.grad = None
        owners = {id(one): one for module in model.modules() for one in (module, getattr(module, "config", None))}
        for owner in owners.values():
            rates = (name for name, one in getattr(owner, "__dict__", {}).items() if type(one) in (int, float))
            values: dict[str, Any] = dict.fromkeys(filter(_RANDOM.search, rates), 0.0)
            if isinstance(owner, torch.nn.modules.dropout._DropoutNd):  # noqa: SLF001  # base of all of them
                values["p"] = 0.0
            if isinstance(owner, torch.nn.Module):
                values["training"] = owner.training
                if getattr(owner, "gradient_checkpointing", False):  # reentrant ones give no gradients of inputs
                    values["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)
            stack.enter_context(replace_attributes(owner, **values))
        stack.enter_context(hold_buffers_and_rng(model))
        yield


@contextmanager
def trying_losses(trainer: Any, *, batches: int) -> Iterator[None]:
    """
    Inside this context, a trainer computes losses as in training, but without dropout and noise.
    Afterwards the trainer's state and metrics are restored.

    Args:
        trainer: Trainer of transformers or TRL.
        batches: Number of batches of a step, by which losses are divided.
    """
    with restoring_training_state(trainer.model), restoring_attributes(trainer):
        grown = {name: held for name, held in vars(trainer).items() if "metrics" in name and isinstance(held, dict)}
        vars(trainer).update(copy.deepcopy(grown), current_gradient_accumulation_steps=batches)
        trainer.model.train()
        yield


def rounding_limit_of(trainer: Any) -> float:
    """Return the largest relative difference that rounding can cause in a trainer's step."""
    with trainer.accelerator.autocast():
        return difference_limit(trainer.model)


@contextmanager
def restoring_attributes(owner: Any) -> Iterator[None]:
    """Restore all attributes of an object at the end of this context."""
    before = dict(vars(owner))
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(before)
