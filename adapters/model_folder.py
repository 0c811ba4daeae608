"""What a model's folder says of it, read without torch and ms-swift."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from core.config import ModelConfig
from core.errors import ConfigError


def config_model_type(model: ModelConfig) -> str:
    """Return the `model_type` of the model's config.json; ConfigError if there is none to read."""
    path = Path(model.model) / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError):
        raise ConfigError.of(
            "model.model", f"{model.model} is no folder with a config.json that names a model_type"
        ) from None


def config_architecture(model: ModelConfig) -> str:
    """
    Return the class that the model's config.json names first, or its model type where it names
    none.
    """
    name = config_model_type(model)
    content = json.loads((Path(model.model) / "config.json").read_text(encoding="utf-8"))
    return str((content.get("architectures") or [name])[0])


def config_digest(model: ModelConfig) -> str:
    """
    Return the digest of what the model's config.json says, and of the Python code beside it that a
    run may execute; ConfigError if there is no config.json.
    """
    config_model_type(model)
    folder = Path(model.model)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    if model.trust_remote_code:
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
