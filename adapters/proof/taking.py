"""
One optimizer step of the user's own trainer: its loss and gradients, without the update.

A trainer of transformers runs its own `train` to the end of the first step: its loader, its
accumulation, its number of items, its `training_step`, its log. The update of the weights is left
out. A function runs whatever it runs. Afterwards weights, gradients, buffers, random state and the
trainer's attributes are as before.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import attrs
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from packplan.adapters.models import Gradients, same_state
from packplan.core.errors import ArgumentError, ModelError

_NO_MEAN = ("label_smoothing_factor", "output_router_logits")
"""Settings that add something to the loss that is no mean over tokens."""

_SHARING = ("tp_size", "cp_size", "sp_size")
"""Settings of accelerate by which ranks share rows."""


@attrs.frozen(eq=False)
class TakenStep:
    """Results of one optimizer step of a trainer on this rank."""

    model: torch.nn.Module
    """Model without what wraps it for several ranks."""

    loss: float | None
    """Loss that the trainer reports; None if it reports none."""

    gradients: Gradients
    """Gradient of each weight before the update, after its reduction over the ranks."""

    batches: list[Mapping[str, Any]]
    """Batches of the rank, as its collator made them, or as they reached the model."""

    sharing: int
    """Ranks that share each row."""

    computing: Callable[[], AbstractContextManager[Any]]
    """Context in which the trainer computes a loss: the type of mixed precision."""

    def call(self, **inputs: Any) -> Any:
        """Call the model as the trainer does, with a batch that may lie elsewhere."""
        device = next(self.model.parameters()).device
        with self.computing():
            return self.model(**{key: one.to(device) if torch.is_tensor(one) else one for key, one in inputs.items()})


def take_step(trainer: Any, model: torch.nn.Module | None, *, sharing: int | None) -> TakenStep:
    """
    Run one optimizer step of a trainer, without the update of the weights.

    Args:
        trainer: Trainer of transformers, or a function that computes a step's gradients and returns
            the loss that it reports, or None.
        model: Model that a function trains; None takes the trainer's.
        sharing: Ranks that share each row; None asks the trainer.

    Raises:
        ArgumentError: It is no trainer, or its function left no gradients, or changed weights.
        ModelError: The weights are sharded in a way that hides gradients.
    """
    is_trainer = hasattr(trainer, "get_batch_samples") and hasattr(trainer, "train")
    if model is None:
        model = getattr(trainer, "model", None)
    if not isinstance(model, torch.nn.Module) or not (is_trainer or callable(trainer)):
        fact = "a step needs a trainer of transformers, or a function and its model (model=…)"
        raise ArgumentError("host", f"{fact}, not a {type(trainer).__name__}")
    model = getattr(model, "module", model)
    refuse_hidden_weights(model)
    if not any(one.requires_grad for one in model.parameters()):
        raise ModelError("probe", "none of its weights trains (requires_grad), so a step has no gradients")
    if is_trainer:
        _refuse_settings(trainer, model)
        parallel = getattr(trainer.accelerator, "parallelism_config", None)
        sharing = sharing or int(np.prod([getattr(parallel, name, None) or 1 for name in _SHARING]))
    with untouched(model):
        loss, gradients, batches = (_of_trainer if is_trainer else _of_function)(trainer, model)
    computing = trainer.accelerator.autocast if is_trainer else nullcontext
    return TakenStep(model, loss, gradients, batches, sharing or 1, computing)


def refuse_hidden_weights(model: torch.nn.Module, *, sharded: bool = True) -> None:
    """
    Refuse weights of which this process holds nothing.

    Args:
        model: Model that is asked.
        sharded: Whether weights of FSDP 2, which are gathered layer by layer, can be asked.

    Raises:
        ModelError: The first such weight is named.
    """
    for name, weight in model.named_parameters():
        reason = ""
        if weight.numel() == 0:
            reason = "is a placeholder of size 0, as ZeRO-3 leaves it"
        elif "_flat_param" in name:
            reason = "is flattened, as FSDP 1 leaves it"
        elif isinstance(weight, DTensor) and not sharded:
            reason = "is sharded (DTensor), as FSDP 2 leaves it"
        if reason:
            raise ModelError("probe", f"its weight {name} {reason}: ask the model before its weights are sharded")


def _refuse_settings(trainer: Any, model: Any) -> None:
    """Refuse a loss that is no mean, and gradients that an engine keeps; ArgumentError."""
    settings = {**vars(trainer.args), **vars(getattr(model, "config", object))}
    for name in _NO_MEAN:
        if settings.get(name):
            raise ArgumentError("host", f"{name} is set, so the trainer's loss is no mean over tokens: set it to 0")
    kind = str(getattr(trainer.accelerator, "distributed_type", "")).rpartition(".")[2]
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        fact = f"the trainer shards by {kind}, which hides gradients: ask it without, or give a function of your loop"
        raise ArgumentError("host", fact)
    if getattr(trainer.accelerator, "scaler", None) is not None:
        raise ArgumentError("host", "the trainer scales its loss for float16: ask it in bfloat16 or float32")


def _of_function(function: Callable[[], Any], model: torch.nn.Module) -> tuple[Any, Gradients, list[Any]]:
    """Return the loss, the gradients and the batches of a function's step."""
    batches: list[Mapping[str, Any]] = []

    def note(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        batches.append({**({"input_ids": positional[0]} if positional else {}), **named})

    versions = [one._version for one in model.parameters()]  # noqa: SLF001  # has no public name
    with model.register_forward_pre_hook(note, with_kwargs=True):
        loss = function()
    if versions != [one._version for one in model.parameters()]:  # noqa: SLF001  # see above
        raise ArgumentError("host", "the step changed weights: leave the optimizer's update out of the function")
    return None if loss is None else float(loss), gradients_of(model), batches


def _of_trainer(trainer: Any, model: torch.nn.Module) -> tuple[Any, Gradients, list[Any]]:
    """Return the loss, the gradients and the batches of a trainer's step."""
    from transformers import TrainerCallback

    found: dict[str, Any] = {"loss": None, "gradients": {}}
    batches: list[Mapping[str, Any]] = []
    patches = ExitStack()

    class OneStep(TrainerCallback):
        """Leaves the update out, and ends after the first step."""

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found["gradients"] = gradients_of(model)
            for owner in (trainer.optimizer, trainer.lr_scheduler):
                patches.enter_context(replaced(owner, step=lambda *_, **__: None))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # transformers passes them
            control.should_log = control.should_training_stop = True

        def on_log(self, *_: Any, logs: Mapping[str, Any], **__: Any) -> None:
            if found["loss"] is None:
                found["loss"] = logs.get("loss")

    serve = trainer.get_batch_samples

    def note(*arguments: Any, **options: Any) -> Any:
        served = serve(*arguments, **options)
        batches.extend(dict(batch) for batch in served[0])
        return served

    handler = copy.copy(trainer.callback_handler)
    handler.callbacks = [OneStep()]
    quiet = {"max_grad_norm": 0.0, "eval_on_start": False, "load_best_model_at_end": False, "report_to": []}
    with patches, replaced(trainer.args, **quiet), restored(trainer), restored(model):  # accelerate wraps its forward
        vars(trainer).update(get_batch_samples=note, callback_handler=handler, neftune_noise_alpha=None)
        trainer.control = type(trainer.control)()
        trainer.train()
        trainer.accelerator.free_memory()
    return found["loss"], found["gradients"], batches


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Return a copy of the gradients of a model's weights, whole on each rank."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in found.items()
    }


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """
    Turn dropout off in training too, and restore gradients, buffers, modes and random state at the
    end.
    """
    with ExitStack() as stack:
        for weight in model.parameters():
            stack.callback(setattr, weight, "grad", weight.grad)
            weight.grad = None
        for module in model.modules():
            names = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # noqa: SLF001  # base of all of them
                names.append("p")
            stack.enter_context(replaced(module, training=module.training, **dict.fromkeys(names, 0.0)))
        stack.enter_context(same_state(model))
        yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other values of its own attributes, inside."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)


@contextmanager
def restored(owner: Any) -> Iterator[None]:
    """Restore all attributes of an object at the end."""
    before = dict(vars(owner))
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(before)
