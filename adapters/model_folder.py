"""What a model's folder says of it, read without torch and ms-swift."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.hub_caches import download_command, is_id
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
        if is_id(model.model):
            reason = (
                f"is {model.model}, which is no folder here, and no local cache holds it: download it with "
                f"`{download_command(model.model, 'model')}`, or set model.download: true"
            )
            raise ConfigError.of("model.model", reason) from None
        raise ConfigError.of(
            "model.model", f"{model.model} is no folder with a config.json that names a model_type"
        ) from None
    return sizes


def config_architecture(model: ModelConfig) -> str:
    """
    Return the class that the model's config.json names first, or its model type where it names
    none.
    """
    content = model_sizes(model)
    return str((content.get("architectures") or [content["model_type"]])[0])


def config_digest(model: ModelConfig) -> str:
    """
    Return the digest of what the model's config.json says, and of the Python code beside it that a
    run may execute; ConfigError if there is no config.json.
    """
    digest = hashlib.sha256(json.dumps(model_sizes(model), sort_keys=True).encode())
    if model.trust_remote_code:
        for file in sorted(Path(model.model).glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
