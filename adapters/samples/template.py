"""ms-swift's template of a model, opened without the model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

from swift import get_model_processor, get_template
from swift.template import Template

from adapters.model_folder import config_model_type
from core.config import ModelConfig, TemplateConfig
from core.errors import ConfigError

TYPES = {
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl"),
    "qwen2": ("qwen2", "qwen2_5"),
    "qwen3": ("qwen3", "qwen3"),
}
"""
`model_type` of a config.json -> ms-swift's model type and template, which a local folder does not
tell it.
"""


def refuse_remote_code(model: ModelConfig) -> None:
    """
    Refuse a folder that brings Python code, unless the user trusts it; ms-swift would run it
    unasked.

    Raises:
        ConfigError: A file of the folder names code (`auto_map`).
    """
    if model.trust_remote_code:
        return
    for file in sorted(Path(model.model).glob("*.json")):
        # A file of weights' places is large, and names no code.
        if not file.name.endswith(".index.json") and b'"auto_map"' in file.read_bytes():
            reason = f"brings Python code ({file.name} has auto_map): read it, then set model.trust_remote_code: true"
            raise ConfigError.of("model.model", f"{model.model} {reason}")


def swift_types(model: ModelConfig, template: TemplateConfig) -> tuple[str | None, str | None]:
    """Return ms-swift's model type and template type; None where it has to find out itself."""
    known = TYPES.get(config_model_type(model), (None, None))
    return model.model_type or known[0], template.template or known[1]


def open_template(model: ModelConfig, template: TemplateConfig, *, packing_length: int) -> Template:
    """
    Build ms-swift's template, in training mode, without loading the model.

    It truncates samples only where `truncation_strategy` asks for it; long samples stay whole.

    Args:
        model: What is trained: its tokenizer and processor are read.

        template: How a record becomes tokens.

        packing_length: Tokens of a pack; the limit where the template truncates.
    """
    refuse_remote_code(model)
    model_type, template_type = swift_types(model, template)
    cuts = template.truncation_strategy in {"left", "right"}
    try:
        _, processor = get_model_processor(model.model, load_model=False, model_type=model_type)
        opened = get_template(
            processor,
            template.system,
            packing_length if cuts else None,
            template_type=template_type,
            truncation_strategy=template.truncation_strategy or "raise",
            max_pixels=template.max_pixels,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError.of("model.model", f"{model.model} cannot be opened by ms-swift: {error}") from error
    if not cuts:  # ms-swift fills in the model's own limit, and would refuse what is longer
        opened.max_length = None
    opened.set_mode("train")
    # ms-swift would read `<img>path</img>` in a text as an image, or put an <image> in its place;
    # and looks for the end of each <img> through the rest of the line.
    opened._replace_image_tags = _keep_text  # noqa: SLF001  # no public way
    # The Qwen-VL template knows the ids of the released vocabularies only; with another one, images
    # would stay a single token, silently.
    for name in ("image_token_id", "video_token_id"):
        if hasattr(opened, name) and hasattr(processor, name):
            setattr(opened, name, getattr(processor, name))
    return opened


def _keep_text(_: Any) -> None:
    """Leave the texts of a record as they are."""
