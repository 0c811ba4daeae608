"""Opens ms-swift's template of a model without the model's weights."""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from swift.agent_template import agent_template_map
from swift.loss_scale import ALL_BASE_STRATEGY, loss_scale_map
from swift.template import StdTemplateInputs, Template

from packplan.adapters.families import leaves_images_to_model, may_probe_template
from packplan.adapters.model_folder import PROCESSING_FILES, damaged_json_reason
from packplan.adapters.models import set_media_token_ids
from packplan.adapters.samples.arguments import (
    RunArguments,
    refuse_remote_code,
    swift_model_type,
    swift_types,
    template_arguments,
)
from packplan.adapters.samples.video_reading import set_video_sampling
from packplan.adapters.versions import installed_version
from packplan.core.config.identity import config_length_inputs
from packplan.core.config.run import ModelConfig, RunConfig, TemplateConfig
from packplan.core.errors import ConfigError
from packplan.core.fingerprint import Fingerprint, Value

_log_info_once = cache(logging.getLogger(__name__).info)

_PROCESSING_PACKAGES = ("ms-swift", "transformers", "tokenizers", "qwen_vl_utils", "pillow", "torchvision")

PROCESSING_VARIABLES = (
    "MAX_PIXELS", "MIN_PIXELS", "IMAGE_FACTOR", "IMAGE_MAX_TOKEN_NUM", "IMAGE_MIN_TOKEN_NUM", "MAX_RATIO",
    "SPATIAL_MERGE_SIZE", "INPUT_SIZE", "MAX_NUM", "MAX_SLICE_NUMS", "DOWNSAMPLE_MODE", "QWENVL_BBOX_FORMAT",
    "ENABLE_THINKING", "PRESERVE_THINKING",
    "FPS", "FPS_MIN_FRAMES", "FPS_MAX_FRAMES", "FRAME_FACTOR", "VIDEO_MIN_PIXELS", "VIDEO_MAX_PIXELS",
    "VIDEO_TOTAL_PIXELS", "VIDEO_MIN_TOKEN_NUM", "VIDEO_MAX_TOKEN_NUM", "MODEL_SEQ_LEN", "FORCE_QWENVL_VIDEO_READER",
)  # fmt: skip
"""Environment variables that ms-swift and qwen_vl_utils read while encoding text and media."""

MEASURING_VERSION = 5
"""
Version of Packplan's rules that decide lengths, from records to messages and from image headers to
patches. Increase it with each change that affects a length.
"""

_ANSWER = {"role": "assistant", "content": "."}

_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y")
"""Formats of a date in which templates may have written today's date when they were imported."""


def _refuse_unproven_model(template_type: str) -> None:
    """
    Refuse a template whose model has not been shown to keep packed samples apart.

    Raises:
        ConfigError: `families.json` lists the template type under `unshown`.
    """
    if not may_probe_template(template_type):
        reason = (
            f"is {template_type}, whose model reads text, images and sound in a separate part, the thinker, which "
            "was not shown to keep packed samples apart: set training.packing: false"
        )
        raise ConfigError.for_key("template.template", reason)


def _refuse_unpackable(template: Template) -> None:
    """
    Refuse a template for which ms-swift cannot collate several samples into one row.

    Raises:
        ConfigError: The template's `support_padding_free` is false, or unset for a vision model.
    """
    declared = template.support_padding_free
    if declared is None:
        declared = not template.model_meta.is_multimodal
    if not declared:
        name = template.template_meta.template_type
        reason = f"is {name}, for which ms-swift does not support packed rows: set training.packing: false"
        raise ConfigError.for_key("template.template", reason)


def open_template(
    model: ModelConfig, template: TemplateConfig, *, packing_length: int, packs: bool = False, processor: Any = None
) -> Template:
    """
    Build ms-swift's template in training mode from its own arguments, without loading the model.

    The template's `max_length` is None unless `truncation_strategy` is `left` or `right`. The
    template's `packing` and `padding_free` are set to *packs*.

    Args:
        model: Section `model`, from whose folder tokenizer and processor are read.
        template: Section `template`, which decides how a record becomes tokens.
        packing_length: Token limit of a pack, and of a sample if the template truncates.
        packs: Whether samples share packs; if so, templates that cannot collate packs are refused.
        processor: Processor of the model; None loads it.

    Raises:
        ConfigError: ms-swift cannot open the template, the template is not for this model, or
            *packs* is true and the template cannot collate packs.
    """
    refuse_remote_code(model)
    _refuse_unknown_names(template)
    if packs:
        _refuse_unproven_model(swift_types(model, template)[1])
    arguments = template_arguments(model, template)
    cuts = template.truncation_strategy in {"left", "right"}
    if arguments.loss_scale != template.loss_scale:
        _log_info_once("template.loss_scale is %s, set by ms-swift for %s", arguments.loss_scale, arguments.template)
    # Otherwise weights of single messages would be ignored. Weights that are all 0 or 1 are dropped
    # after encoding.
    arguments.is_binary_loss_scale, arguments.max_length = False, packing_length if cuts else None
    try:
        if processor is None:
            _, processor = arguments.get_model_processor(load_model=False)
        opened = arguments.get_template(processor)
    except AssertionError as error:
        raise ConfigError.for_key("template", f"is refused by ms-swift: {error}") from error
    except Exception as error:  # errors of tokenizers about broken files have no common class
        remedy = ": pip install 'packplan[omni]'" if "qwen_omni_utils" in f"{error}" else ""
        reason = f"is {model.model}, which ms-swift cannot open: {damaged_json_reason(model.model) or error}{remedy}"
        raise ConfigError.for_key("model.model", reason) from error
    _refuse_media_template(opened)
    if packs:
        _refuse_unpackable(opened)
    if not opened.tokenizer("a").input_ids:  # without tokenizer.json, transformers makes an empty tokenizer
        reason = f"is {model.model}, whose tokenizer has no vocabulary: copy the tokenizer's files into that folder"
        raise ConfigError.for_key("model.model", reason)
    if not cuts:  # otherwise ms-swift sets the model's own limit, and refuses longer samples
        opened.max_length = None
    opened.set_mode("train")
    opened.packing = opened.padding_free = packs
    # ms-swift would read `<img>path</img>` in a text as an image, or replace it by <image>. It also
    # searches the rest of the line for the end of each <img>.
    opened._replace_image_tags = _return_inputs  # noqa: SLF001  # no public way
    if leaves_images_to_model(arguments.template):
        opened._post_encode = _return_inputs  # noqa: SLF001  # no public way
    set_media_token_ids(opened, processor)
    set_video_sampling(opened, template)
    opened._get_model = partial(_template_model, opened, arguments)  # noqa: SLF001  # no public way
    _stop_clock(opened, template)
    return opened


def render_prompt(template: Template) -> str:
    """Return a test question with its answer in a template's format; empty if that fails."""
    inputs = StdTemplateInputs.from_dict({"messages": [{"role": "user", "content": "?"}, _ANSWER]})
    try:
        template._preprocess_inputs(inputs)  # noqa: SLF001  # no public way
        template._swift_prepare_inputs(inputs)  # noqa: SLF001  # no public way
        parts, *_ = getattr(template, f"_{template.template_backend}_encode")(inputs)
    except Exception:  # noqa: BLE001  # an error about a record is reported when the record is read
        return ""
    return "".join(map(str, parts))


def _stop_clock(opened: Template, template: TemplateConfig) -> None:
    """
    Make a template write the date `template.today` in place of today's date.

    This replaces `datetime` in ms-swift's modules, which affects all templates in this process.

    Raises:
        ConfigError: `template.today` is not a date, is missing although the template writes one, or
            is set although the template writes none.
    """
    modules = [sys.modules[kind.__module__] for kind in type(opened).__mro__]
    dated = [one for one in modules if isinstance(getattr(one, "datetime", None), type)]
    name, meta, now = opened.template_meta.template_type, opened.template_meta, datetime.now()  # noqa: DTZ005  # as ms-swift
    try:
        day = datetime.fromisoformat(template.today or f"{now:%Y-%m-%d}")
    except ValueError:
        raise ConfigError.for_key("template.today", f"is not a date: write it as {now:%Y-%m-%d}") from None
    prompts = []
    for then in (now - timedelta(days=1000), now):
        _set_clock(dated, then)
        prompts.append(render_prompt(opened))
    _set_clock(dated, None)
    dates = {now.strftime(notation): day.strftime(notation) for notation in _DATES}
    rest = prompts[1].replace(template.system or "", "", 1)
    if writes := prompts[0] != prompts[1] or any(date in rest for date in dates):
        reason = f"is not set, but {name} writes today's date into prompts: set one date for the whole run, such as "
        reason += f"{now:%Y-%m-%d}"
    else:
        reason = f"is set, but {name} writes no date into prompts: remove the key"
    if writes == (template.today is None):
        raise ConfigError.for_key("template.today", reason)
    if not writes:
        return
    _set_clock(dated, day)
    for today, date in dates.items():
        for parts in filter(None, (meta.prefix, meta.system_prefix)):
            parts[:] = [one.replace(today, date) if isinstance(one, str) else one for one in parts]
        if template.system is None and meta.default_system:
            meta.default_system = meta.default_system.replace(today, date)


def _set_clock(modules: Sequence[Any], day: datetime | None) -> None:
    """Make `now`, `today` and `utcnow` return *day* in *modules*; None restores the real clock."""
    clock = dict.fromkeys(("now", "today", "utcnow"), staticmethod(lambda *_, **__: day))
    for module in modules:
        module.datetime = type("StoppedClock", (datetime,), clock) if day else datetime


def length_inputs(config: RunConfig, template: Template) -> Fingerprint:
    """Return all inputs on which a run's lengths depend under *template*, except the data."""
    arguments = template_arguments(config.model, config.template)
    inputs: dict[str, Value] = {
        "swift.loss_scale": arguments.loss_scale,
        **config_length_inputs(config),
        "model.model_type": swift_model_type(config.model),
        "template.template": arguments.template,
        "template.prompt": render_prompt(template),
    }
    folder = Path(config.model.model)
    for file in sorted({file for pattern in PROCESSING_FILES for file in folder.glob(pattern)}):
        inputs[f"model.{file.name}.sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    inputs["version.measuring"] = MEASURING_VERSION
    for package in _PROCESSING_PACKAGES:
        inputs[f"version.{package}"] = installed_version(package)
    for variable in PROCESSING_VARIABLES:
        inputs[f"environment.{variable}"] = os.environ.get(variable)
    return Fingerprint(inputs)


def _refuse_media_template(template: Template) -> None:
    """Raise ConfigError if a template reads media but its model is text-only."""
    reads_media = type(template).replace_tag is not Template.replace_tag
    if reads_media and not template.model_meta.is_multimodal:
        name = template.template_meta.template_type
        reason = f"is {name}, which is for images, videos or sound, but this model reads text only: name another"
        raise ConfigError.for_key("template.template", reason)


def _template_model(template: Template, arguments: RunArguments) -> Any:
    """
    Return a template's model, or a dummy without weights if the template has no model.

    Templates in loader processes have no model.
    """
    if template.model is None and template.dummy_model is None:
        with torch.device("meta"):
            template.dummy_model, _ = arguments.get_model_processor(return_dummy_model=True)
    return template.dummy_model if template.model is None else template.model


def _refuse_unknown_names(template: TemplateConfig) -> None:
    """Raise ConfigError for an agent template or a loss scale that ms-swift does not know."""
    known = ", ".join(sorted(agent_template_map))
    if template.agent_template is not None and template.agent_template not in agent_template_map:
        reason = f"is {template.agent_template}, but has to be one of {known}"
        raise ConfigError.for_key("template.agent_template", reason)
    strategy, *names = template.loss_scale.split("+")
    if strategy not in ALL_BASE_STRATEGY:
        names = [strategy, *names]
    if wrong := [name for name in names if name not in loss_scale_map]:
        strategies, weights = ", ".join(ALL_BASE_STRATEGY), ", ".join(sorted(loss_scale_map))
        reason = f"has {wrong[0]!r}, but has to be one of {strategies}, optionally with + and any of {weights}"
        raise ConfigError.for_key("template.loss_scale", reason)


def _return_inputs(_: Any, inputs: Any = None) -> Any:
    """
    Return *inputs* unchanged, or None by default; this replaces a method of a template.
    """
    return inputs
