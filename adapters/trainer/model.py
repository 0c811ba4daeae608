"""
Loads the model that a run trains: its cache off, frozen only where asked, perhaps with low-rank
adapters.
"""

from __future__ import annotations

import re
import sys
import typing
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import torch
from swift import get_model_processor
from swift.utils import HfConfigFactory
from transformers.utils import logging as transformers_logging

from adapters.attention import attend_as, project_patches
from adapters.samples.template import swift_model_type
from core.config import ModelConfig, TrainingConfig
from core.equality import MASKED, SHARED_ROWS, VARLEN, Attention
from core.errors import ConfigError


def open_model(
    model: ModelConfig, training: TrainingConfig, *, attention: Attention, device: torch.device | None
) -> torch.nn.Module:
    """
    Load the model, with its cache off and nothing frozen but what is asked for, perhaps with
    adapters.

    Args:
        model: What to load.

        training: What is frozen, and which adapters.

        attention: As `core.equality.choose_attention` gives it.

        device: Where to; None leaves it to the engine that shards the weights.
    """
    model_type = swift_model_type(model)
    if not sys.stderr.isatty():
        hide_progress_bars()
    dtype = None if model.torch_dtype is None else getattr(torch, model.torch_dtype)
    try:
        opened, _ = get_model_processor(
            model.model,
            model_type=model_type,
            attn_impl=attention.native if attention.name in (VARLEN, MASKED, SHARED_ROWS) else attention.name,
            torch_dtype=dtype,
            device_map=None if device is None else str(device),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError.of("model.model", f"{model.model} cannot be loaded by ms-swift: {error}") from error
    project_patches(opened)
    attend_as(opened, attention)
    # With the cache on, transformers builds no block-diagonal mask, and packed samples attend to
    # each other.
    HfConfigFactory.set_config_attr(opened.config, "use_cache", False)  # noqa: FBT003  # its signature
    frozen = _frozen_parts(opened, training)
    _freeze(opened, frozen)
    if training.tuner_type == "lora":
        opened = _with_adapters(opened, training, frozen)
    return typing.cast("torch.nn.Module", opened)


def hide_progress_bars() -> None:
    """Let transformers show no progress of its own in this process."""
    transformers_logging.disable_progress_bar()


def _frozen_parts(model: Any, training: TrainingConfig) -> tuple[str, ...]:
    """Return the prefixes of the modules that stay as they are; ConfigError if one is not there."""
    arch = model.model_meta.model_arch
    parts = {"freeze_llm": "language_model", "freeze_vit": "vision_tower", "freeze_aligner": "aligner"}
    names = [name for name, _ in model.named_parameters()]
    frozen: list[str] = []
    for key, part in parts.items():
        if getattr(training, key):
            prefixes = tuple(getattr(arch, part, None) or ())
            if not any(name.startswith(prefixes) for name in names):
                raise ConfigError.of(f"training.{key}", "names a part that this model does not have: remove it")
            frozen += prefixes
    return tuple(frozen)


def _freeze(model: Any, prefixes: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(requires_grad=not name.startswith(prefixes))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError.of("training.freeze_llm", "and the other freezes leave nothing to train: remove one")


def _with_adapters(model: Any, training: TrainingConfig, frozen: tuple[str, ...]) -> Any:
    from peft import LoraConfig, get_peft_model

    modules = list(training.target_modules)
    config = LoraConfig(
        r=training.lora_rank,
        lora_alpha=training.lora_alpha,
        lora_dropout=training.lora_dropout,
        target_modules=modules[0] if modules == ["all-linear"] else modules,
        exclude_modules=rf"(?:{'|'.join(map(re.escape, frozen))})(?:\..*)?" if frozen else None,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError.of("training.target_modules", f"cannot get adapters: {error}") from error
    adapted.model_meta, adapted.model_info = model.model_meta, model.model_info
    return adapted
