"""
Reads YAML files into one document.

A file's values replace the values of the file that it extends. Values of the command line replace
the values of all files.
"""

import os
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from packplan.adapters.files import read_text, require_shallow
from packplan.core.errors import ConfigError, Fault
from packplan.core.samples.urls import is_url

_VARIABLE = re.compile(r"\$\{([^}]*)\}")

_LONGEST_NAME, _MOST_BITS = 255, 64
"""Largest number of bytes in a file's name, and of bits in a whole number."""


_BRACKETS = {
    "mapping": '{ } is a mapping, not a text: put quotes around it, as "{{ x }}"',
    "sequence": "[ ] is a list, not a text: put quotes around it",
}
"""For each kind of YAML node that cannot be a key, the end of the message that refuses it."""


def read_document(path: Path) -> dict[str, Any]:
    """
    Read a YAML file, and merge it over the files that it extends.

    Args:
        path: YAML file.

    Raises:
        ConfigError: A file cannot be read, is not a YAML mapping, or extends itself.
    """
    documents: dict[Path, dict[str, Any]] = {}
    extending: Path | None = None
    below: Path | None = path
    while below is not None:
        path = below
        try:
            document = _read_yaml(path, "the run's YAML" if extending is None else "a YAML")
        except ValueError as error:
            if extending is not None:
                raise _refusal(extending, f"names {path}, which {error}", key="extends") from None
            raise _refusal(path, str(error)) from None
        if not isinstance(document, dict):
            raise _refusal(path, "has to be a mapping of keys to values, but is not")
        extending = path
        if path.resolve() in documents:
            raise _refusal(path, "names a file that extends this one: remove extends from one of them", key="extends")
        base, documents[path.resolve()] = document.pop("extends", None), document
        if base is not None and not isinstance(base, str):
            raise _refusal(path, f"is {base!r}, but has to be the path of a YAML", key="extends")
        try:
            below = None if base is None else path.parent / expand_path(base)
        except ValueError as error:
            raise _refusal(path, str(error), key="extends") from None
    return reduce(merge_sections, reversed(documents.values()))


def _read_yaml(path: Path, wanted: str) -> Any:
    """
    Return the value of a YAML file; ValueError with the reason if the file cannot be used.

    If *path* is a folder, the message advises to name *wanted*.
    """
    if path.is_dir():
        found = [*path.glob("*.yaml"), *path.glob("*.yml")]
        raise ValueError(f"is a folder: name {wanted}{f', such as {found[0]}' if len(found) == 1 else ''}")
    return _parse_yaml(read_text(path))


def _refusal(source: Path, reason: str, *, key: str = "") -> ConfigError:
    return ConfigError(str(source), (Fault(key, reason),))


def apply_overrides(document: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """
    Return *document* with the command line's values, and without keys that are null.

    Args:
        document: Content of a YAML.
        overrides: Values of single keys, each as `section.key=value`; null unsets a key.

    Raises:
        ConfigError: Some overrides are not written as `section.key=value`, or their values are not
            valid YAML; the error lists them.
    """
    result, found = merge_sections({}, document), []
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals or not all(key.split(".")):
            found.append(Fault(text, "is not an override: write section.key=value"))
            continue
        try:
            layer = _parse_yaml(written)
        except ValueError as error:
            found.append(Fault(key, str(error)))
            continue
        for part in reversed(key.split(".")):
            layer = {part: layer}
        result = merge_sections(result, layer)
    if found:
        raise ConfigError("the command line", tuple(found))
    return result


def expand_path(path: str) -> str:
    """
    Return *path* with `~` or `~name` at its start and each `${NAME}` expanded.

    `~` and `~name` become home folders. `${NAME}` becomes the value of an environment variable.

    Raises:
        ValueError: The user or the variable does not exist, or a name in the path is invalid.
    """
    if path.startswith("~") and (home := os.path.expanduser(path)) == path:  # noqa: PTH111  # it takes no ~name apart
        user = path.partition("/")[0]
        message = (
            f"is {path!r}, but there is no user {user} here: write the full path, or ./{path} for a folder of this name"
        )
        raise ValueError(message)
    path = home if path.startswith("~") else path
    if "\0" in path or (not is_url(path) and any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.split("/"))):
        raise ValueError(f"is {path!r}, which has a NUL, or a name of over {_LONGEST_NAME} bytes: write another path")
    for name in _VARIABLE.findall(path):
        if name not in os.environ:
            raise ValueError(f"is {path!r}, but the variable {name} is not set: export it, or write the full path")
    return _VARIABLE.sub(lambda found: os.environ[found[1]], path)


class _Loader(yaml.SafeLoader):
    """
    SafeLoader that refuses repeated keys, keys that are not texts, and whole numbers above 64 bits.

    PyYAML would silently use the last value of a repeated key.
    """


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            what = _BRACKETS.get(key_node.id, f"{key_node.value} is not a text: put quotes around it")
            raise yaml.constructor.ConstructorError(None, None, f"the key {what}", key_node.start_mark)
        if key in seen and key != "<<":
            problem = f"the key {key!r} is written twice (first in line {seen[key]})"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    # Python refuses to parse whole numbers of thousands of digits.
    number: int = loader.construct_yaml_int(node) if len(node.value) <= 2 * _MOST_BITS else 2**_MOST_BITS
    if number.bit_length() > _MOST_BITS:
        problem = f"the number {node.value:.40} has more than {_MOST_BITS} bits: write a smaller one"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _parse_yaml(text: str) -> Any:
    """Return the parsed value of YAML text; ValueError with the reason if it is not valid."""
    try:
        return require_shallow(yaml.load(text, Loader=_Loader))  # noqa: S506  # a SafeLoader
    except RecursionError:
        raise ValueError("is not valid YAML: it is nested too deeply") from None
    # Dates and sexagesimal fractions raise the latter two.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(f"is not valid YAML: {error}") from None


def merge_sections(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return *base* with the values of *top*; sections are merged key by key.

    Null removes a key of *base*; any other value replaces the value in *base*. In the section
    `columns`, null is kept as a value: it says that a key of the records is ignored.
    """
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if key == "columns" and isinstance(value, dict):
            merged[key] = {**(below if isinstance(below, dict) else {}), **value}
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = merge_sections(below if isinstance(below, dict) else {}, value)
        else:
            merged[key] = value
    return merged
