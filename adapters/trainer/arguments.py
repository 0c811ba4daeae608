"""
Training arguments of ms-swift, made from a run's configuration and tested before measuring.

Settings that ms-swift would silently ignore are refused. Other errors, such as a wrong name, a
wrong number or a missing package, come from ms-swift. `installed_keys` makes the table of keys for
the module `trainer_keys`.
"""

import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from swift.trainers import Seq2SeqTrainingArguments, TrainerFactory  # before the others, which import in a circle

# isort: split
import attrs
import torch
from accelerate.utils import DynamoBackend
from swift.arguments.tuner_args import TunerArguments
from swift.callbacks.mapping import callbacks_map
from swift.optimizers import optimizers_map
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks, is_deepspeed_zero3_enabled

from packplan.adapters.config.trainer_keys import TrainerKey, argument_keys, machine_faults, require_deepspeed_agrees
from packplan.adapters.samples.arguments import refuse_remote_code, run_arguments, swift_types
from packplan.core.config.run import RunConfig, TrainingConfig
from packplan.core.config.tuners import decides_weights
from packplan.core.errors import ConfigError, Fault

TrainingArguments: typing.TypeAlias = Seq2SeqTrainingArguments


_CHOICES: Mapping[str, Iterable[str]] = {
    # Other values serve embeddings, rerankers and growing adapters, which are not trained here.
    "callbacks": [name for name in callbacks_map if name != "adalora"],
    "eval_metric": ["acc", "nlg"],
    "loss_type": ["cross_entropy"],
    "optimizer": optimizers_map,
}
"""Key whose value is a name -> allowed names."""


def runs_on_cpu(settings: Mapping[str, Any]) -> bool:
    """Return whether training uses no GPU: because of *settings*, or because there is none."""
    return bool(settings.get("use_cpu")) or not torch.cuda.is_available()


def shards_weights(arguments: TrainingArguments) -> bool:
    """Return whether each rank holds only a part of the weights: under FSDP or DeepSpeed ZeRO-3."""
    return bool(arguments.fsdp) or is_deepspeed_zero3_enabled()


def make_training_arguments(config: RunConfig, *, gradient_accumulation_steps: int) -> TrainingArguments:
    """
    Return the training arguments that ms-swift makes from a run; ConfigError if a setting is
    refused.

    Args:
        config: Configuration of the run.
        gradient_accumulation_steps: Number of batches of each rank in an optimizer step.
    """
    training = config.training
    defaults: dict[str, Any] = {
        "check_model": False,  # asks a hub, for 20 s when there is none
        "eval_strategy": "epoch" if config.custom.val_jsonl else "no",
        "ddp_find_unused_parameters": False,  # every batch uses every weight: see `DummyImage`
        "data_seed": training.seed,
        "disable_tqdm": not sys.stderr.isatty(),
        "logging_nan_inf_filter": False,  # would replace a loss that is not a number in the log
    }
    # The plan is already aligned, so `dataloader_drop_last` drops only incomplete padded batches.
    decided = {
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": 1 if config.eval_packing else training.per_device_eval_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
    }
    on_cpu = runs_on_cpu(training.trainer)
    refused = list(machine_faults(training.trainer, on_cpu=on_cpu))
    if refused:
        raise ConfigError("the section training", tuple(refused))
    if on_cpu:
        defaults["use_cpu"] = True
    if torch.distributed.is_initialized():
        defaults["ddp_backend"] = "gloo" if on_cpu else "nccl"
    refuse_remote_code(config.model)
    swift_types(config.model, config.template)  # refuses an unclear model type and template together
    settings = attrs.evolve(training, trainer={**defaults, **training.trainer, **decided})
    resolved = run_arguments(config.model, settings)
    try:
        arguments: TrainingArguments = TrainerFactory.get_training_args(resolved)
    except (ValueError, ImportError, TypeError, AssertionError, OSError) as error:
        raise ConfigError.for_key("training", f"is refused by ms-swift's training arguments: {error}") from error
    if arguments.n_gpu > 1:
        reason = (
            f"would split each pack over {arguments.n_gpu} GPUs (DataParallel): start one process for each GPU with "
            f"torchrun --nproc-per-node {arguments.n_gpu}, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
        raise ConfigError.for_key("training", reason)
    return arguments


def yield_setting_faults(arguments: Any) -> Iterator[Fault]:
    """Yield a fault for each training argument that would otherwise fail only during training."""
    for (key, *others), use in _TRIALS.items():
        try:
            use(arguments)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            names = " or ".join(f"training.{name}" for name in (key, *others))
            yield Fault(f"training.{key}", f"cannot be used: {error}; change or remove {names}")


def _try_optimizer(arguments: Any) -> None:
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Linear(1, 1))
    except ValueError:
        # This model has none of the named modules.
        if not arguments.optim_target_modules:
            raise


def _try_lr_scheduler(arguments: Any) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    of_kind = {"scheduler_specific_kwargs": arguments.lr_scheduler_kwargs}
    get_scheduler(arguments.lr_scheduler_type, optimizer, num_warmup_steps=0, num_training_steps=1, **of_kind)


def _try_compilation(arguments: Any) -> None:
    if arguments.torch_compile:
        DynamoBackend(arguments.torch_compile_backend.upper())
        torch.compile(torch.nn.Linear(1, 1), mode=arguments.torch_compile_mode)


def _try_reporters(arguments: Any) -> None:
    for callback in get_reporting_integration_callbacks(arguments.report_to):
        callback()


def _try_shard_size(arguments: Any) -> None:
    if re.fullmatch(r"\d+(\.\d+)? ?[KMGT]B", arguments.max_shard_size, re.IGNORECASE) is None:
        raise ValueError(f"{arguments.max_shard_size!r} is not a size such as 5GB")


_TRIALS: dict[tuple[str, ...], Callable[[Any], None]] = {
    ("optim", "optim_args"): _try_optimizer,
    ("deepspeed",): require_deepspeed_agrees,
    ("lr_scheduler_type", "lr_scheduler_kwargs"): _try_lr_scheduler,
    ("torch_compile", "torch_compile_backend", "torch_compile_mode"): _try_compilation,
    ("report_to",): _try_reporters,
    ("max_shard_size",): _try_shard_size,
}
"""
Keys that are used together -> function that raises an error if training cannot use their values.
"""


def installed_keys() -> dict[str, TrainerKey]:
    """Return the training and tuner arguments of the installed ms-swift, by key."""
    own = attrs.fields_dict(TrainingConfig)
    known = argument_keys(TunerArguments)
    tuners = {name: key for name, key in known.items() if decides_weights(name) and name not in own}
    return tuners | argument_keys(TrainingArguments, _CHOICES)
