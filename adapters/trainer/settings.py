"""
Early use of settings that the trainer first uses late, to find faults before hours of measuring.

Errors are the trainer's own, about a name, a number or a missing package. Faults that only the
model in training shows are named by their keys.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from swift.callbacks.lisa import LISACallback
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from packplan.core.errors import ConfigError, Fault, counted


def setting_faults(arguments: Any) -> Iterator[Fault]:
    """Yield the training arguments of ms-swift that cannot be used."""
    for (key, *others), use in _USES.items():
        try:
            use(arguments)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            names = " or ".join(f"training.{name}" for name in (key, *others))
            yield Fault(f"training.{key}", f"cannot be used: {error}; change {names}, or remove it")


def _build_optimizer(arguments: Any) -> None:
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Linear(1, 1))
    except ValueError:
        # This model has none of the named modules.
        if not arguments.optim_target_modules:
            raise


def _build_schedule(arguments: Any) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=0,
        num_training_steps=1,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


def _check_compilation(arguments: Any) -> None:
    if arguments.torch_compile:
        DynamoBackend(arguments.torch_compile_backend.upper())
        torch.compile(torch.nn.Linear(1, 1), mode=arguments.torch_compile_mode)


def _build_reporters(arguments: Any) -> None:
    for callback in get_reporting_integration_callbacks(arguments.report_to):
        callback()


def _check_shard_size(arguments: Any) -> None:
    if re.fullmatch(r"\d+(\.\d+)? ?[KMGT]B", arguments.max_shard_size, re.IGNORECASE) is None:
        raise ValueError(f"{arguments.max_shard_size!r} is no size, as 5GB is")


_USES: dict[tuple[str, ...], Callable[[Any], None]] = {
    ("optim", "optim_args"): _build_optimizer,
    ("lr_scheduler_type", "lr_scheduler_kwargs"): _build_schedule,
    ("torch_compile", "torch_compile_backend", "torch_compile_mode"): _check_compilation,
    ("report_to",): _build_reporters,
    ("max_shard_size",): _check_shard_size,
}
"""Key, and the keys that belong to it -> function that uses them."""


@contextmanager
def failures_named(trainer: Any) -> Iterator[None]:
    """
    Raise ConfigError where a setting fails that only the model in training can show.

    Such settings are the compilation and a number of layers.

    Args:
        trainer: Trainer of ms-swift that runs inside.
    """
    try:
        yield
    except ValueError as error:
        lisa = [one for one in trainer.callback_handler.callbacks if isinstance(one, LISACallback)]
        for layers in (getattr(one, "total_layers", None) for one in lisa):
            requested = trainer.args.lisa_activated_layers
            if layers is not None and requested > layers:
                reason = f"is {requested:,}, but the model has {counted(layers, 'layer')}: lower it to at most these"
                raise ConfigError.at("training.lisa_activated_layers", reason) from error
        raise
    except RuntimeError as error:
        if not trainer.args.torch_compile:
            raise
        from torch._dynamo.exc import TorchDynamoException  # loads its compilers

        if not isinstance(error, TorchDynamoException):
            raise
        step = trainer.state.global_step + 1
        why = " ".join(str(error).split())[:_MAX_REASON]
        reason = f"fails in optimizer step {step:,}: {why}; change training.torch_compile_backend, or remove it"
        raise ConfigError.at("training.torch_compile", reason) from error


_MAX_REASON = 250
"""Characters of a compiler's message that an error quotes."""
