"""
Early use of settings that the trainer first uses late, to find faults before hours of measuring.

Errors are the trainer's own, about a name, a number or a missing package.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from packplan.core.errors import Fault


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
