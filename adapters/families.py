"""
Facts about single model families, in `families.json`; all other facts are read from the model.

`swift`: architecture -> default model type and template of ms-swift, where its registry lists
several. `embeds`: templates of ms-swift whose own image embedding fails with this transformers,
while the model embeds images itself. `unshown`: templates that declare packing, but whose models
were never shown to keep packed samples apart. `unpacked`: model types that do not pack, by
docs/models.md. `complete`: model type -> keys that transformers' default configuration lacks, to
build a model with all its kinds of layers.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

_AUDIO = frozenset({"audio_tower", "talker", "token2wav"})
"""Modules of an Omni model that only process or make audio, by name."""


@cache
def _read_families() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8")))


def default_swift_types(architecture: str) -> tuple[str, str] | None:
    """Return ms-swift's default model type and template if it has several; None otherwise."""
    found = _read_families()["swift"].get(architecture)
    return None if found is None else (found[0], found[1])


def leaves_images_to_model(template: str) -> bool:
    """Return whether the model embeds images itself, because ms-swift's *template* cannot."""
    return template in _read_families()["embeds"]


def may_probe_template(template: str) -> bool:
    """Return whether models of a template may be probed; false if they were never shown to pack."""
    return template not in _read_families()["unshown"]


def trained_part(model: Any) -> Any:
    """
    Return the module of a model that is trained: the thinker of an Omni model, else the model.

    The model may be wrapped by PEFT.
    """
    return getattr(model, "thinker", None) or model


def trained_config(config: Any) -> Any:
    """
    Return the configuration of the module that `trained_part` returns, from that of the model.
    """
    return getattr(config, "thinker_config", None) or config


def is_audio_weight(name: str) -> bool:
    """Return whether a weight of an Omni model serves only audio, by its name."""
    return not _AUDIO.isdisjoint(name.split("."))


def missing_default_keys(model_type: str) -> dict[str, Any]:
    """Return the keys, with values, that the default configuration of *model_type* lacks."""
    return dict(_read_families()["complete"].get(model_type, {}))
