"""
What lengths, and what a plan, depend on -> digest.

A fingerprint is a flat mapping of named inputs to JSON values, so that two of them can be compared
key by key and a person can read what changed. Lengths depend on everything that decides how a
record becomes tokens; a plan depends on the digest of the measured lengths and on its policy
(`core.policy`), and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import attrs

from packplan.core.config import CustomConfig, TemplateConfig
from packplan.core.errors import Difference

_ABSENT = "(absent)"

Value = str | int | bool | None


def _sorted(inputs: Mapping[str, Value]) -> dict[str, Value]:
    return {key: inputs[key] for key in sorted(inputs)}


@attrs.frozen
class Fingerprint:
    """
    Named inputs, and their digest.

    >>> Fingerprint({"b": 1, "a": "x"}).digest == Fingerprint({"a": "x", "b": 1}).digest
    True
    """

    inputs: Mapping[str, Value] = attrs.field(converter=_sorted)

    @property
    def digest(self) -> str:
        """SHA-256 hex digest of the inputs as canonical JSON."""
        text = json.dumps(dict(self.inputs), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, current: Fingerprint) -> tuple[Difference, ...]:
        """Return every key in which *current* differs from this one, by name."""
        keys = sorted({*self.inputs, *current.inputs})
        pairs = ((key, self.inputs.get(key, _ABSENT), current.inputs.get(key, _ABSENT)) for key in keys)
        # 1 == True in Python, but not in the canonical JSON.
        return tuple(Difference(key, a, b) for key, a, b in pairs if (type(a), a) != (type(b), b))


def configured_inputs(template: TemplateConfig, custom: CustomConfig, *, packing_length: int) -> dict[str, Value]:
    """
    Name what of a configuration lengths depend on, as far as it can be told without opening the
    model.

    Where the template truncates, the limit decides lengths; to raise, or not, decides none.

    Args:
        template: How a record becomes tokens.

        custom: How records are read.

        packing_length: Tokens of a pack; it decides lengths only where the template truncates.
    """
    cut = template.truncation_strategy if template.truncation_strategy in {"left", "right"} else None
    return {
        "custom.object_field_order": custom.object_field_order,
        "custom.use_summary": custom.use_summary,
        "custom.columns": json.dumps(dict(custom.columns), sort_keys=True) if custom.columns else None,
        "template.system": template.system,
        "template.agent_template": template.agent_template,
        "template.loss_scale": template.loss_scale,
        "template.max_pixels": template.max_pixels,
        **_set_videos(template),
        "template.truncation_strategy": cut,
        "packing_length": packing_length if cut else None,
    }


def _set_videos(template: TemplateConfig) -> dict[str, Value]:
    """Return how videos are sampled, as far as the run says."""
    keys = ("fps", "fps_min_frames", "fps_max_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels")
    named = {f"template.{key}": getattr(template, key) for key in keys if getattr(template, key) is not None}
    return {name: str(value) if isinstance(value, float) else value for name, value in named.items()}
