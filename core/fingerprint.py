"""
Fingerprints: named inputs of stored lengths or of a plan, with a digest.

A fingerprint is a flat mapping of names to JSON values. Two of them are compared key by key, and
the difference is readable. Lengths depend on everything that decides how a record becomes tokens. A
plan depends on the digest of the measured lengths and on its policy (`core.policy`) alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import attrs

from packplan.core.errors import Difference

_ABSENT = "(absent)"

Value = str | int | bool | None


def _sorted(inputs: Mapping[str, Value]) -> dict[str, Value]:
    return {key: inputs[key] for key in sorted(inputs)}


def field_differences(first: attrs.AttrsInstance, second: attrs.AttrsInstance) -> tuple[Difference, ...]:
    """Return the fields in which two values of the same class differ."""
    names = (field.name for field in attrs.fields(type(first)))
    found = (Difference(name, getattr(first, name), getattr(second, name)) for name in names)
    return tuple(one for one in found if one.stored != one.current)


@attrs.frozen
class Fingerprint:
    """
    Named inputs and their digest.

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
