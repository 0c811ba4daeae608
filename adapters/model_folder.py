"""What a model's folder says of it, read without torch and ms-swift."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.config import ModelConfig
from core.errors import ConfigError


def config_model_type(model: ModelConfig) -> str:
    """Return the `model_type` of the model's config.json; ConfigError if there is none to read."""
    return str(model_sizes(model)["model_type"])


def model_sizes(model: ModelConfig) -> Mapping[str, Any]:
    """
    Return the content of the model's config.json; ConfigError if there is none that names a
    `model_type`.
    """
    path = Path(model.model) / "config.json"
    try:
        sizes: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError.of(
            "model.model", f"{model.model} is no folder with a config.json that names a model_type"
        ) from None
    return sizes
