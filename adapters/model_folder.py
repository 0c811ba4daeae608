"""What a model's folder says of it, read without torch and ms-swift."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from packplan.adapters.hub_caches import download_command, is_id
from packplan.core.config import ModelConfig
from packplan.core.errors import ConfigError, Fault


def config_model_type(model: ModelConfig) -> str:
    """Return the `model_type` of the model's config.json; ConfigError if there is none to read."""
    return str(model_sizes(model)["model_type"])


def model_faults(model: ModelConfig) -> tuple[Fault, ...]:
    """Return what is wrong with the model's folder; nothing if its config.json can be read."""
    try:
        model_sizes(model)
    except ConfigError as error:
        return error.faults
    return ()


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


_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")
"""A weight's name up to the number of its layer: what comes before, and the number."""


def refuse_other_layers(model: ModelConfig) -> None:
    """
    Refuse a config.json that has more layers than the weights beside it: the others would train
    from random numbers, which transformers only warns of.

    Raises:
        ConfigError: It has.
    """
    sizes = model_sizes(model)
    sizes = sizes.get("thinker_config") or sizes
    part = sizes.get("text_config")
    text: Mapping[str, Any] = part if isinstance(part, Mapping) else sizes
    asked = text.get("num_hidden_layers")
    layers: dict[str, set[int]] = {}
    for name in _weight_names(Path(model.model)):
        if found := _NUMBERED.match(name):
            layers.setdefault(found[1], set()).add(int(found[2]))
    there = max(map(len, layers.values()), default=0)
    if isinstance(asked, int) and 0 < there < asked:
        reason = (
            f"{model.model} has a config.json of {asked} layers (num_hidden_layers) beside weights of {there}: "
            "take the config.json that belongs to the weights"
        )
        raise ConfigError.of("model.model", reason)


def _weight_names(folder: Path) -> Collection[str]:
    """Return the names of the weights in a folder's safetensors; none where there are none."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"]).keys()
        if whole.is_file():
            with whole.open("rb") as file:
                return dict(json.loads(file.read(int.from_bytes(file.read(8), "little")))).keys()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ConfigError.of("model.model", f"{folder} has weights whose header cannot be read: {error}") from error
    return ()


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
