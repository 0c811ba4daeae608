"""Freezing of weights and adding of adapters, by ms-swift's own code."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from packplan.adapters.families import is_audio_weight, trained_part
from packplan.adapters.samples.arguments import RunArguments
from packplan.core.config.tuners import tuners_of
from packplan.core.errors import ConfigError

_FREEZES = (
    "freeze_parameters_ratio", "freeze_parameters_regex", "freeze_llm", "freeze_vit", "freeze_aligner",
    "freeze_parameters",  # into which ms-swift writes the others
)  # fmt: skip


def prepare_tuner(model: Any, given: Mapping[str, Any], arguments: RunArguments) -> Any:
    """
    Freeze weights and add adapters as `swift sft` does.

    Args:
        model: Model as ms-swift loaded it.
        given: Settings of the section `training` that the run passes on to ms-swift.
        arguments: ms-swift's own arguments of the run.

    Returns:
        The model, or a `PeftModel` around it.

    Raises:
        ConfigError: Nothing is left to train, or a key matches nothing in the model.
    """
    from swift.pipelines.train.tuner import TunerMixin

    _refuse_unmatched(model, given)
    try:
        prepared = TunerMixin.prepare_model(arguments, model)
    except (ValueError, RuntimeError, AttributeError, AssertionError, TypeError) as error:
        keys = [key for key in ("target_regex", "target_parameters") if given.get(key)]
        key = [*keys, "target_modules"][0] if arguments.tuner_type in tuners_of("target_modules") else "tuner_type"
        raise ConfigError.for_key(f"training.{key}", f"cannot get adapters: {error}") from error
    if trained_part(model) is not model:
        # Records have no sound, so no gradient reaches these weights, and DDP would wait.
        for name, weight in prepared.named_parameters():
            weight.requires_grad = weight.requires_grad and not is_audio_weight(name)
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        key = next((key for key in _FREEZES if getattr(arguments, key)), "freeze_llm")
        raise ConfigError.for_key(f"training.{key}", "and the other freezes leave nothing to train: remove one")
    if prepared is not model:
        prepared.model_meta, prepared.model_info = model.model_meta, model.model_info
    return prepared


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
"""Key -> function that says whether a value of the key matches the name of a weight or module."""


def _refuse_unmatched(model: Any, given: Mapping[str, Any]) -> None:
    """
    Refuse freezes and targets that match no part of the model, which ms-swift would only log.
    Refuse targets that match only audio weights, since no record has audio.
    """
    modules, weights = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    for key, matches in _MATCHES.items():
        values = given.get(key) or ()
        for value in {values} if isinstance(values, str) else {*values} - {"all-embedding", "all-linear", "all-norm"}:
            found = [name for name in (modules if matches is _ends_with_module else weights) if matches(value, name)]
            if not found and not key.startswith("target"):  # peft refuses those
                raise ConfigError.for_key(f"training.{key}", f"has {value}, which names no part of the model")
            if found and not key.startswith("freeze") and all(map(is_audio_weight, found)):
                reason = f"has {value}, an audio part, but only text and images are trained: leave it out"
                raise ConfigError.for_key(f"training.{key}", reason)
