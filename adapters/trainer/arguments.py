"""
ms-swift's training arguments from a run's settings; settings that it would silently ignore are
refused.
"""

import sys
import typing
from collections.abc import Mapping
from typing import Any

import torch
from swift.trainers import Seq2SeqTrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from packplan.adapters.config.trainer_keys import device_faults
from packplan.core.config import RunConfig
from packplan.core.errors import ConfigError

TrainingArguments: typing.TypeAlias = Seq2SeqTrainingArguments


def runs_on_cpu(settings: Mapping[str, Any]) -> bool:
    """Return whether training uses no GPU, by its settings or because there is none."""
    return bool(settings.get("use_cpu")) or not torch.cuda.is_available()


def shards_weights(arguments: TrainingArguments) -> bool:
    """
    Return whether no rank holds the whole model: with FSDP, and with DeepSpeed from stage 3 on.
    """
    return bool(arguments.fsdp) or is_deepspeed_zero3_enabled()


def training_arguments(
    config: RunConfig, *, per_device_train_batch_size: int, gradient_accumulation_steps: int
) -> TrainingArguments:
    """
    Build ms-swift's training arguments; ConfigError if it refuses them.

    Args:
        config: Configuration of the run.
        per_device_train_batch_size: Batch size of training; 1 when packing.
        gradient_accumulation_steps: Batches of a rank in one optimizer step.
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
    if training.lorap_lr_ratio is not None:
        defaults["optimizer"] = "lorap"
    # The plan is already aligned, so `dataloader_drop_last` drops only incomplete padded batches.
    shared = ("output_dir", "dataloader_drop_last", "num_train_epochs", "max_steps", "seed", "tuner_type")
    fixed = {
        **{key: getattr(training, key) for key in shared},
        "per_device_train_batch_size": per_device_train_batch_size,
        "per_device_eval_batch_size": 1 if config.eval_packing else training.per_device_eval_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
    }
    on_cpu = runs_on_cpu(training.trainer)
    refused = list(device_faults(training.trainer, on_cpu=on_cpu))
    if refused:
        raise ConfigError("the section training", tuple(refused))
    if on_cpu:
        defaults["use_cpu"] = True
    if torch.distributed.is_initialized():
        defaults["ddp_backend"] = "gloo" if on_cpu else "nccl"
    known = TrainingArguments.__dataclass_fields__
    passed = {name: value for name, value in training.trainer.items() if name in known}  # the rest is of tuners
    try:
        arguments = TrainingArguments(**(defaults | passed | fixed))
    except (ValueError, ImportError, TypeError, AssertionError, OSError) as error:
        raise ConfigError.at("training", f"is refused by ms-swift's training arguments: {error}") from error
    if arguments.n_gpu > 1:
        reason = (
            f"would split each pack over {arguments.n_gpu} GPUs (DataParallel): start one process a GPU with "
            f"torchrun --nproc-per-node {arguments.n_gpu}, or set CUDA_VISIBLE_DEVICES to one"
        )
        raise ConfigError.at("training", reason)
    return arguments
