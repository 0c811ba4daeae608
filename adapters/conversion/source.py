"""
A command, a script, a YAML or an args.json that a user converts -> ms-swift's arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from packplan.adapters.config.layers import read_document, read_text, refusal
from packplan.core.conversion import (
    CONVERTED,
    PLANNED,
    Argument,
    Command,
    Given,
    Launch,
    Word,
    as_torchrun,
    find_launch,
    read_hosts,
    read_keys,
    read_resolved,
    read_script,
    read_words,
    refuse_rlhf,
    with_exported_data,
)

ARGS = "args.json"

COMMAND_LINE = "the command"

_CONFIGS = (".yaml", ".yml", ".json")


_OF_PT = (
    Given("use_chat_template", False, "false (of swift pt)", "use_chat_template"),  # noqa: FBT003  # a value
    Given("loss_scale", "all", "all (of swift pt)", "loss_scale"),
)
"""Defaults of `swift pt` that are not those of `swift sft`."""


@attrs.frozen
class Source:
    """A command of `swift sft`, wherever it was written."""

    name: str
    """File of the command, or `COMMAND_LINE`."""

    given: tuple[Given, ...]

    launch: Launch

    num_found_out: int = 0
    """Values of an args.json that are no arguments."""

    exports: bool = False
    """Whether the script's `swift export` makes the cached data of the command."""


def read_source(words: Sequence[str], table: Mapping[str, Argument]) -> Source:
    """
    Read what is to be converted; nothing is executed.

    Args:
        words: The name of a file, or of a run's folder; or the words of a command.
        table: Every argument of `swift sft`.

    Raises:
        ConfigError: All that is wrong with it.
    """
    first = Path(words[0])
    if len(words) == 1 and first.is_dir():
        first = _args_json(first)
    if len(words) == 1 and first.is_file() and first.suffix.lower() in _CONFIGS:
        return _of_config(first, table)
    return _of_launch(*_find(words, CONVERTED), table)


def read_launch(words: Sequence[str]) -> tuple[str, Launch]:
    """
    Read a command whose samples are to be planned; nothing is executed.

    Args:
        words: The name of a script or of a YAML; or the words of a command.

    Returns:
        The name of its source, and the command, whose words are all arguments of ms-swift.

    Raises:
        ConfigError: There is no such command, or the script computes a word of it.
    """
    first = Path(words[0])
    if len(words) == 1 and first.is_file() and first.suffix.lower() in _CONFIGS:
        document, launch = _config(first)
        name, launch = str(first), attrs.evolve(launch, task="rlhf" if "rlhf_type" in document else "sft")
    else:
        name, launch = _find(words, PLANNED)
        if launch.launcher is not None:
            launch, _ = as_torchrun(launch, _launcher_file(launch.launcher.file), source=name)
        document, launch = _with_config(launch)
    launch = attrs.evolve(launch, arguments=(*_as_words(document), *launch.arguments))
    named = [*launch.arguments, *launch.environment.values()]
    if computed := [text for word in named for text in word.computed]:
        raise refusal(name, f"computes {computed[0]}, and nothing is run here: write its value out")
    return name, launch


def is_command(path: str | Path) -> bool:
    """Return whether a name is a script, a YAML for ms-swift or a command, and no YAML of a run."""
    file = Path(path)
    if file.suffix.lower() not in {".yaml", ".yml"}:
        return file.suffix.lower() == ".sh" or file.name in _PROGRAMS or "=" in file.name or file.is_file()
    return file.is_file() and isinstance(read_document(file).get("model"), str)


_PROGRAMS = frozenset({"swift", "torchrun", "python", "python3", "env"})
"""First words of commands of ms-swift."""


def _find(words: Sequence[str], tasks: Sequence[str]) -> tuple[str, Launch]:
    """Return the name and the command of a script, or of words."""
    if len(words) > 1:
        command = Command(1, {}, tuple(map(Word, ["env", *words])))  # variables may stand before the program
        return COMMAND_LINE, find_launch([command], source=COMMAND_LINE, tasks=tasks)
    first, name = Path(words[0]), words[0]
    if first.exists():
        text = read_text(first, "file")
    elif words[0].split()[1:]:
        text, name = words[0], COMMAND_LINE
    else:
        raise refusal(words[0], "is no file, and no command of ms-swift: name a script, a YAML or an args.json")
    return name, find_launch(read_script(text, os.environ, source=name), source=name, tasks=tasks)


def _as_words(document: Mapping[str, Any]) -> Iterator[Word]:
    """Yield the words of a YAML's arguments, as ms-swift makes them."""
    for name, value in document.items():
        yield Word(f"--{name}")
        for item in value if isinstance(value, list) else [value]:
            yield Word(json.dumps(item, ensure_ascii=False) if isinstance(item, dict) else str(item))


def _with_config(launch: Launch) -> tuple[dict[str, Any], Launch]:
    """Return the keys of the file that a command names first, and the command without it."""
    words = launch.arguments
    if not words or words[0].computed or not words[0].text.lower().endswith(_CONFIGS):
        return {}, launch
    document, asked = _config(Path(words[0].text))
    return document, attrs.evolve(
        launch,
        arguments=words[1:],
        ranks_per_node=launch.ranks_per_node or asked.ranks_per_node,
        nodes=launch.nodes or asked.nodes,
        environment={**asked.environment, **launch.environment},
    )


def _of_launch(name: str, launch: Launch, table: Mapping[str, Argument]) -> Source:
    """Return the arguments of a command, and of the file that it names first."""
    below: tuple[Given, ...] = ()
    if launch.launcher is not None:
        launch, below = as_torchrun(launch, _launcher_file(launch.launcher.file), source=name)
    document, plain = _with_config(launch)
    if document:
        below += read_keys(document, table, source=launch.arguments[0].text)
    above = read_words(plain.arguments, table, source=name)
    named = {argument.name for argument in above}
    given = (*(argument for argument in below if argument.name not in named), *above)
    loaded = given
    given = with_exported_data(loaded, plain.exports, table, source=name)
    exports = given != loaded
    if plain.task == "pt":
        named = {argument.name for argument in given}
        given += tuple(one for one in _OF_PT if one.name not in named)
    return Source(name, given, plain, exports=exports)


def _launcher_file(word: Word | None) -> dict[str, Any]:
    """Return the keys of a launcher's file; none without a file."""
    if word is None:
        return {}
    path = Path(word.text)
    if not path.is_file():
        raise refusal(path, "is no file, and the launcher reads its ranks there: convert where it is")
    if path.suffix.lower() not in _CONFIGS:
        return read_hosts(read_text(path, "file"))
    return read_document(path)


def _of_config(path: Path, table: Mapping[str, Argument]) -> Source:
    """Return the arguments of a YAML or JSON of `swift sft`, or of an old run's args.json."""
    document, launch = _config(path)
    if "swift_version" not in document and "global_world_size" not in document:
        return Source(str(path), read_keys(document, table, source=str(path)), launch)
    refuse_rlhf(document, source=str(path))
    given, others = read_resolved(document, table)
    ranks = document.get("global_world_size")
    if isinstance(ranks, int) and ranks > 1:
        local = document.get("local_world_size")
        per_node = local if isinstance(local, int) and local > 0 else ranks
        launch = attrs.evolve(launch, ranks_per_node=Word(str(per_node)), nodes=Word(str(ranks // per_node)))
    return Source(str(path), given, launch, others)


def _config(path: Path) -> tuple[dict[str, Any], Launch]:
    """Return the keys of a file, and the ranks and variables that it asks for."""
    if path.suffix.lower() == ".json":
        try:
            document = json.loads(read_text(path, "file"))
        except ValueError as error:
            raise refusal(path, f"is no valid JSON: {error}") from None
        if not isinstance(document, dict):
            raise refusal(path, "has to hold arguments and their values, but holds none")
    else:
        document = read_document(path)
    variables = {str(name): Word(str(value)) for name, value in (document.pop("ENV", None) or {}).items()}
    ranks_per_node, nodes = variables.pop("NPROC_PER_NODE", None), variables.pop("NNODES", None)
    return document, Launch((), variables, ranks_per_node, nodes)


def _args_json(folder: Path) -> Path:
    """Return the args.json of a run: in its folder, or in its newest checkpoint."""
    if (folder / ARGS).is_file():
        return folder / ARGS
    found = sorted(folder.glob(f"checkpoint-*/{ARGS}"), key=lambda file: file.stat().st_mtime_ns)
    if not found:
        raise refusal(folder, f"is a folder without {ARGS}: name a run or a checkpoint of it")
    return found[-1]
