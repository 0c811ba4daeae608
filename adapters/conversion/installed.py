"""
Facts of the installed ms-swift: its arguments, its configurations, and what it knows of a model.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import swift
from swift.arguments import SftArguments
from swift.model import MODEL_MAPPING, get_matched_model_meta, get_model_info_meta
from swift.template import TEMPLATE_MAPPING, get_template_meta
from transformers.models.auto import modeling_auto

from packplan.adapters.config.trainer_keys import TYPES, WORDS, flat_types
from packplan.adapters.families import is_shown, is_unpacked
from packplan.adapters.model_folder import config_architecture, model_sizes
from packplan.core.config import ModelConfig
from packplan.core.conversion import Argument, ModelFacts
from packplan.core.errors import ConfigError, Fault

_DERIVED = frozenset({"fsdp", "report_to"})
"""Arguments whose annotations are narrower than what ms-swift takes."""

_MOST = 20
"""Candidates that an error names, at most."""


def installed_arguments() -> dict[str, Argument]:
    """Return every argument of `swift sft`, as the installed ms-swift has it."""
    hints = typing.get_type_hints(SftArguments)
    return {field.name: _argument(field, hints[field.name]) for field in dataclasses.fields(SftArguments) if field.init}


def installed_sections() -> dict[str, Mapping[str, Any]]:
    """Return the configurations of DeepSpeed and FSDP that ms-swift brings, by their names."""
    folder = Path(swift.__file__).parent / "config"
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def model_facts(values: Mapping[str, Any], folder: str | None) -> ModelFacts:
    """
    Return the facts that ms-swift knows about the model of a command.

    Args:
        values: The command's arguments.
        folder: The model's folder on this machine; None if it is not here.

    Raises:
        ConfigError: ms-swift does not know the model, or knows it as several.
    """
    name, model_type, template = str(values.get("model", "")), values.get("model_type"), values.get("template")
    if folder is None:
        meta = get_matched_model_meta(name)
        if meta is None:
            return ModelFacts(loss_scale=_loss_scale(values, None))
        kinds = {kind for name in meta.architectures or () for kind in _model_types(name)}
        return ModelFacts(
            is_multimodal=bool(meta.is_multimodal),
            loss_scale=_loss_scale(values, TEMPLATE_MAPPING.get(template or meta.template or "")),
            unpacked=_unpacked(kinds, template or meta.template),
        )
    try:
        info, meta = get_model_info_meta(folder, model_type=model_type)
        chosen = get_template_meta(info, meta, template_type=template)
    except (OSError, ValueError, KeyError) as error:
        fault = _ambiguous(folder, model_type, template)
        unknown = Fault("--model", f"{name} is not known to ms-swift: {error}")
        raise ConfigError("the command", (fault or unknown,)) from error
    return ModelFacts(
        is_multimodal=bool(meta.is_multimodal),
        max_length=info.max_model_len,
        torch_dtype=values.get("torch_dtype") or typing.cast("Any", str(info.torch_dtype).removeprefix("torch.")),
        loss_scale=_loss_scale(values, chosen),
        unpacked=_unpacked({str(model_sizes(ModelConfig(model=folder))["model_type"])}, chosen.template_type),
    )


def _model_types(architecture: str) -> Iterator[str]:
    """Yield the model types of transformers whose models are of a class."""
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        yield from (kind for kind, held in names.items() if held == architecture)


def _unpacked(model_types: Collection[str], template: str | None) -> str | None:
    """Return the model type, if all are known not to pack, or the template; None if neither is."""
    if model_types and all(map(is_unpacked, model_types)):
        return min(model_types)
    return template if template is not None and not is_shown(template) else None


def _ambiguous(folder: str, model_type: str | None, template: str | None) -> Fault | None:
    """
    Return the fault of a command that does not choose between several that ms-swift knows for a
    model, with the candidates; None if it fails for another reason.
    """
    architecture = config_architecture(ModelConfig(model=folder))
    metas = [meta for meta in MODEL_MAPPING.values() if architecture in (meta.architectures or ())]
    if model_type is None and len(metas) > 1:
        chats = [meta for meta in metas if not meta.is_reward and meta.task_type in (None, "causal_lm")] or metas
        return _choose("model_type", "model types", architecture, [meta.model_type for meta in chats])
    meta = MODEL_MAPPING.get(model_type) if model_type else next(iter(metas), None)
    if template is None and meta is not None and len(meta.candidate_templates) > 1:
        return _choose("template", "templates", architecture, meta.candidate_templates)
    return None


def _choose(argument: str, what: str, architecture: str, candidates: Sequence[str]) -> Fault:
    """Return the fault of an argument that is not given, where ms-swift asks for it."""
    reason = (
        f"is not given, and ms-swift knows several {what} of {architecture}: add --{argument} and one of "
        f"{', '.join(candidates[:_MOST])} to the command"
    )
    return Fault(f"--{argument}", reason)


def _loss_scale(values: Mapping[str, Any], template: Any) -> str:
    """Return `--loss_scale` as ms-swift changes it for a template with or without thoughts."""
    scale = str(values.get("loss_scale", "default"))
    thinks = template is not None and template.is_thinking and template.non_thinking_prefix
    if not thinks or values.get("disable_ignore_empty_think") or "ignore_empty_think" in scale:
        return scale
    return f"{scale}+ignore_empty_think"


def _argument(field: Any, annotation: Any) -> Argument:
    default = field.default
    if default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    kinds = {TYPES.get(kind, "str") for kind in flat_types(annotation)}
    if field.name in _DERIVED:
        kinds |= {"str"}
    return Argument(tuple(kind for kind in WORDS if kind in kinds), _plain(default))


def _plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (type(None), bool, int, float, str, list, dict)) else str(value)
