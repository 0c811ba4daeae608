"""Loads the model that a run trains: its cache off, frozen only where asked, perhaps with low-rank adapters."""

from __future__ import annotations

import typing
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import torch
from swift import get_model_processor
from swift.utils import HfConfigFactory

from adapters.swift_samples import swift_types
from core.config import ModelConfig, TemplateConfig, TrainingConfig
from core.errors import ConfigError


def open_model(model: ModelConfig, training: TrainingConfig) -> torch.nn.Module:
    """Load the model, with its cache off and nothing frozen but what is asked for, perhaps with adapters."""
    model_type, _ = swift_types(model, TemplateConfig())
    dtype = None if model.torch_dtype is None else getattr(torch, model.torch_dtype)
    options: dict[str, Any] = {} if torch.cuda.is_available() else {"device_map": "cpu"}
    try:
        opened, _ = get_model_processor(
            model.model, model_type=model_type, attn_impl=model.attn_impl, torch_dtype=dtype, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError.of("model.model", f"{model.model} cannot be loaded by ms-swift: {error}") from error
    # With the cache on, transformers builds no block-diagonal mask, and packed samples attend to each other.
    HfConfigFactory.set_config_attr(opened.config, "use_cache", False)  # noqa: FBT003  # its signature
    opened.requires_grad_(requires_grad=True)
    _freeze(opened, training)
    if training.tuner_type == "lora":
        opened = _with_adapters(opened, training)
    return typing.cast("torch.nn.Module", opened)


def _freeze(model: Any, training: TrainingConfig) -> None:
    arch = model.model_meta.model_arch
    groups = {
        "freeze_llm": getattr(arch, "language_model", None) or [],
        "freeze_vit": getattr(arch, "vision_tower", None) or [],
        "freeze_aligner": getattr(arch, "aligner", None) or [],
    }
    for key, prefixes in groups.items():
        if not getattr(training, key):
            continue
        frozen = [p for name, p in model.named_parameters() if name.startswith(tuple(prefixes))] if prefixes else []
        if not frozen:
            raise ConfigError.of(f"training.{key}", "names a part that this model does not have: remove it")
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError.of("training.freeze_llm", "and the other freezes leave nothing to train: remove one")


def _with_adapters(model: Any, training: TrainingConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    modules = list(training.target_modules)
    config = LoraConfig(
        r=training.lora_rank,
        lora_alpha=training.lora_alpha,
        lora_dropout=training.lora_dropout,
        target_modules=modules[0] if modules == ["all-linear"] else modules,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    adapted.model_meta, adapted.model_info = model.model_meta, model.model_info
    return adapted
