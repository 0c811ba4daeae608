"""
Builds objects of frozen classes from a YAML document, by the types of the classes' fields.

A value of another type is a fault, and every fault names the path of its key.
"""

import contextlib
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError
from cattrs.gen import make_dict_structure_fn, make_mapping_structure_fn, override

from packplan.adapters.config.layers import expand_path, merge_sections
from packplan.core.config.keys import key_facts
from packplan.core.config.run import PathText
from packplan.core.errors import Fault

T = typing.TypeVar("T")

_origin: Callable[[Any], Any] = typing.get_origin  # takes annotations, for which mypy expects types

_list_of: Callable[[Any], Any] = list.__class_getitem__  # takes types that are known only at run time

_UNIONS = {types.UnionType, typing.Union}

Advise: typing.TypeAlias = Callable[[str, str], str]
"""Function that returns a text, with fault and remedy, about an unknown key of a section."""


TOO_LARGE = 10**12
"""Absolute value from which whole numbers are refused, since their products overflow 64 bits."""


def structure_document(
    document: Mapping[str, Any], kind: type[T], advise: Advise, *, required: Mapping[str, Any] = MappingProxyType({})
) -> tuple[T | None, list[Fault]]:
    """
    Build an object of a frozen class from a document; return it and the document's faults.

    A key with a fault has its default in the object. The object is None if it cannot be built even
    with those defaults.

    Args:
        document: Keys and sections of a YAML document.
        kind: Frozen class of the object.
        advise: Function that returns the fault and a remedy for a key that the class does not have.
        required: Stand-ins for faulty values of keys that have no default.
    """
    try:
        return _CONVERTER.structure(document, kind), []
    except ClassValidationError as error:
        found = list(_faults(error, "", advise))
    sound = _without_keys(document, {fault.path for fault in found})
    with contextlib.suppress(ClassValidationError):
        return _CONVERTER.structure(merge_sections(required, sound), kind), found
    return None, found


def _without_keys(document: Mapping[str, Any], paths: set[str], prefix: str = "") -> dict[str, Any]:
    return {
        key: _without_keys(value, paths, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in document.items()
        if f"{prefix}{key}" not in paths
    }


def _refuse(value: object, wanted: str) -> typing.NoReturn:
    raise ValueError(f"is {value!r}, but has to be {wanted}")


def _to_int(value: object, _: Any) -> int:
    if type(value) is not int:
        _refuse(value, "a whole number")
    if abs(value) >= TOO_LARGE:
        _refuse(value, f"a whole number between -{TOO_LARGE:,} and {TOO_LARGE:,}")
    return value


def _to_float(value: object, _: Any) -> float:
    if isinstance(value, (int, float, str)) and type(value) is not bool:  # YAML reads 1e-5 as a string
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    _refuse(value, "a finite number")


def _to_bool(value: object, _: Any) -> bool:
    if type(value) is not bool:
        _refuse(value, "true or false")
    return value


def _to_str(value: object, _: Any) -> str:
    if type(value) is date:  # YAML's type of 2026-11-28
        return value.isoformat()
    if type(value) is not str:
        _refuse(value, "a text")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        _refuse(value, "valid Unicode: remove an unpaired surrogate")
    return value


def _to_path(value: object, _: Any) -> str:
    return expand_path(_to_str(value, None)) or _refuse(value, "a path")


def _to_decimal(value: object, _: Any) -> Decimal:
    number = _to_float(value, None)
    with contextlib.suppress(InvalidOperation):  # exponents beyond those of a Decimal
        exact = Decimal(str(value))
        if number or not exact:  # exact arithmetic on 1e-999999999 takes all memory
            return exact
    _refuse(value, "0, or a number that a float does not round to 0")


def _to_strings(value: object, kind: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(item, str) and item for item in values):
        _refuse(value, "a text, or a list of texts")
    return tuple(_to_path(one, None) if kind == tuple[PathText, ...] else _to_str(one, None) for one in values)


def _to_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        _refuse(value, "a list of sections")
    return value


def _to_literal(value: object, wanted: Any) -> Any:
    choices = typing.get_args(wanted)
    if value not in choices or type(value) is not str:
        _refuse(value, f"one of {', '.join(map(str, choices))}")
    return value


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    for kind, hook in {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str, Decimal: _to_decimal}.items():
        converter.register_structure_hook(kind, hook)
    converter.register_structure_hook_func(lambda kind: kind == PathText, _to_path)
    converter.register_structure_hook_func(lambda kind: _origin(kind) is typing.Literal, _to_literal)
    converter.register_structure_hook_func(lambda kind: kind in (tuple[str, ...], tuple[PathText, ...]), _to_strings)
    converter.register_structure_hook_func(
        lambda kind: _origin(kind) in _UNIONS, lambda value, kind: _structure_union(converter, value, kind)
    )
    converter.register_structure_hook_func(lambda kind: _origin(kind) is Mapping, lambda value, _: value)
    converter.register_structure_hook_factory(
        lambda kind: _origin(kind) is dict,
        lambda kind: _mapping_hook(make_mapping_structure_fn(kind, converter), "a mapping, such as {name: value}"),
    )
    converter.register_structure_hook_func(
        lambda kind: _origin(kind) is tuple and attrs.has(typing.get_args(kind)[0]),
        lambda value, kind: tuple(converter.structure(_to_list(value), _list_of(typing.get_args(kind)[0]))),
    )

    def section_hook(kind: Any) -> Any:
        unread: Any = {one.name: override(omit=True) for one in attrs.fields(kind) if key_facts(one).set_by_command}
        plain = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **unread)
        return _mapping_hook(plain, "a section of keys")

    converter.register_structure_hook_factory(attrs.has, section_hook)
    return converter


def _mapping_hook(plain: Any, wanted: str) -> Any:
    """Return cattrs' hook *plain*, preceded by a check that the value is a mapping."""

    def structure(value: object, kind: Any) -> Any:
        if not isinstance(value, Mapping):
            _refuse(value, wanted)
        return plain(value, kind)

    return structure


def _structure_union(converter: cattrs.Converter, value: object, kind: Any) -> Any:
    """Convert a value whose type is a union of None, words of a literal and one other type."""
    kinds = typing.get_args(kind)
    words = [word for one in kinds for word in typing.get_args(one) if _origin(one) is typing.Literal]
    if (value is None and type(None) in kinds) or value in words:
        return value
    if words and int in kinds and type(value) is not int:
        _refuse(value, f"a whole number or {', '.join(words)}")
    return converter.structure(value, next(one for one in kinds if one is not type(None)))


_CONVERTER = _converter()


def _faults(error: ClassValidationError, prefix: str, advise: Advise) -> Iterator[Fault]:
    noted, others = error.group_exceptions()
    for inner, note in noted:
        path = f"{prefix}{note.name}"
        if isinstance(inner, ClassValidationError):
            yield from _faults(inner, f"{path}.", advise)
        elif isinstance(inner, IterableValidationError):
            for cause, place in inner.group_exceptions()[0]:
                if isinstance(cause, ClassValidationError):
                    yield from _faults(cause, f"{path}[{place.index}].", advise)
                else:
                    yield Fault(f"{path}[{place.index}]" if isinstance(place.index, int) else path, str(cause))
        elif isinstance(inner, KeyError):
            yield Fault(path, "is not set, and has no default: set it")
        else:
            yield Fault(path, str(inner))
    for other in others:
        assert isinstance(other, ForbiddenExtraKeysError)  # noqa: S101  # no class checks its fields together
        level = prefix.rstrip(".")
        yield from (Fault(f"{prefix}{key}", advise(key, level)) for key in sorted(map(str, other.extra_fields)))
