"""
YAML files -> one document: a file over those that it extends, and over both what the command line
overrides.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from packplan.core.errors import ConfigError, Fault

COMMAND_LINE = "the command line"

_VARIABLE = re.compile(r"\$\{([^}]*)\}")

_COLUMNS = "keys of one section begin in the same column, each in a line of its own"

_REMEDIES = {
    "mapping values are not allowed here": f"{_COLUMNS}, and a text that holds ': ' is quoted",
    "expected <block end>": _COLUMNS,
    "'\\t' that cannot start": "indent with spaces, not with tabs",
    "unexpected end of stream": "close the quote",
    "'<stream end>'": "close the bracket",
}
"""Words of what YAML says -> what helps."""


@attrs.frozen
class Override:
    """A key's value, given on the command line."""

    text: str
    """As it is written: `training.learning_rate=1e-4`."""

    key: str
    """The key, with its sections."""

    value: Any
    """Value that YAML reads behind the `=`."""

    def over(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return *document* with this value in it, or without the key if the value is null."""
        layer = self.value
        for part in reversed(self.key.split(".")):
            layer = {part: layer}
        return _overlay(document, layer)

    def with_place(self, fault: Fault) -> Fault:
        """Return *fault*, which names this override as its place if it is about its key."""
        mine, its = f"{self.key}.", f"{fault.path}.".replace("[", ".")
        return attrs.evolve(fault, place=self.text) if mine.startswith(its) or its.startswith(mine) else fault


def read_document(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """
    Read a YAML, and those that it extends.

    Args:
        path: The YAML.
        above: The files, resolved, that extend it.

    Raises:
        ConfigError: A file cannot be read, or is no YAML of keys.
    """
    if path.resolve() in above:
        raise refusal(path, "comes back to a file that extends this one: break the circle", key="extends")
    try:
        document = yaml.load(read_text(path, "YAML"), Loader=_Loader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        raise refusal(path, f"is no valid YAML{_yaml_fault(error)}") from None
    if not isinstance(document, dict):
        raise refusal(path, "has to hold sections, or keys and their values, but holds none")
    base = document.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise refusal(path, f"is {base!r}, but has to be the path of a YAML", key="extends")
    try:
        below = path.parent / expand_path(base)
    except ValueError as error:
        raise refusal(path, str(error), key="extends") from None
    return _overlay(read_document(below, (*above, path.resolve())), document)


def read_text(path: Path, kind: str) -> str:
    """
    Return the text of a file.

    Raises:
        ConfigError: It cannot be read as text; the message asks for a *kind* of file that exists.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror}): name an existing {kind}") from None
    except UnicodeDecodeError:
        raise refusal(path, "is not UTF-8 text") from None


def refusal(source: Path | str, reason: str, *, key: str = "") -> ConfigError:
    """
    Return the error of one fault.

    Args:
        source: File, or another source of settings.
        reason: Fact and remedy, as a clause.
        key: Key that it is about; empty for the source as a whole.
    """
    return ConfigError(str(source), (Fault(key, reason),))


def read_overrides(texts: Iterable[str]) -> list[Override]:
    """
    Read what the command line overrides, each as `section.key=value`; ConfigError with all that are
    none.
    """
    overrides: dict[str, Override] = {}
    found = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            found.append(Fault(text, "is no override: write section.key=value"))
        elif key in overrides:
            found.append(Fault(key, f"is overridden twice, by {overrides[key].text} and {text}: keep one"))
        else:
            try:
                overrides[key] = Override(text, key, yaml.load(value, Loader=_Loader))  # noqa: S506  # a SafeLoader
            except yaml.YAMLError as error:
                reason = f"is no valid YAML behind the ={_yaml_fault(error, in_file=False)}"
                found.append(Fault(key, reason, place=text))
    if found:
        raise ConfigError(COMMAND_LINE, tuple(found))
    return list(overrides.values())


def _yaml_fault(error: yaml.YAMLError, *, in_file: bool = True) -> str:
    """Return where YAML stopped to understand a text, why, and what helps."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": {' '.join(str(error).split())}"
    mark, why = error.problem_mark, str(error.problem)
    if error.context and error.context_mark:
        why += f", {error.context} that begins in line {error.context_mark.line + 1}"
    why += next((f": {remedy}" for words, remedy in _REMEDIES.items() if words in why), "")
    if not in_file:
        return f": {why}"
    # A tab is wider than the mark below it.
    line, pointer = (mark.get_snippet(indent=4) or "\n").replace("\t", " ").split("\n")
    shown = f"\n{line}\n{pointer}" if line.strip() else ""
    return f", line {mark.line + 1}, column {mark.column + 1}: {why}{shown}"


def expand_path(path: str) -> str:
    """
    Return *path* with `~` and `~name` at its start, and `${NAME}` anywhere, replaced by the home
    folder and the environment's value.

    Raises:
        ValueError: There is no such user or variable.
    """
    if path.startswith("~") and (home := os.path.expanduser(path)) == path:  # noqa: PTH111  # it takes no ~name apart
        user = path.partition("/")[0]
        message = (
            f"is {path!r}, but {user} is no user's home here: write the folder out, or ./{path} for one of that name"
        )
        raise ValueError(message)
    path = home if path.startswith("~") else path
    for name in _VARIABLE.findall(path):
        if name not in os.environ:
            message = f"is {path!r}, but the environment has no {name}: set it, or write the path out"
            raise ValueError(message)
    return _VARIABLE.sub(lambda found: os.environ[found[1]], path)


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


def _readable(construct: Callable[[_Loader, yaml.ScalarNode], Any]) -> Callable[[_Loader, yaml.ScalarNode], Any]:
    """Return *construct* as a constructor that says where a number or a date cannot be read."""

    def constructed(loader: _Loader, node: yaml.ScalarNode) -> Any:
        try:
            value = construct(loader, node)
            str(value)  # a whole number of thousands of hexadecimal digits cannot be written again
        except ValueError as error:
            problem = f"{error}: correct it, or quote it if it is a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        return value

    return constructed


for _kind in ("int", "float", "timestamp"):
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Loader.add_constructor(_tag, _readable(_Loader.yaml_constructors[_tag]))


def without_null(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return *document* without the keys that are null, at the top and in sections."""
    sections = {key: value for key, value in document.items() if value is not None}
    return {
        key: {name: held for name, held in value.items() if held is not None} if isinstance(value, dict) else value
        for key, value in sections.items()
    }


def _overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return *base* under *top*: sections merge key by key, null unsets what *base* has, everything
    else is replaced.
    """
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _overlay(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
