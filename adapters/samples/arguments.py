"""ms-swift's own arguments of a run, by which its template, model and tuner are made."""

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
"""Prefixes of sections in config.json (`vision_config`) of models that ms-swift has to know."""

_OF_MODEL = ("model", "experts_impl", "rope_scaling", "new_special_tokens")

_OF_TEMPLATE = (
    "system", "max_pixels", "agent_template", "loss_scale", "use_chat_template", "truncation_strategy",
    "add_non_thinking_prefix", "preserve_thinking", "disable_ignore_empty_think",
)  # fmt: skip

_OF_TRAINING = (
    "output_dir", "dataloader_drop_last", "num_train_epochs", "max_steps", "seed", "tuner_type", "freeze_llm",
    "freeze_vit",
)  # fmt: skip
"""Keys of a section that ms-swift's arguments have too, by the same name."""

_QUANTISES = ("quant_method", "quant_bits", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")

_DEFAULTS: Mapping[str, Any] = {
    "freeze_aligner": False, "learning_rate": 5e-5, "bf16": False, "fp16": False, "eval_strategy": "no",
    "ddp_timeout": 1800,
}  # fmt: skip
"""Defaults that differ from the defaults of ms-swift's commands."""


class RunArguments(SftArguments):  # type: ignore[misc]  # ms-swift has no types
    """
    Arguments of `swift sft`, by which ms-swift resolves model, quantisation, template, tuner and
    training arguments.

    Unlike the arguments of a whole command, they touch no device, folder, tracker, hub or data set.
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

    For example, a hybrid thinking template gets another loss scale.

    Args:
        model: Section `model`, whose folder is on this machine.
        template: Section `template`, whose system prompt is a text.

    Raises:
        ConfigError: The kind of the model is not clear.
    """
    model_type, template_type = swift_types(model, template)
    arguments = _resolve(model, model_type, template=template_type, **_set_keys(template, _OF_TEMPLATE))
    arguments.system = template.system  # a name that ends in .txt may be a text by now
    return arguments


def run_arguments(model: ModelConfig, training: TrainingConfig) -> RunArguments:
    """
    Return the arguments of a model, its tuner and its training as `swift sft` resolves them.

    Args:
        model: Section `model`, whose folder is on this machine.
        training: Section `training`.
    """
    passed = {name: _copied(value) for name, value in training.trainer.items()}
    given = _set_keys(training, _OF_TRAINING) | _set_keys(model, _QUANTISES)
    return _resolve(model, swift_model_type(model), torch_dtype=model.torch_dtype, **{**_DEFAULTS, **given, **passed})


def _set_keys(section: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return keys of a section that are set, with lists as ms-swift takes them."""
    values = {name: getattr(section, name) for name in names}
    return {name: _copied(value) for name, value in values.items() if value not in (None, ())}


def _copied(value: Any) -> Any:
    """Return a value as ms-swift takes it: a list of its own, to which it may append."""
    return [*value] if isinstance(value, (list, tuple)) else value


def _resolve(model: ModelConfig, model_type: str | None, **given: Any) -> RunArguments:
    if model.rope_scaling:  # unset, it limits packs alone
        given["max_model_len"] = model.max_model_len
    with wrap_load_errors("model.model", f"is {model.model}, which ms-swift cannot load"):
        return RunArguments(model_type=model_type, **_set_keys(model, _OF_MODEL), **given)


def refuse_remote_code(model: ModelConfig) -> None:
    """
    Refuse a model folder with Python code that `model.trust_remote_code` does not allow to run.

    Raises:
        ConfigError: A file of the folder names code (`auto_map`).
    """
    if model.trust_remote_code:
        return
    for file in sorted(Path(model.model).glob("*.json")):
        # The index of weight files is large, and names no code.
        if not file.name.endswith(".index.json") and b'"auto_map"' in file.read_bytes():
            reason = f"brings Python code ({file.name} has auto_map): read it, then set model.trust_remote_code: true"
            raise ConfigError.for_key("model.model", f"is {model.model}, which {reason}")


def swift_types(model: ModelConfig, template: TemplateConfig) -> tuple[str | None, str]:
    """
    Return ms-swift's model type and template type of a model, which its own files do not state.

    The run's own keys come first; then the template that ms-swift has saved there (`args.json`);
    then the entry of ms-swift's registry for the folder's name; then the defaults of the
    architecture (`families.json`), or its only entry in the registry. The type is None for text
    models without an entry: ms-swift loads them as transformers does.

    Raises:
        ConfigError: The registry has no entry, or several to choose from.
    """
    types, templates = _candidate_types(model)
    with wrap_load_errors("model.model", f"has an args.json that cannot be read, in {model.model}"):
        if asked := template.template or _read_args_json_template_type(model.model):
            templates = [asked]
    choices = (("model.model_type", "model types", types), ("template.template", "templates", templates))
    faults = [_choice_fault(model, *one) for one in choices if len(one[2]) != 1]
    if faults:
        raise ConfigError("the model", tuple(faults))
    return types[0], templates[0]


def swift_model_type(model: ModelConfig) -> str | None:
    """Return ms-swift's model type of a model, or None; see `swift_types`."""
    types, _ = _candidate_types(model)
    if len(types) != 1:
        raise ConfigError("the model", (_choice_fault(model, "model.model_type", "model types", types),))
    return types[0]


def _candidate_types(model: ModelConfig) -> tuple[Sequence[str | None], Sequence[str]]:
    """Return the model types and the template types that fit a model."""
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
    return types, _matching_templates(types)


def _matching_types(architecture: str) -> list[str]:
    """Return ms-swift's model types for an architecture, causal language models only."""
    metas = [meta for meta in MODEL_MAPPING.values() if architecture in (meta.architectures or ())]
    return [meta.model_type for meta in metas if not meta.is_reward and meta.task_type in (None, "causal_lm")]


def _matching_templates(types: Sequence[str]) -> list[str]:
    """Return ms-swift's template types for some model types."""
    known = [MODEL_MAPPING[name] for name in types if name in MODEL_MAPPING]
    return list(dict.fromkeys(name for meta in known for name in meta.candidate_templates))


def _choice_fault(model: ModelConfig, key: str, what: str, found: Sequence[str | None]) -> Fault:
    architecture = config_architecture(model)
    if not found:
        return Fault(key, f"is not set, and ms-swift has no {what} for {architecture}: set it to one that fits")
    several = ", ".join(map(str, found[:20]))
    return Fault(key, f"is not set, and ms-swift has several {what} for {architecture}: set it to one of {several}")
