"""
Facts about single model families, in `families.json`; all other facts are read from the model.

`swift` has the default model type and template of architectures for which ms-swift's registry has
several. `embeds` lists templates of ms-swift whose image embedding fails with the supported
transformers, so the model itself embeds images. `unshown` lists templates that declare packing, but
whose models have not been shown to keep packed samples apart. `unpacked` lists model types that
cannot be packed, as in docs/models.md. `complete` has keys to add to transformers' default
configuration of some model types, so that a model is built with all its kinds of layers.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

_AUDIO = frozenset({"audio_tower", "talker", "token2wav"})
"""Names of the modules of an Omni model that only process or generate audio."""


@cache
def _read_families() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8")))


def default_swift_types(architecture: str) -> tuple[str, str] | None:
    """Return the default model type and template of an architecture; None if it has no entry."""
    found = _read_families()["swift"].get(architecture)
    return None if found is None else (found[0], found[1])


def leaves_images_to_model(template: str) -> bool:
    """Return whether the model embeds images itself, because ms-swift's *template* cannot."""
    return template in _read_families()["embeds"]


def may_probe_template(template: str) -> bool:
    """Return whether models of a template may be probed, which is false for `unshown` templates."""
    return template not in _read_families()["unshown"]


def trained_part(model: Any) -> Any:
    """
    Return the module that is trained: the thinker of an Omni model, or else the whole model.

    The model may be wrapped by PEFT.
    """
    return getattr(model, "thinker", None) or model


def trained_config(config: Any) -> Any:
    """
    Return the part of a model's configuration that belongs to the result of `trained_part`.
    """
    return getattr(config, "thinker_config", None) or config


def is_audio_weight(name: str) -> bool:
    """Return whether the weight *name* of an Omni model is used only for audio."""
    return not _AUDIO.isdisjoint(name.split("."))


def missing_default_keys(model_type: str) -> dict[str, Any]:
    """Return keys and values to add to transformers' default configuration of *model_type*."""
    return dict(_read_families()["complete"].get(model_type, {}))
