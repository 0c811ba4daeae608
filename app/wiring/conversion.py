"""
Puts together what converts a command of ms-swift: its source, what ms-swift knows, the trainer's
keys.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import yaml

from packplan.adapters.config.run import parse_config
from packplan.adapters.conversion.source import Source, read_source
from packplan.adapters.conversion.table import stored_arguments
from packplan.adapters.hub_caches import cached
from packplan.adapters.progress import loading_libraries
from packplan.app.wiring.stores import trainer_keys
from packplan.core.conversion import (
    Argument,
    Conversion,
    Line,
    World,
    convert,
    ranks_and_nodes,
    require_consistent,
)
from packplan.core.errors import ConfigError, Fault

_ONLY_RANKS = "CUDA_VISIBLE_DEVICES"


@attrs.frozen
class Converted:
    """A run that was made of a command of ms-swift."""

    source: Source
    conversion: Conversion
    """The run, with lines for the variables of the command too."""

    start: str
    """The command that starts the run, up to the name of its YAML."""


def convert_source(words: Sequence[str]) -> Converted:
    """
    Convert a command, a script, a YAML or an args.json of ms-swift.

    Args:
        words: The name of a file, or the words of a command.

    Raises:
        ConfigError: All that is wrong with it.
    """
    table = _arguments()
    source = read_source(words, table)
    require_consistent(source.given, source=source.name)
    world_size, start = _ranks(source)
    conversion = convert(source.given, table, _world(source, world_size))
    if conversion.may_pack and all(line.verdict != "refused" for line in conversion.lines):
        from packplan.app.wiring.packs import packed

        conversion = packed(conversion, trainer_keys(), world_size=world_size)
    lines = [*conversion.lines, *_variables(source)]
    if source.launch.left:
        lines += [Line(left, "not needed here", "it is another command of the script") for left in source.launch.left]
    if source.num_found_out:
        what = f"{source.num_found_out} values of {Path(source.name).name}"
        lines.append(Line(what, "not needed here", "ms-swift found them out itself"))
    return Converted(source, attrs.evolve(conversion, lines=tuple(lines)), start)


def run_text(converted: Converted, *, output: str) -> str:
    """
    Return the text of the run's YAML, how to start it at its top.

    Args:
        converted: The run.
        output: Name of the YAML.
    """
    sections = {name: dict(keys) for name, keys in converted.conversion.document.items() if keys}
    head = [f"# Converted from {converted.source.name}. Start it with:", f"#   {converted.start} {output}"]
    head += [
        f"# {line.verdict.capitalize()}: {line.argument}: {line.reason}" for line in converted.conversion.different
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100)


def run_faults(converted: Converted) -> tuple[Fault, ...]:
    """
    Return the faults that prevent a run, by the arguments of the command; values that the report
    calls missing are no faults.
    """
    conversion = converted.conversion
    refused = tuple(Fault(line.argument, line.reason) for line in conversion.lines if line.verdict == "refused")
    missing = {"template.max_length"} if "max_length" not in conversion.document["template"] else set()
    try:
        parse_config(conversion.document, converted.source.name, trainer_keys())
    except ConfigError as error:
        written = conversion.written
        faults = [fault for fault in error.faults if fault.path not in missing]
        # What a refused argument would have written is missing because of it.
        faults = [fault for fault in faults if not refused or fault.path in written]
        return (*refused, *(Fault(written.get(fault.path, fault.path), fault.reason) for fault in faults))
    return refused


def _arguments() -> Mapping[str, Argument]:
    table = stored_arguments()
    if table is None:
        # Of another version than the table: its own arguments take seconds to import.
        from packplan.adapters.conversion.installed import installed_arguments

        table = installed_arguments()
    return table


def _world(source: Source, world_size: int) -> World:
    """Return the facts of the model and the files of a command."""
    with loading_libraries():
        from packplan.adapters.conversion.installed import installed_sections, model_facts

    values = {argument.name: argument.value for argument in source.given}
    name = str(values.get("model", ""))
    folder = name if Path(name).is_dir() else cached(name, "model")
    return World(
        model_facts(values, None if folder is None else str(folder)), os.path.exists, installed_sections(), world_size
    )


def _ranks(source: Source) -> tuple[int, str]:
    """
    Return the number of ranks of a command, and the command that starts as many of this project's.
    """
    launch = source.launch
    per_node, nodes = ranks_and_nodes(launch, source=source.name)
    variables = [f"{name}={shlex.quote(word.text)}" for name, word in launch.environment.items() if not word.computed]
    world_size = per_node * nodes
    if world_size == 1:
        return 1, " ".join([*variables, "packplan sft"])
    options = [f"--nproc-per-node {per_node}", *([f"--nnodes {nodes}"] if nodes > 1 else [])]
    options += [shlex.quote(word.text) for word in launch.torchrun if not word.computed]
    return world_size, " ".join([*variables, "torchrun", *options, "-m packplan.app.sft"])


def _variables(source: Source) -> list[Line]:
    """Return a line for each variable that the command is started with."""
    launch, lines = source.launch, []
    for name, word in launch.environment.items():
        shown = f"{name}={word.text or word.computed[0] if word.computed else word.text}"
        if word.computed:
            lines.append(Line(shown, "not supported", "it is computed by the script: set it yourself"))
        elif name == _ONLY_RANKS and "," in word.text and launch.ranks_per_node is None:
            reason = (
                "ms-swift spreads the model over these devices in one process: start a rank for each, with torchrun"
            )
            lines.append(Line(shown, "not supported", reason))
        else:
            lines.append(Line(shown, "taken over", "in the command that starts the run"))
    for name, ranks in (("ranks per machine", launch.ranks_per_node), ("machines", launch.nodes)):
        if ranks is not None:
            lines.append(Line(f"{name} {ranks.text}", "taken over", "in the command that starts the run"))
    return lines
