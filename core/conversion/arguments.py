"""
Words of a command line, or keys of a YAML or an args.json -> ms-swift's arguments and their values.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from packplan.core.config import closest
from packplan.core.conversion.shell import Word
from packplan.core.errors import ConfigError, Fault

RENAMED: Mapping[str, str] = {
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "metric": "eval_metric",
    "loss_func": "loss_type",
}
"""Name of an earlier ms-swift -> the name that it has now."""


@attrs.frozen
class Argument:
    """Types and default of an argument of ms-swift."""

    types: tuple[str, ...]
    """Kinds of values: null, bool, int, float, str, list and dict."""

    default: Any = None


@attrs.frozen
class Given:
    """An argument with its value."""

    name: str
    """Name that ms-swift has for it now."""

    value: Any

    text: str
    """Text of the value, shortened."""

    written: str
    """Name that the command has for it."""


_RLHF = "rlhf_type"
"""Argument that every command and file of `swift rlhf` has, and none of `swift sft`."""

MOST = 60
"""Characters of a value that are shown."""


def read_words(words: Sequence[Word], table: Mapping[str, Argument], *, source: str) -> tuple[Given, ...]:
    """
    Return the arguments of a command line.

    Args:
        words: Words behind `swift sft`.
        table: Every argument of ms-swift.
        source: Name of the command's file, for errors.

    Raises:
        ConfigError: All arguments that are unknown, computed, given twice or of another type.
    """
    found: list[Fault] = []
    texts: dict[str, list[list[Word]]] = {}
    written: dict[str, str] = {}
    current: list[Word] | None = None
    for word in words:
        is_name = word.text.startswith("--") and len(word.text) > 2
        if not is_name:
            if current is None:
                found.append(Fault(word.text or word.computed[0], "stands before any argument: write --name first"))
            else:
                current.append(word)
            continue
        name, equals, value = word.text[2:].partition("=")
        name = name.replace("-", "_")
        current = [attrs.evolve(word, text=value)] if equals else []
        known = RENAMED.get(name, name)
        if known not in table and name.startswith("no_") and "bool" in table.get(name[3:], Argument(())).types:
            known, current = name[3:], [Word("false")]
        texts.setdefault(known, []).append(current)
        written.setdefault(known, name)
    return _arguments(texts, written, table, source=source, dashes="--", found=found)


def read_keys(document: Mapping[str, Any], table: Mapping[str, Argument], *, source: str) -> tuple[Given, ...]:
    """
    Return the arguments of a YAML or JSON for `swift sft`.

    Args:
        document: Keys of the file.
        table: Every argument of ms-swift.
        source: Name of the file, for errors.

    Raises:
        ConfigError: All arguments that are unknown or have a value of another type.
    """
    texts: dict[str, list[list[Word]]] = {}
    written: dict[str, str] = {}
    for key, value in document.items():
        if value is not None:
            name = RENAMED.get(str(key), str(key))
            items = value if isinstance(value, list) else [value]
            texts.setdefault(name, []).append([Word(_as_text(item)) for item in items])
            written.setdefault(name, str(key))
    return _arguments(texts, written, table, source=source, dashes="", found=[])


def _arguments(
    texts: Mapping[str, Sequence[Sequence[Word]]], written: Mapping[str, str], table: Mapping[str, Argument],
    *, source: str, dashes: str, found: list[Fault],
) -> tuple[Given, ...]:  # fmt: skip
    """Return the arguments of the words behind each name; ConfigError with what is *found* too."""
    refuse_rlhf(texts, source=source)
    given: list[Given] = []
    for name, several in texts.items():
        try:
            given.append(_one(name, several, written[name], table))
        except ValueError as error:
            found.append(Fault(f"{dashes}{written[name]}", str(error)))
    if found:
        raise ConfigError(source, tuple(found))
    return tuple(given)


def refuse_rlhf(names: Iterable[str], *, source: str) -> None:
    """Refuse arguments of `swift rlhf` by the one that says so; ConfigError."""
    if _RLHF in names:
        reason = "is of swift rlhf, which trains on preferences or rewards: only swift sft is converted"
        raise ConfigError(source, (Fault(_RLHF, reason),))


def read_resolved(document: Mapping[str, Any], table: Mapping[str, Argument]) -> tuple[tuple[Given, ...], int]:
    """
    Return the arguments of an args.json, those that differ from ms-swift's defaults, and how many
    values it holds that are no arguments: what ms-swift found out itself.

    Args:
        document: Content of an old run's args.json.
        table: Every argument of ms-swift.
    """
    given, others = [], 0
    for key, value in document.items():
        name = RENAMED.get(key, key)
        if name not in table:
            others += 1
        elif value not in (None, [], {}, table[name].default):
            shown = _as_text(value)
            given.append(Given(name, value, _shortened(shown), key))
    return tuple(given), others


def _as_text(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _one(name: str, several: Sequence[Sequence[Word]], written: str, table: Mapping[str, Argument]) -> Given:
    """Return one argument; ValueError if it is none."""
    if name not in table:
        meant = closest(name, table)[:3]
        remedy = f"did you mean --{' or --'.join(meant)}?" if meant else "remove it"
        message = f"is no argument of ms-swift: {remedy}"
        raise ValueError(message)
    if computed := [text for words in several for word in words for text in word.computed]:
        message = f"is computed by the script ({computed[0]}), and nothing is run here: write its value out"
        raise ValueError(message)
    values = [_value(table[name], [word.text for word in words]) for words in several]
    if any(value != values[0] for value in values):
        texts = " and ".join(" ".join(word.text for word in words) for words in several)
        message = f"is given {len(several)} times, as {texts}, of which ms-swift would take the last: keep one"
        raise ValueError(message)
    return Given(name, values[0], _shortened(" ".join(word.text for word in several[0])), written)


def _value(argument: Argument, texts: Sequence[str]) -> Any:
    """Return the value that texts stand for; ValueError if they stand for none."""
    kinds = argument.types
    if "list" in kinds:
        return list(texts)
    if not texts:
        if "bool" in kinds:
            return True
        message = "has no value: give one, or remove it"
        raise ValueError(message)
    if len(texts) > 1:
        message = f"takes one value, but has {len(texts)} ({_shortened(' '.join(texts))}): put quotes around it"
        raise ValueError(message)
    (text,) = texts
    if text in {"None", "null"} and "null" in kinds and "str" not in kinds:
        return None
    for kind, read in _READERS:
        if kind in kinds:
            with contextlib.suppress(ValueError, KeyError):
                return read(text)
    wanted = " or ".join(_WORDS[kind] for kind in kinds if kind in _WORDS)
    message = f"is {_shortened(text)}, but has to be {wanted}"
    raise ValueError(message)


def _as_section(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)  # noqa: TRY004  # it is the text that is no section
    return value


_BOOLS = {**dict.fromkeys(("true", "t", "yes", "y", "1"), True), **dict.fromkeys(("false", "f", "no", "n", "0"), False)}

_READERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("bool", lambda text: _BOOLS[text.lower()]),
    ("int", int),
    ("float", int),  # a whole number stays one
    ("float", float),
    ("dict", _as_section),
    ("str", str),
)
"""Kinds of values, in the order in which they are tried -> what reads them."""

_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "dict": "JSON"}
"""Kind of a value -> what a message calls it."""


def _shortened(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST - 1]}…"
