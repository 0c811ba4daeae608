"""
Fingerprints of stored lengths and plans: named inputs with a digest.

Frozen values are also converted to plain JSON values here, and sealed by a digest.

A fingerprint is a flat mapping of names to JSON values. Two of them are compared key by key, and
the difference is readable. Lengths depend on everything that decides how a record becomes tokens. A
plan depends on the digest of the measured lengths and on its policy (`core.policy`) alone.

A stored value is accepted only if every key is known, every key without a default is there, and
every value has its type. So a damaged file is refused with the name of the key that is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import attrs
import numpy as np

from packplan.core.errors import Difference

T = TypeVar("T")

SEAL = "sha256"
"""Key under which sealed values hold their digest."""

STATE_FORMAT = 3
"""
Format of sealed states; the first had no number. Raise it with each field that a state gets or
loses. A new field has a default, which older states take.
"""

_RENAMED = {
    "told": "changeable",
    "shards": "readers",
    "next_shard": "next_reader",
    "shards_per_rank": "readers_per_rank",
}
"""Key of an older format -> its name today."""

_FORMAT = "format"

_ABSENT = "(absent)"

Value = str | int | bool | None


def json_digest(value: Any) -> str:
    """
    Return the SHA-256 hex digest of a value as canonical JSON.

    >>> json_digest({"b": 1, "a": (2,)}) == json_digest({"a": [2], "b": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sort_inputs(inputs: Mapping[str, Value]) -> dict[str, Value]:
    return {key: inputs[key] for key in sorted(inputs)}


def field_differences(first: attrs.AttrsInstance, second: attrs.AttrsInstance) -> tuple[Difference, ...]:
    """Return the fields in which two values of one class differ."""
    names = (field.name for field in attrs.fields(type(first)))
    found = (Difference(name, getattr(first, name), getattr(second, name)) for name in names)
    return tuple(one for one in found if one.stored != one.current)


@attrs.frozen
class Fingerprint:
    """
    Named inputs of stored lengths or of a plan, and a digest of these inputs.

    >>> Fingerprint({"b": 1, "a": "x"}).digest == Fingerprint({"a": "x", "b": 1}).digest
    True
    """

    inputs: Mapping[str, Value] = attrs.field(converter=_sort_inputs)

    @property
    def digest(self) -> str:
        """SHA-256 hex digest of the inputs as canonical JSON."""
        return json_digest(dict(self.inputs))

    def differences(self, current: Fingerprint) -> tuple[Difference, ...]:
        """Return the inputs that differ between this fingerprint and *current*, by name."""
        keys = sorted({*self.inputs, *current.inputs})
        pairs = ((key, self.inputs.get(key, _ABSENT), current.inputs.get(key, _ABSENT)) for key in keys)
        # 1 == True in Python, but not in the canonical JSON.
        return tuple(Difference(key, a, b) for key, a, b in pairs if (type(a), a) != (type(b), b))


@attrs.frozen
class RunIdentity:
    """Model, loss and settings of a run, which decide whether it may resume a checkpoint."""

    fixed: Fingerprint = Fingerprint({})
    """Settings that a resumed run has to share, by key."""

    changeable: Fingerprint = Fingerprint({})
    """Settings that a resumed run may change, by key; changes are reported."""


NO_IDENTITY = RunIdentity()
"""Identity of a run whose model and settings are not known."""


def to_plain(value: attrs.AttrsInstance) -> dict[str, Any]:
    """Return a frozen attrs value as dicts, lists, strings and numbers."""
    return attrs.asdict(value, value_serializer=lambda _, __, held: held.tolist() if _is_array(held) else held)


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values with their format version and their digest."""
    held = {**values, _FORMAT: STATE_FORMAT}
    return {**held, SEAL: json_digest(held)}


def unseal(values: object) -> dict[str, Any]:
    """
    Check the digest and the format of sealed values, and return the plain values.

    Raises:
        ValueError: The values have no digest, or not the digest of their content, or a newer
            release of this project wrote them.
    """
    if not isinstance(values, Mapping) or SEAL not in values:
        raise ValueError(f"it has no {SEAL}")
    held = {key: value for key, value in values.items() if key != SEAL}
    if json_digest(held) != values[SEAL]:
        raise ValueError("its digest differs from the saved one")
    if (number := held.pop(_FORMAT, 1)) > STATE_FORMAT:
        message = f"a newer Packplan wrote it (format {number}; this one reads up to {STATE_FORMAT}): install that one"
        raise ValueError(message)
    return held


def from_plain(kind: type[T], value: object) -> T:
    """
    Return the frozen value whose plain values `to_plain` returned.

    Args:
        kind: Class of the value, an attrs class.
        value: Result of `to_plain`, perhaps read from JSON.

    Raises:
        ValueError: A key without a default is missing, one is unknown, or a value has another type
            or is out of range.
    """
    read: T = _as_type(kind, value, "the state")
    return read


def _as_type(kind: Any, value: Any, name: str) -> Any:
    origin, kinds = get_origin(kind), get_args(kind)
    if attrs.has(kind):
        fields = {field.name: field.type for field in attrs.fields(attrs.resolve_types(kind))}
        values: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
        held = {_RENAMED.get(key, key): one for key, one in values.items()}
        needed = {field.name for field in attrs.fields(kind) if field.default is attrs.NOTHING}
        if other := sorted((fields.keys() ^ set(map(str, held))) - (fields.keys() - needed)):
            message = f"{name} has no {other[0]}" if other[0] in fields else f"{name} has the unknown key {other[0]}"
            raise ValueError(message)
        return kind(**{key: _as_type(fields[key], one, f"{name}.{key}") for key, one in held.items()})
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_as_type(kinds[0], one, f"{name}[{number}]") for number, one in enumerate(value))
    if origin is np.ndarray and isinstance(value, list):
        return [_as_type(int, one, f"{name}[{number}]") for number, one in enumerate(value)]
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {_as_type(kinds[0], key, name): _as_type(kinds[1], one, f"{name}.{key}") for key, one in value.items()}
    wanted = kinds if origin is UnionType else (kind,)
    if Any not in wanted and type(value) not in wanted:
        names = " or ".join(getattr(one, "__name__", str(one)) for one in wanted)
        raise ValueError(f"{name} is {value!r:.80}, but has to be {names}")
    return value


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)
