"""Freezes and adapters of a model, set up by ms-swift's own code."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from swift.arguments.base_args.quant_args import QuantizeArguments
from swift.arguments.tuner_args import TunerArguments
from swift.model import get_model_info_meta
from transformers import BitsAndBytesConfig

from packplan.adapters.families import is_audio_weight, trained_part
from packplan.adapters.samples.template import swift_model_type
from packplan.core.config.faults import tuners_of
from packplan.core.config.run import ModelConfig, TrainingConfig
from packplan.core.errors import ConfigError

_SHARED = (
    "tuner_type", "target_regex", "lora_rank", "lora_alpha", "lora_dropout", "lorap_lr_ratio", "use_rslora",
    "use_dora", "freeze_llm", "freeze_vit", "freeze_aligner", "freeze_parameters_regex", "freeze_parameters_ratio",
    "trainable_parameters_regex",
)  # fmt: skip
"""Keys of a run that ms-swift's tuner arguments have too, with the same types."""

_LISTS = ("target_modules", "modules_to_save", "freeze_parameters", "trainable_parameters")
"""The same for keys that are tuples in a run, and lists in ms-swift."""


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

    arguments = _tuner_arguments(model, training)
    _refuse_unmatched(model, training)
    try:
        prepared = TunerMixin.prepare_model(arguments, model)
    except (ValueError, RuntimeError, AttributeError, AssertionError, TypeError) as error:
        keys = [key for key in ("target_regex", "target_parameters") if getattr(training, key)]
        key = [*keys, "target_modules"][0] if training.tuner_type in tuners_of("target_modules") else "tuner_type"
        raise ConfigError.for_key(f"training.{key}", f"cannot get adapters: {error}") from error
    if trained_part(model) is not model:
        # Records have no sound, so no gradient reaches these weights, and DDP would wait.
        for name, weight in prepared.named_parameters():
            weight.requires_grad = weight.requires_grad and not is_audio_weight(name)
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        key = next((key for key in _FREEZES if getattr(training, key)), "freeze_llm")
        raise ConfigError.for_key(f"training.{key}", "and the other freezes leave nothing to train: remove one")
    if prepared is not model:
        prepared.model_meta, prepared.model_info = model.model_meta, model.model_info
    return prepared


_FREEZES = (
    "freeze_parameters_ratio", "freeze_parameters_regex", "freeze_parameters", "freeze_llm", "freeze_vit",
    "freeze_aligner",
)  # fmt: skip


def make_quantisation(model: ModelConfig, *, on_cpu: bool) -> Any:
    """
    Return transformers' quantisation settings for a model; None if the run does not quantise.

    Modules that ms-swift leaves in full precision are excluded.

    Args:
        model: Section `model` of the run.
        on_cpu: Whether the run trains on a CPU.

    Raises:
        ConfigError: This machine cannot quantise.
    """
    if model.quant_method is None:
        return None
    if on_cpu:
        raise ConfigError.for_key("model.quant_method", "quantises on a GPU alone: remove it, or train on one")
    if find_spec("bitsandbytes") is None:
        reason = "needs the package bitsandbytes, which is not installed: install it, or remove the key"
        raise ConfigError.for_key("model.quant_method", reason)
    info, meta = get_model_info_meta(model.model, model_type=swift_model_type(model))
    dtype = info.torch_dtype if model.torch_dtype is None else getattr(torch, model.torch_dtype)
    asked: Any = SimpleNamespace(model_info=info, model_meta=meta)
    return BitsAndBytesConfig(
        load_in_4bit=model.quant_bits == 4,
        load_in_8bit=model.quant_bits == 8,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=QuantizeArguments.get_modules_to_not_convert(asked),
    )


def _tuner_arguments(model: Any, training: TrainingConfig) -> Any:
    """Return ms-swift's tuner arguments as a namespace, resolved as `SftArguments` does."""
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


def _ends_with_module(module: str, name: str) -> bool:
    return f".{name}".endswith(f".{module}")


_MATCHES: Mapping[str, Callable[[str, str], Any]] = {
    "freeze_parameters": lambda beginning, name: name.startswith(beginning),
    "freeze_parameters_regex": re.search,
    "trainable_parameters": lambda beginning, name: name.startswith(beginning),
    "trainable_parameters_regex": re.search,
    "modules_to_save": _ends_with_module,
    "target_modules": _ends_with_module,
    "target_regex": re.search,
}
"""Key -> function of its value and the name of a weight or module: whether they match."""


def _refuse_unmatched(model: Any, training: TrainingConfig) -> None:
    """
    Refuse freezes and targets that match no weight, which ms-swift would only log. Refuse targets
    that match only weights for sound, which no record has.
    """
    modules, weights = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    for key, matches in _MATCHES.items():
        values = getattr(training, key) or ()
        for value in {values} if isinstance(values, str) else {*values} - {"all-embedding", "all-linear", "all-norm"}:
            found = [name for name in (modules if matches is _ends_with_module else weights) if matches(value, name)]
            if not found and not key.startswith("target"):  # peft refuses those
                raise ConfigError.for_key(f"training.{key}", f"has {value}, which names no part of the model")
            if found and not key.startswith("freeze") and all(map(is_audio_weight, found)):
                reason = f"has {value}, which hears or speaks: only text and images are trained, so leave it out"
                raise ConfigError.for_key(f"training.{key}", reason)
