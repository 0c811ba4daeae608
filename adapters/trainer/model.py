"""
Loading of the model that is trained; ms-swift's own code freezes weights and adds adapters.
"""

import contextlib
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from swift.utils import HfConfigFactory
from transformers import modeling_utils, set_seed
from transformers.utils.logging import disable_progress_bar

from packplan.adapters.attention import project_patches, set_attention
from packplan.adapters.families import is_audio_weight, trained_part
from packplan.adapters.files import wrap_load_errors
from packplan.adapters.model_folder import require_whole_weights
from packplan.adapters.models import replace_attributes
from packplan.adapters.samples.arguments import RunArguments, run_arguments
from packplan.core.config.run import ModelConfig, TrainingConfig
from packplan.core.config.tuners import tuners_of
from packplan.core.equality import AttentionChoice
from packplan.core.errors import ConfigError, counted

_FREEZES = (
    "freeze_parameters_ratio", "freeze_parameters_regex", "freeze_llm", "freeze_vit", "freeze_aligner",
    "freeze_parameters",  # into which ms-swift writes the others
)  # fmt: skip


def open_model(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    attention: AttentionChoice,
    device: torch.device | None,
    outline: bool = False,
) -> torch.nn.Module:
    """
    Load a model, turn its cache off, set its attention, freeze weights and add adapters.

    Args:
        model: Model to load.
        training: Settings of the run for frozen weights and adapters.
        attention: Attention of the run.
        device: Device of the weights; None if FSDP or DeepSpeed will shard and place the weights.
        outline: Whether to read only config.json, and leave the weights on the device `meta`.
    """
    _refuse_quantisation(model, on_cpu=device is None or device.type == "cpu")
    arguments = run_arguments(model, training)
    if not sys.stderr.isatty():
        disable_progress_bar()
    if not outline:
        require_whole_weights(model)
    set_seed(training.seed)  # new tokens are drawn, by all ranks alike
    with (
        torch.device("meta") if outline else contextlib.nullcontext(),
        wrap_load_errors("model.model", f"is {model.model}, which ms-swift cannot load"),
        _refusing_missing_weights(model.model),
    ):
        try:
            opened, _ = arguments.get_model_processor(
                attn_impl=attention.loaded_backend,
                device_map=None if device is None else str(device),
                return_dummy_model=outline,
            )
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):  # transformers names its own option
                raise
            reason = (
                f"is {model.model}, whose config.json has other sizes than the weights beside it: take the config.json "
                "that belongs to the weights"
            )
            raise ConfigError.for_key("model.model", reason) from error
    project_patches(opened)
    set_attention(opened, attention)
    # With a cache, transformers builds no block-diagonal mask, and packed samples would attend to
    # each other.
    HfConfigFactory.set_config_attr(opened.config, "use_cache", False)  # noqa: FBT003  # its signature
    _refuse_missing_parts(opened, arguments)
    set_seed(training.seed)  # adapters are drawn, whatever loading has drawn
    with torch.device("meta") if outline else contextlib.nullcontext():
        return typing.cast("torch.nn.Module", _prepare_tuner(opened, training.trainer, arguments))


def _refuse_quantisation(model: ModelConfig, *, on_cpu: bool) -> None:
    """Raise ConfigError if a run quantises its model, but this machine cannot do so."""
    if model.quant_method is None:
        return
    if on_cpu:
        raise ConfigError.for_key("model.quant_method", "works only on a GPU: remove it, or train on a GPU")
    if find_spec("bitsandbytes") is None:
        reason = "needs the package bitsandbytes, which is not installed: install it, or remove the key"
        raise ConfigError.for_key("model.quant_method", reason)


@contextlib.contextmanager
def _refusing_missing_weights(folder: str) -> Iterator[None]:
    """
    Refuse a model loaded in this context if its files lack some of its weights.

    transformers initialises missing weights at random, and only logs their names. Every weight in
    this log is needed, since the log leaves out tied weights and optional weights.
    """
    report, missing = modeling_utils.log_state_dict_report, set[str]()

    def note_missing(*, loading_info: Any, **others: Any) -> None:
        missing.update(loading_info.missing_keys)
        report(loading_info=loading_info, **others)

    with replace_attributes(modeling_utils, log_state_dict_report=note_missing):
        yield
    if missing:
        first = ", ".join(sorted(missing)[:3]) + (", …" if len(missing) > 3 else "")
        reason = (
            f"is {folder}, which lacks {counted(len(missing), 'weight')} of the model ({first}), so transformers "
            "would draw random numbers for them: copy all files of the model again"
        )
        raise ConfigError.for_key("model.model", reason)


def _refuse_missing_parts(model: Any, arguments: RunArguments) -> None:
    """Raise ConfigError if a run freezes a part that the model does not have."""
    arch = model.model_meta.model_arch
    parts = {"freeze_llm": "language_model", "freeze_vit": "vision_tower", "freeze_aligner": "aligner"}
    names = [name for name, _ in model.named_parameters()]
    for key, part in parts.items():
        prefixes = tuple(getattr(arch, part, None) or ())
        has_it = model.model_meta.is_multimodal and any(name.startswith(prefixes) for name in names)
        if getattr(arguments, key) and not has_it:
            raise ConfigError.for_key(f"training.{key}", "names a part that this model does not have: remove it")


def _prepare_tuner(model: Any, given: Mapping[str, Any], arguments: RunArguments) -> Any:
    """
    Freeze weights and add adapters as `swift sft` does; return the model, or a `PeftModel` with it.

    ConfigError if nothing is left to train, or a key matches nothing in the model.
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
        raise ConfigError.for_key(f"training.{key}", "and the other freezes leave nothing to train: remove one of them")
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
"""
Key -> function that returns whether a value of the key matches the name of a weight or module.
"""


def _refuse_unmatched(model: Any, given: Mapping[str, Any]) -> None:
    """
    Refuse freezes, trainable parameters and modules to save that match no part of the model, which
    ms-swift would only log. Refuse all keys except freezes if they match only audio weights, since
    no record has audio.
    """
    modules, weights = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    for key, matches in _MATCHES.items():
        values = given.get(key) or ()
        for value in {values} if isinstance(values, str) else {*values} - {"all-embedding", "all-linear", "all-norm"}:
            found = [name for name in (modules if matches is _ends_with_module else weights) if matches(value, name)]
            if not found and not key.startswith("target"):  # peft refuses those
                raise ConfigError.for_key(f"training.{key}", f"has {value}, which fits no part of the model: change it")
            if found and not key.startswith("freeze") and all(map(is_audio_weight, found)):
                reason = f"has {value}, an audio part, but only text and images are trained: leave it out"
                raise ConfigError.for_key(f"training.{key}", reason)
