"""Trained weights of a model: all but frozen ones, or adapters, by ms-swift's own code."""

import dataclasses
import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from swift.arguments.base_args.quant_args import QuantizeArguments
from swift.arguments.tuner_args import TunerArguments
from swift.model import get_model_info_meta

from packplan.adapters.families import is_sound_weight, trained_part
from packplan.adapters.samples.template import swift_model_type
from packplan.core.config.faults import tuners_of
from packplan.core.config.run import ModelConfig, TrainingConfig
from packplan.core.errors import ConfigError

_SHARED = (
    "tuner_type", "target_regex", "lora_rank", "lora_alpha", "lora_dropout", "lorap_lr_ratio", "use_rslora",
    "use_dora", "freeze_llm", "freeze_vit", "freeze_aligner", "freeze_parameters_regex", "freeze_parameters_ratio",
    "trainable_parameters_regex",
)  # fmt: skip
"""Keys that ms-swift's arguments share, with the same types."""

_LISTS = ("target_modules", "modules_to_save", "freeze_parameters", "trainable_parameters")


def prepare_tuner(model: Any, training: TrainingConfig) -> Any:
    """
    Freeze weights and add adapters, as `swift sft` does.

    Args:
        model: Model as ms-swift loaded it.
        training: Freezes and adapters of the run.

    Returns:
        The model, or a `PeftModel` around it.

    Raises:
        ConfigError: Nothing is left to train, or a key matches nothing in the model.
    """
    from swift.pipelines.train.tuner import TunerMixin

    arguments = _arguments(model, training)
    _require_matches(model, training)
    hears = trained_part(model) is not model
    if hears:
        _refuse_sound(model, training)
    try:
        prepared = TunerMixin.prepare_model(arguments, model)
    except (ValueError, RuntimeError, AttributeError, AssertionError, TypeError) as error:
        keys = [key for key in ("target_regex", "target_parameters") if getattr(training, key)]
        key = [*keys, "target_modules"][0] if training.tuner_type in tuners_of("target_modules") else "tuner_type"
        raise ConfigError.at(f"training.{key}", f"cannot get adapters: {error}") from error
    if hears:  # records have no sound, so no gradient reaches these weights, and DDP would wait
        for name, weight in prepared.named_parameters():
            weight.requires_grad = weight.requires_grad and not is_sound_weight(name)
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        key = next((key for key in _FREEZES if getattr(training, key)), "freeze_llm")
        raise ConfigError.at(f"training.{key}", "and the other freezes leave nothing to train: remove one")
    if prepared is not model:
        prepared.model_meta, prepared.model_info = model.model_meta, model.model_info
    return prepared


_FREEZES = (
    "freeze_parameters_ratio", "freeze_parameters_regex", "freeze_parameters", "freeze_llm", "freeze_vit",
    "freeze_aligner",
)  # fmt: skip


def quantisation_of(model: ModelConfig, *, on_cpu: bool) -> Any:
    """
    Return ms-swift's quantisation of a model's weights; None without one.

    Args:
        model: Section `model` of the run.
        on_cpu: Whether it trains on a CPU.

    Raises:
        ConfigError: This machine cannot quantise.
    """
    if model.quant_method is None:
        return None
    if on_cpu:
        raise ConfigError.at("model.quant_method", "quantises on a GPU alone: remove it, or train on one")
    if find_spec("bitsandbytes") is None:
        reason = "needs the package bitsandbytes, which is not installed: install it, or remove the key"
        raise ConfigError.at("model.quant_method", reason)
    info, meta = get_model_info_meta(model.model, model_type=swift_model_type(model))
    dtype = info.torch_dtype if model.torch_dtype is None else getattr(torch, model.torch_dtype)
    arguments: Any = SimpleNamespace(
        quant_method=model.quant_method,
        quant_bits=model.quant_bits,
        torch_dtype=dtype,
        **dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")),
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        model_info=info,
        model_meta=meta,
    )
    arguments.get_modules_to_not_convert = lambda: QuantizeArguments.get_modules_to_not_convert(arguments)
    QuantizeArguments.__post_init__(arguments)
    return QuantizeArguments.get_quantization_config(arguments)


def _arguments(model: Any, training: TrainingConfig) -> Any:
    """Return ms-swift's tuner arguments, resolved as in `SftArguments`."""
    fields: Any = dataclasses.fields(TunerArguments)
    defaults = {
        field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()
        for field in fields
    }
    chosen = {key: getattr(training, key) for key in _SHARED} | {key: list(getattr(training, key)) for key in _LISTS}
    chosen |= {name: value for name, value in training.trainer.items() if name in defaults}
    others = {
        "init_weights": training.init_weights or defaults["init_weights"],
        "target_parameters": list(training.target_parameters) or None,
        "tuner_backend": "peft",
        "use_swift_lora": False,
        "use_liger_kernel": False,
        "use_galore": False,
        "resume_from_checkpoint": None,  # the trainer loads it
        "adapters": [],
        "task_type": "causal_lm",
        "model_type": model.model_info.model_type,
        "model_meta": model.model_meta,
        "is_adapter": training.tuner_type != "full",
    }
    arguments: Any = SimpleNamespace(**(defaults | chosen | others))
    arguments._init_multimodal_full = lambda: TunerArguments._init_multimodal_full(arguments)  # noqa: SLF001  # its own
    TunerArguments.__post_init__(arguments)
    return arguments


def _require_matches(model: Any, training: TrainingConfig) -> None:
    """Refuse keys that match none of the model's weights, which ms-swift would only log."""
    names = [name for name, _ in model.named_parameters()]
    for key in ("freeze_parameters", "trainable_parameters"):
        for beginning in getattr(training, key):
            if not any(name.startswith(beginning) for name in names):
                raise ConfigError.at(f"training.{key}", f"has {beginning}, with which no weight of the model begins")
    for key in ("freeze_parameters_regex", "trainable_parameters_regex"):
        pattern = getattr(training, key)
        if pattern is not None and not any(re.search(pattern, name) for name in names):
            raise ConfigError.at(f"training.{key}", f"is {pattern}, which matches no weight of the model")
    modules = [name for name, _ in model.named_modules()]
    for module in set(training.modules_to_save) - {"all-embedding", "all-norm"}:
        if not any(name == module or name.endswith(f".{module}") for name in modules):
            raise ConfigError.at("training.modules_to_save", f"has {module}, which no module of the model is called")


def _refuse_sound(model: Any, training: TrainingConfig) -> None:
    """Refuse keys that would train only parts of a model for sound."""
    names = [name for name, _ in model.named_parameters()]
    for key in ("trainable_parameters", "target_modules", "modules_to_save"):
        for part in getattr(training, key):
            if is_sound_weight(part):
                raise ConfigError.at(f"training.{key}", f"has {part}, {_NO_SOUND}")
    for key in ("trainable_parameters_regex", "target_regex"):
        pattern = getattr(training, key)
        found = [] if pattern is None else [name for name in names if re.search(pattern, name)]
        if found and all(map(is_sound_weight, found)):
            raise ConfigError.at(f"training.{key}", f"is {pattern}, {_NO_SOUND}")


_NO_SOUND = "which hears or speaks: only text and images are trained, so leave it out"
