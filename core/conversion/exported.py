"""
Data that `swift export --to_cached_dataset` encodes, in the same script -> the data themselves,
since samples are encoded here while training runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packplan.core.conversion.arguments import Argument, Given, read_words
from packplan.core.conversion.shell import Word
from packplan.core.errors import ConfigError, Fault

_NOT_OF_DATA = frozenset({"model", "model_type", "output_dir", "dataset_num_proc"})
"""Arguments of an export that training gives again, or that say how the export proceeds."""

_CACHED = ("cached_dataset", "cached_val_dataset")


def with_exported_data(
    given: Sequence[Given], exports: Sequence[Sequence[Word]], table: Mapping[str, Argument], *, source: str
) -> tuple[Given, ...]:
    """
    Return a command's arguments, with those of the export that made its cached data.

    Args:
        given: Arguments of `swift sft`.
        exports: Words behind each `swift export` of its script.
        table: Every argument of `swift sft`.
        source: Name of the script, for errors.

    Raises:
        ConfigError: An argument has one value for the export and another one for training.
    """
    values = {one.name: one for one in given}
    folders = {_plain(name).rpartition("/")[0] for key in _CACHED if key in values for name in values[key].value}
    found: list[Fault] = []
    for words in exports if len(folders) == 1 else ():
        known = {**table, "to_cached_dataset": Argument(("bool",))}
        exported = {one.name: one for one in read_words(_known(words, known), known, source=source)}
        named = {name: one.value for name, one in exported.items()}
        if not named.get("to_cached_dataset") or _plain(named.get("output_dir", "")) not in folders:
            continue
        for name, one in exported.items():
            if name in values and name not in _NOT_OF_DATA and values[name].value != one.value:
                reason = f"is {one.text} for swift export, and {values[name].text} for training: keep one"
                found.append(Fault(f"--{one.written}", reason))
        if found:
            raise ConfigError(source, tuple(found))
        more = [one for name, one in exported.items() if name not in {*values, *_NOT_OF_DATA, "to_cached_dataset"}]
        rest = [one for one in given if one.name not in _CACHED]
        return (*rest, *more, *(values[name] for name in _CACHED if name in values))
    return tuple(given)


def _plain(path: str) -> str:
    return path.removeprefix("./").rstrip("/")


def _known(words: Sequence[Word], table: Mapping[str, Argument]) -> list[Word]:
    """Return the words of arguments that training has too."""
    kept: list[Word] = []
    keeps = False
    for word in words:
        if word.text.startswith("--"):
            keeps = word.text[2:].partition("=")[0].replace("-", "_") in table
        if keeps:
            kept.append(word)
    return kept
