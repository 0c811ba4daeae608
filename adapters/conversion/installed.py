"""
What the installed ms-swift says: its arguments, its configurations, and what it finds out about a
model.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import swift
from swift.arguments import SftArguments
from swift.model import MODEL_MAPPING, get_matched_model_meta, get_model_info_meta
from swift.template import TEMPLATE_MAPPING, get_template_meta
from transformers.models.auto import modeling_auto

from packplan.adapters.families import is_shown, is_unpacked
from packplan.adapters.model_folder import config_architecture, model_sizes
from packplan.core.config import ModelConfig
from packplan.core.conversion import Argument, ModelFacts
from packplan.core.errors import ConfigError, Fault

_TYPES = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}

_ORDER = ("null", "bool", "int", "float", "str", "list", "dict")

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


def model_facts(
    name: str,
    folder: str | None,
    *,
    model_type: str | None,
    template: str | None,
    torch_dtype: str | None,
    loss_scale: str,
    ignores_empty_thoughts: bool,
) -> ModelFacts:
    """
    Return what ms-swift finds out about a model.

    Args:
        name: As the command has it: a folder or an id.
        folder: Where the model is on this machine; None if it is not here.
        model_type: ms-swift's, if the command gives it.
        template: ms-swift's, if the command gives it.
        torch_dtype: Type of the weights, if the command gives it.
        loss_scale: Which tokens are trained, as the command says.
        ignores_empty_thoughts: Whether ms-swift may leave empty thoughts out of training.

    Raises:
        ConfigError: ms-swift does not know the model, or knows it as several.
    """
    if folder is None:
        meta = get_matched_model_meta(name)
        if meta is None:
            return ModelFacts(loss_scale=loss_scale)
        known = TEMPLATE_MAPPING.get(template or meta.template or "")
        thinks = known is not None and _thinks(known) and ignores_empty_thoughts
        kinds = {kind for name in meta.architectures or () for kind in _model_types(name)}
        return ModelFacts(
            is_multimodal=bool(meta.is_multimodal),
            loss_scale=_scale(loss_scale, thinks=thinks),
            unpacked=_unpacked(kinds, template or meta.template),
        )
    try:
        info, meta = get_model_info_meta(folder, model_type=model_type)
        chosen = get_template_meta(info, meta, template_type=template)
    except (OSError, ValueError, KeyError) as error:
        fault = _ambiguous(folder, model_type, template)
        unknown = Fault("--model", f"{name} is not known to ms-swift: {error}")
        raise ConfigError("the command", (fault or unknown,)) from error
    thinks = _thinks(chosen) and ignores_empty_thoughts
    dtype = torch_dtype or str(info.torch_dtype).removeprefix("torch.")
    return ModelFacts(
        is_multimodal=bool(meta.is_multimodal),
        max_length=info.max_model_len,
        torch_dtype=typing.cast("Any", dtype),
        loss_scale=_scale(loss_scale, thinks=thinks),
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
    Return which argument a command has to have, with its candidates, because ms-swift knows several
    for a model; None if that is not why it fails.
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


def _thinks(template: Any) -> bool:
    """Return whether a template is of models that think or do not, as they are asked."""
    return bool(template.is_thinking and template.non_thinking_prefix)


def _scale(loss_scale: str, *, thinks: bool) -> str:
    return f"{loss_scale}+ignore_empty_think" if thinks and "ignore_empty_think" not in loss_scale else loss_scale


def _argument(field: Any, annotation: Any) -> Argument:
    default = field.default
    if default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    kinds = {_TYPES.get(kind, "str") for kind in _flat(annotation)}
    if field.name in _DERIVED:
        kinds |= {"str"}
    return Argument(tuple(kind for kind in _ORDER if kind in kinds), _plain(default))


def _plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (type(None), bool, int, float, str, list, dict)) else str(value)


def _flat(annotation: Any) -> Iterator[Any]:
    """Yield the types and the types of literal values that an annotation allows."""
    origin = typing.get_origin(annotation)
    if origin in {types.UnionType, typing.Union}:
        for argument in typing.get_args(annotation):
            yield from _flat(argument)
    elif origin is typing.Literal:
        yield from map(type, typing.get_args(annotation))
    else:
        yield origin or annotation
