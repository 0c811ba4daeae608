"""YAML -> RunConfig, strictly: every fault at once, each with its path and remedy."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

import attrs
import cattrs
import yaml
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError
from cattrs.gen import make_dict_structure_fn

from core.config import REFUSED_TRAINING_KEYS, RunConfig, TrainingConfig, faults
from core.errors import ConfigError, Fault
from core.fusion import Mix
from core.rl_faults import rl_faults

SECTIONS = ("model", "template", "custom", "training")

RL_SECTIONS = ("policy", "grpo")

PLANNED_WITH: Mapping[str, Any] = types.MappingProxyType({"data_seed": int, "train_dataloader_shuffle": bool})
"""Settings of the trainer that decide what training consumes, with their types."""


def load_config(path: str | Path, trainer_fields: Mapping[str, Any] | None, *, rl: bool = False) -> RunConfig:
    """
    Read a run's YAML, and those that it extends.

    Args:
        path: The YAML; a relative `extends:` starts at its folder, all other relative paths at the working directory.

        trainer_fields: Settings that `training.` passes to the trainer, with their types. None is for those who only
            look at plans, and have not loaded ms-swift: what is not of this project is taken as it is.

        rl: Whether the run is one of reinforcement learning; others have no `policy:` and no `grpo:`.

    Raises:
        ConfigError: All faults of the configuration.
    """
    return parse_config(_merged(Path(path), ()), str(path), trainer_fields, rl=rl)


def parse_config(
    document: Mapping[str, Any], source: str, trainer_fields: Mapping[str, Any] | None, *, rl: bool = False
) -> RunConfig:
    """Build a configuration from a parsed document; ConfigError with all its faults."""
    found: list[Fault] = []
    sections: dict[str, dict[str, Any]] = {}
    for name in SECTIONS + RL_SECTIONS:
        value = document.get(name)
        if value is not None and not isinstance(value, dict):
            found.append(Fault(name, f"is {value!r}, but has to be a section of keys"))
        sections[name] = dict(value) if isinstance(value, dict) else {}
    training = sections["training"]
    if training.get("packing_mode", "") is None:
        del training["packing_mode"]
    own = {field.name for field in attrs.fields(TrainingConfig)} - {"trainer"}
    passed = {key: training.pop(key) for key in list(training) if key not in own}
    if trainer_fields is None:
        trainer_fields = {**dict.fromkeys(passed, Any), **PLANNED_WITH}
    checked, key_faults = _trainer_keys(passed, trainer_fields, own)
    found += key_faults
    training["trainer"] = checked

    config: RunConfig | None = None
    others = {key: value for key, value in document.items() if key not in sections}
    if not rl:
        found += [
            Fault(
                name, "is of reinforcement learning (python -m app.rl), which this command is not: remove the section"
            )
            for name in RL_SECTIONS
            if name in document
        ]
    try:
        config = _CONVERTER.structure({**others, **sections}, RunConfig)
    except ClassValidationError as error:
        found += _faults(error, "")
    else:
        found += faults(config)
        found += rl_faults(config) if rl else ()
    if found or config is None:
        raise ConfigError(source, tuple(found))
    return config


def load_mix(path: str | Path) -> Mix:
    """
    Read a mix of data sets, `custom.fusion_config`.

    Raises:
        ConfigError: All faults of the YAML; those that the data decide are `core.fusion.mix_faults`.
    """
    try:
        return _CONVERTER.structure(_merged(Path(path), ()), Mix)
    except ClassValidationError as error:
        raise ConfigError(str(path), tuple(_faults(error, ""))) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, which YAML would resolve silently."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen and key != "<<":
            problem = f"the key {key!r} is written twice (first in line {seen[key]})"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _merged(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    source = str(path)
    if path.resolve() in above:
        raise ConfigError(source, (Fault("extends", "comes back to a file that extends this one: break the circle"),))
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  # a SafeLoader
    except OSError as error:
        reason = f"cannot be read ({error.strerror}): name an existing YAML"
        raise ConfigError(source, (Fault("", reason),)) from None
    except UnicodeDecodeError:
        raise ConfigError(source, (Fault("", "is not UTF-8 text"),)) from None
    except yaml.YAMLError as error:
        raise ConfigError(source, (Fault("", f"is no valid YAML: {' '.join(str(error).split())}"),)) from None
    if not isinstance(document, dict):
        raise ConfigError(source, (Fault("", "has to hold sections, or keys and their values, but holds none"),))
    base = document.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise ConfigError(source, (Fault("extends", f"is {base!r}, but has to be the path of a YAML"),))
    return _overlaid(_merged(path.parent / base, (*above, path.resolve())), document)


def _overlaid(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _overlaid(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _refuse(value: object, wanted: str) -> typing.NoReturn:
    message = f"is {value!r}, but has to be {wanted}"
    raise ValueError(message)


def _to_int(value: object, _: Any) -> int:
    if type(value) is not int:
        _refuse(value, "a whole number")
    return value


def _to_float(value: object, _: Any) -> float:
    if type(value) in {int, float}:
        return float(typing.cast("float", value))
    if isinstance(value, str):  # YAML reads 1e-5 as a string
        try:
            return float(value)
        except ValueError:
            pass
    _refuse(value, "a number")


def _to_bool(value: object, _: Any) -> bool:
    if type(value) is not bool:
        _refuse(value, "true or false")
    return value


def _to_str(value: object, _: Any) -> str:
    if type(value) is not str:
        _refuse(value, "a text")
    return value


def _to_decimal(value: object, _: Any) -> Decimal:
    if type(value) in {int, float, str}:
        try:
            return Decimal(str(value))
        except InvalidOperation:
            pass
    _refuse(value, "a number")


def _to_strings(value: object, _: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(item, str) and item for item in values):
        _refuse(value, "a text, or a list of texts")
    return tuple(values)


def _to_literal(value: object, wanted: Any) -> Any:
    choices = typing.get_args(wanted)
    if value not in choices or type(value) is not str:
        _refuse(value, f"one of {', '.join(map(str, choices))}")
    return value


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    hooks = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str, Decimal: _to_decimal}
    for kind, hook in hooks.items():
        converter.register_structure_hook(kind, hook)
    converter.register_structure_hook_func(lambda kind: _origin(kind) is typing.Literal, _to_literal)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _to_strings)
    converter.register_structure_hook_func(
        lambda kind: _origin(kind) in {types.UnionType, typing.Union},
        lambda value, kind: None if value is None else converter.structure(value, _without_none(kind)),
    )
    converter.register_structure_hook_func(lambda kind: _origin(kind) is Mapping, lambda value, _: value)
    converter.register_structure_hook_factory(attrs.has, lambda cls: _section_hook(cls, converter))
    return converter


def _section_hook(cls: Any, converter: cattrs.Converter) -> Any:
    """Return what structures a section: of keys, and of nothing else."""
    plain = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)

    def structure(value: object, kind: Any) -> Any:
        if not isinstance(value, Mapping):
            _refuse(value, "a section of keys")
        return plain(value, kind)

    return structure


def _without_none(kind: Any) -> Any:
    (inner,) = (argument for argument in typing.get_args(kind) if argument is not type(None))
    return inner


_CONVERTER = _converter()


def _faults(error: ClassValidationError, prefix: str) -> Iterator[Fault]:
    noted, others = error.group_exceptions()
    for inner, note in noted:
        path = f"{prefix}{note.name}"
        if isinstance(inner, ClassValidationError):
            yield from _faults(inner, f"{path}.")
        elif isinstance(inner, IterableValidationError):
            for cause, place in inner.group_exceptions()[0]:
                if isinstance(cause, ClassValidationError):
                    yield from _faults(cause, f"{path}[{place.index}].")
                else:
                    yield Fault(path, str(cause))
        elif isinstance(inner, KeyError):
            yield Fault(path, "is not set, and has no default: set it")
        else:
            yield Fault(path, str(inner))
    for other in others:
        if isinstance(other, ForbiddenExtraKeysError):
            known = [field.name for field in attrs.fields(other.cl)] if other.cl else []
            yield from (Fault(f"{prefix}{key}", _unknown(key, known)) for key in sorted(map(str, other.extra_fields)))
        elif isinstance(other, KeyError):
            yield Fault(f"{prefix}{other.args[0]}", "is not set, and has no default: set it")
        else:
            yield Fault(prefix.rstrip("."), str(other))


def _unknown(key: str, known: typing.Iterable[str]) -> str:
    close = get_close_matches(key, list(known), n=1)
    return f"is no known key: {f'did you mean {close[0]}?' if close else 'remove it'}"


def _trainer_keys(
    passed: Mapping[str, Any], fields: Mapping[str, Any], own: set[str]
) -> tuple[dict[str, Any], list[Fault]]:
    checked, found = {}, []
    for key, value in passed.items():
        path = f"training.{key}"
        if key in REFUSED_TRAINING_KEYS:
            found.append(Fault(path, REFUSED_TRAINING_KEYS[key]))
        elif key not in fields:
            found.append(Fault(path, _unknown(str(key), [*own, *fields])))
        else:
            try:
                checked[key] = _trainer_value(value, fields[key])
            except ValueError as error:
                found.append(Fault(path, str(error)))
    return checked, found


def _trainer_value(value: Any, kind: Any) -> Any:
    """Return *value* as the trainer's field of type *kind* takes it; ValueError if it cannot."""
    kinds = set(_flat(kind))
    if Any in kinds or value is None or type(value) in kinds:
        return value
    if float in kinds and type(value) in {int, str}:
        return _to_float(value, None)
    if isinstance(value, str) and any(isinstance(k, type) and issubclass(k, Enum) for k in kinds):
        return value
    choices = {type(None): "nothing", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    names = [choices.get(k, "a list" if k is list else "a section") for k in kinds if k is not type(None)]
    _refuse(value, " or ".join(sorted(set(names))))


def _flat(kind: Any) -> Iterator[Any]:
    origin = typing.get_origin(kind)
    if origin in {types.UnionType, typing.Union}:
        for argument in typing.get_args(kind):
            yield from _flat(argument)
    elif origin is typing.Literal:
        yield from {type(choice) for choice in typing.get_args(kind)}
    else:
        yield origin or kind
