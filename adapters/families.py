"""
What has to be known of single families of models, in `families.json`; all else is read off the
model.

`swift`: architecture -> ms-swift's model type and template, where its registry names several and
one is meant by default. `embeds`: templates of ms-swift whose own way to embed images fails with
this transformers, while the model embeds them itself. `unshown`: templates that declare packing,
whose models have not been shown to pack. `unpacked`: model types of which docs/models.md says that
a small model does not pack. `complete`: model type -> keys without which transformers'
own default configuration builds no model, or none that shows its kinds of layers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_THINKER = "thinker"
"""Name of the part of an Omni model that reads text, images and sound, and writes text."""

_SOUND = frozenset({"audio_tower", "talker", "token2wav"})
"""Names of the parts of an Omni model that sound alone reaches, or that make it."""


@cache
def _families() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8")))


def settled_types(architecture: str) -> tuple[str, str] | None:
    """Return the model type and template that are meant by default; None if nothing says so."""
    found = _families()["swift"].get(architecture)
    return None if found is None else (found[0], found[1])


def embeds_itself(template: str) -> bool:
    """Return whether the model embeds images, and not its template."""
    return template in _families()["embeds"]


def is_shown(template: str) -> bool:
    """Return whether a template's model may be asked if it packs."""
    return template not in _families()["unshown"]


def is_unpacked(model_type: str) -> bool:
    """Return whether a small model of this type is known not to pack, by docs/models.md."""
    return model_type in _families()["unpacked"]


def trained_part(model: Any) -> Any:
    """
    Return the part of a model that reads text and images, and is trained: the thinker of one that
    also speaks, else the model itself. Adapters around it do not matter.
    """
    thinker = getattr(model, _THINKER, None)
    return model if thinker is None else thinker


def trained_config(config: Any) -> Any:
    """Return the configuration of `trained_part`."""
    part = getattr(config, f"{_THINKER}_config", None)
    return config if part is None else part


def hears_or_speaks(name: str) -> bool:
    """
    Return whether a weight of a model with a thinker is one that sound alone reaches, or that makes
    sound.
    """
    return not _SOUND.isdisjoint(name.split("."))


def completed(model_type: str) -> dict[str, Any]:
    """Return what completes transformers' default configuration of a model type."""
    return dict(_families()["complete"].get(model_type, {}))
