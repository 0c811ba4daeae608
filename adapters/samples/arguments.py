"""Builds ms-swift's own arguments, which decide a run's template, model and tuner."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.arguments import SftArguments, TemplateArguments
from swift.arguments.base_args.model_args import ModelArguments
from swift.arguments.base_args.quant_args import QuantizeArguments
from swift.arguments.tuner_args import TunerArguments
from swift.model import MODEL_MAPPING, get_matched_model_meta
from swift.template.register import _read_args_json_template_type

from packplan.adapters.families import default_swift_types
from packplan.adapters.files import wrap_load_errors
from packplan.adapters.model_folder import config_architecture, config_content
from packplan.core.config.run import ModelConfig, TemplateConfig, TrainingConfig
from packplan.core.errors import ConfigError, Fault

_MEDIA = ("vision", "audio")
"""
Prefixes of config.json sections, such as `vision_config`. A model with such a section can be loaded
only if ms-swift's registry has an entry for it.
"""

_OF_MODEL = ("model", "experts_impl", "rope_scaling", "new_special_tokens")

_OF_TEMPLATE = (
    "system", "max_pixels", "agent_template", "loss_scale", "use_chat_template", "truncation_strategy",
    "add_non_thinking_prefix", "preserve_thinking", "disable_ignore_empty_think",
)  # fmt: skip

_OF_TRAINING = (
    "output_dir", "dataloader_drop_last", "num_train_epochs", "max_steps", "seed", "tuner_type", "freeze_llm",
    "freeze_vit",
)  # fmt: skip
"""Keys of the section `training` that ms-swift's arguments have under the same name."""

_QUANTISES = ("quant_method", "quant_bits", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")

_DEFAULTS: Mapping[str, Any] = {
    "freeze_aligner": False, "learning_rate": 5e-5, "bf16": False, "fp16": False, "eval_strategy": "no",
    "ddp_timeout": 1800,
}  # fmt: skip
"""Packplan's defaults that differ from those of ms-swift's commands."""


class RunArguments(SftArguments):  # type: ignore[misc]  # ms-swift has no types
    """
    Arguments of `swift sft`, from which ms-swift resolves model, quantisation, template, tuner and
    training settings.

    Unlike the arguments of a whole command, these access no device, output folder, tracker, hub or
    data set.
    """

    def __post_init__(self) -> None:
        ModelArguments.__post_init__(self)
        QuantizeArguments.__post_init__(self)
        if self.template is not None:
            TemplateArguments.__post_init__(self)
        TunerArguments.__post_init__(self)
        if self.lorap_lr_ratio:
            self.optimizer: str | None = self.optimizer or "lorap"


def template_arguments(model: ModelConfig, template: TemplateConfig) -> RunArguments:
    """
    Return a template's arguments as `swift sft` resolves them.

    For example, `swift sft` changes the loss scale of a hybrid thinking template.

    Args:
        model: Section `model`; its folder has to be on this machine.
        template: Section `template`; its system prompt has to be a text, not a file's path.

    Raises:
        ConfigError: No model type or template type fits the model, or several fit it, or ms-swift
            refuses the arguments.
    """
    model_type, template_type = swift_types(model, template)
    arguments = _resolve(model, model_type, template=template_type, **_set_keys(template, _OF_TEMPLATE))
    arguments.system = template.system  # ms-swift would read a system prompt that ends in .txt as a file
    return arguments


def run_arguments(model: ModelConfig, training: TrainingConfig) -> RunArguments:
    """
    Return the arguments of a model, its tuner and its training as `swift sft` resolves them.

    Args:
        model: Section `model`; its folder has to be on this machine.
        training: Section `training`.

    Raises:
        ConfigError: As in `template_arguments`.
    """
    passed = {name: _copied(value) for name, value in training.trainer.items()}
    given = _set_keys(training, _OF_TRAINING) | _set_keys(model, _QUANTISES)
    return _resolve(model, swift_model_type(model), torch_dtype=model.torch_dtype, **{**_DEFAULTS, **given, **passed})


def _set_keys(section: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a section that are set, with tuples as lists, as ms-swift expects."""
    values = {name: getattr(section, name) for name in names}
    return {name: _copied(value) for name, value in values.items() if value not in (None, ())}


def _copied(value: Any) -> Any:
    """Return *value*; a list or tuple becomes a new list, to which ms-swift may append."""
    return [*value] if isinstance(value, (list, tuple)) else value


def _resolve(model: ModelConfig, model_type: str | None, **given: Any) -> RunArguments:
    if model.rope_scaling:  # without it, max_model_len only limits packs
        given["max_model_len"] = model.max_model_len
    with wrap_load_errors("model.model", f"is {model.model}, which ms-swift cannot load"):
        return RunArguments(model_type=model_type, **_set_keys(model, _OF_MODEL), **given)


def refuse_remote_code(model: ModelConfig) -> None:
    """
    Refuse a model folder with Python code, unless `model.trust_remote_code` allows code to run.

    Raises:
        ConfigError: A JSON file of the folder has the key `auto_map`, which names code.
    """
    if model.trust_remote_code:
        return
    for file in sorted(Path(model.model).glob("*.json")):
        # The index of weight files is large, and never names code.
        if not file.name.endswith(".index.json") and b'"auto_map"' in file.read_bytes():
            reason = f"has Python code ({file.name}: auto_map): read the code, then set model.trust_remote_code: true"
            raise ConfigError.for_key("model.model", f"is {model.model}, which {reason}")


def swift_types(model: ModelConfig, template: TemplateConfig) -> tuple[str | None, str]:
    """
    Return ms-swift's model type and template type of a model.

    The run's keys `model.model_type` and `template.template` take precedence. Next comes the
    template that ms-swift saved in the folder's `args.json`, then the entry of ms-swift's registry
    for the folder's name. Last come the defaults of the architecture (`families.json`) and the only
    entry of ms-swift's registry for the architecture. If a text model has no entry, the model type
    is None, and ms-swift loads the model as transformers does.

    Raises:
        ConfigError: No type fits the model, or several fit it.
    """
    types, templates = _candidate_types(model)
    with wrap_load_errors("model.model", f"has an unreadable args.json, in {model.model}", "correct or remove it"):
        if asked := template.template or _read_args_json_template_type(model.model):
            templates = [asked]
    choices = (("model.model_type", "model types", types), ("template.template", "templates", templates))
    faults = [_choice_fault(model, *one) for one in choices if len(one[2]) != 1]
    if faults:
        raise ConfigError("the model", tuple(faults))
    return types[0], templates[0]


def swift_model_type(model: ModelConfig) -> str | None:
    """
    Return ms-swift's model type; None for a text model that ms-swift's registry does not have.

    ConfigError is raised if no type or several types fit the model.
    """
    types, _ = _candidate_types(model)
    if len(types) != 1:
        raise ConfigError("the model", (_choice_fault(model, "model.model_type", "model types", types),))
    return types[0]


def _candidate_types(model: ModelConfig) -> tuple[Sequence[str | None], Sequence[str]]:
    """
    Return the model types and the template types that fit a model.

    For a text model that ms-swift's registry does not have, these are [None] and [].
    """
    named = get_matched_model_meta(str(Path(model.model).resolve()))
    if named is not None and model.model_type in (None, named.model_type):
        return [named.model_type], [named.template] if named.template else list(named.candidate_templates)
    architecture = config_architecture(model)
    settled = default_swift_types(architecture)
    if settled is not None and model.model_type in (None, settled[0]):
        return [settled[0]], [settled[1]]
    types = [model.model_type] if model.model_type else _matching_types(architecture)
    if not types and not any(f"{part}_config" in config_content(model) for part in _MEDIA):
        return [None], []
    known = [MODEL_MAPPING[name] for name in types if name in MODEL_MAPPING]
    return types, list(dict.fromkeys(name for meta in known for name in meta.candidate_templates))


def _matching_types(architecture: str) -> list[str]:
    """Return ms-swift's types of causal language models that have *architecture*."""
    metas = [meta for meta in MODEL_MAPPING.values() if architecture in (meta.architectures or ())]
    return [meta.model_type for meta in metas if not meta.is_reward and meta.task_type in (None, "causal_lm")]


def _choice_fault(model: ModelConfig, key: str, what: str, found: Sequence[str | None]) -> Fault:
    architecture = config_architecture(model)
    if not found:
        return Fault(key, f"is not set, and ms-swift has no {what} for {architecture}: set it to a fitting name")
    several = ", ".join(map(str, found[:20]))
    return Fault(key, f"is not set, and ms-swift has several {what} for {architecture}: set it to one of {several}")
