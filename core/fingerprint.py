"""
Fingerprints of stored lengths and plans: named inputs and a digest of these inputs.

The module also converts frozen values to plain JSON values, and adds a digest to stored values (a
seal).

A fingerprint is a flat mapping of names to JSON values. Two fingerprints are compared key by key,
so that a message can name the key that differs. Lengths depend on everything that decides how a
record becomes tokens. A plan depends only on the digest of the measured lengths and on the plan
policy (`core.policy`).

A stored value is accepted only if every key is known, no key without a default is missing, and
every value has the right type. The error about a damaged file can therefore name the key at fault.
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
"""Key of the digest in sealed values."""

STATE_FORMAT = 3
"""
Version of the format of sealed states. Raise it whenever a field of a state is added or removed.
States of the first version store no number. A new field needs a default, which is used for older
states.
"""

_RENAMED = {
    "told": "changeable",
    "shards": "readers",
    "next_shard": "next_reader",
    "shards_per_rank": "readers_per_rank",
}
"""Key of an older format -> current name of the key."""

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
    """Return the fields whose values differ between two objects of one class."""
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
        """Return the inputs that differ between this fingerprint and *current*, sorted by name."""
        keys = sorted({*self.inputs, *current.inputs})
        pairs = ((key, self.inputs.get(key, _ABSENT), current.inputs.get(key, _ABSENT)) for key in keys)
        # 1 == True in Python, but not in the canonical JSON.
        found = ((key, a, b) for key, a, b in pairs if (type(a), a) != (type(b), b))
        # An absent value is reported as unset, except beside an unset value.
        return tuple(
            Difference(key, *(None if value == _ABSENT and None not in {a, b} else value for value in (a, b)))
            for key, a, b in found
        )


@attrs.frozen
class RunIdentity:
    """
    Model, loss and settings of a run; they decide whether the run may resume from a checkpoint.
    """

    fixed: Fingerprint = Fingerprint({})
    """Settings that have to be the same in a resumed run, by key."""

    changeable: Fingerprint = Fingerprint({})
    """Settings that a resumed run may change, by key. Each change is logged."""


NO_IDENTITY = RunIdentity()
"""Identity of a run whose model and settings are unknown."""


def to_plain(value: attrs.AttrsInstance) -> dict[str, Any]:
    """Convert a frozen attrs value to dicts, lists, strings and numbers."""
    return attrs.asdict(
        value, value_serializer=lambda _, __, held: held.tolist() if isinstance(held, np.ndarray) else held
    )


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values with the format version and a digest added."""
    held = {**values, _FORMAT: STATE_FORMAT}
    return {**held, SEAL: json_digest(held)}


def unseal(values: object) -> dict[str, Any]:
    """
    Check the digest and the format of sealed values, and return the plain values.

    Raises:
        ValueError: The digest is missing or does not match the values, or a newer Packplan wrote
            them.
    """
    if not isinstance(values, Mapping) or SEAL not in values:
        raise ValueError(f"it is not a dict with the key {SEAL}")
    held = {key: value for key, value in values.items() if key != SEAL}
    if json_digest(held) != values[SEAL]:
        raise ValueError("its digest differs from the saved one")
    if (number := held.pop(_FORMAT, 1)) > STATE_FORMAT:
        message = f"a newer Packplan wrote it (format {number}; this one reads up to {STATE_FORMAT}): update Packplan"
        raise ValueError(message)
    return held


def from_plain(kind: type[T], value: object) -> T:
    """
    Restore a frozen value from the plain values that `to_plain` returned.

    Args:
        kind: Class of the value, an attrs class.
        value: Result of `to_plain`, perhaps read from JSON.

    Raises:
        ValueError: A key without a default is missing, a key is unknown, or a value has the wrong
            type or is out of range.
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
