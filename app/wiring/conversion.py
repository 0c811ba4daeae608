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

from packplan.adapters.config.layers import read_document
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
    Word,
    World,
    convert,
    ranks_and_nodes,
    ranks_of_devices,
    require_consistent,
)
from packplan.core.errors import ConfigError, Fault

_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables that name the devices of a command's processes."""


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
    source, spread = _one_device_a_rank(source)
    world_size, start = _ranks(source)
    conversion = convert(source.given, table, _world(source, world_size, spread))
    if conversion.may_pack and all(line.verdict != "refused" for line in conversion.lines):
        from packplan.app.wiring.packs import packed

        conversion = packed(conversion, trainer_keys(), world_size=world_size)
    lines = [*conversion.lines, *_variables(source, spread)]
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


def _one_device_a_rank(source: Source) -> tuple[Source, str]:
    """
    Return a command of one process on several devices with a rank for each, as far as a step's
    samples are shared evenly, and the variable that names the devices; empty for other commands.
    """
    launch = source.launch
    starts_ranks = launch.ranks_per_node is not None or launch.nodes is not None
    joins_ranks = any(one.name == "sequence_parallel_size" and one.value > 1 for one in source.given)
    for name in () if starts_ranks or joins_ranks else _DEVICES:
        word = launch.environment.get(name)
        if word is None or "," not in word.text or word.computed:
            continue
        devices = word.text.split(",")
        ranks = ranks_of_devices(source.given, len(devices))
        taken = {**launch.environment, name: Word(",".join(devices[:ranks]))}
        return attrs.evolve(
            source, launch=attrs.evolve(launch, environment=taken, ranks_per_node=Word(str(ranks)))
        ), f"{name}={word.text}"
    return source, ""


def _world(source: Source, world_size: int, spread: str) -> World:
    """Return the facts of the model and the files of a command."""
    with loading_libraries():
        from packplan.adapters.conversion.installed import installed_sections, model_facts

    values = {argument.name: argument.value for argument in source.given}
    name = str(values.get("model", ""))
    folder = name if Path(name).is_dir() else cached(name, "model")
    sections = dict(installed_sections())
    fsdp = values.get("fsdp")
    if isinstance(fsdp, str) and Path(fsdp).is_file():
        sections[fsdp] = read_document(Path(fsdp))
    return World(
        model_facts(values, None if folder is None else str(folder)),
        os.path.exists,
        sections,
        world_size,
        spread,
        exports=source.exports,
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


def _variables(source: Source, spread: str) -> list[Line]:
    """Return a line for each variable that the command is started with, and for its launcher."""
    launch, lines = source.launch, []
    ranks = 1 if launch.ranks_per_node is None else int(launch.ranks_per_node.text)
    if launch.launcher is not None:
        options = " ".join(f"--{name} {word.text}".rstrip() for name, word in launch.launcher.options.items())
        reason = "torchrun starts as many ranks" + (": on each machine, with its --node-rank" if launch.nodes else "")
        if launch.launcher.name == "accelerate" and launch.launcher.file is None:
            reason += "; accelerate's default configuration, if there is one, is not read: name it in --config_file"
        lines.append(Line(f"{launch.launcher.name} {options}".rstrip(), "taken over", reason))
    for name, word in launch.environment.items():
        shown = f"{name}={word.text or word.computed[0] if word.computed else word.text}"
        if word.computed:
            lines.append(Line(shown, "not supported", "it is computed by the script: set it yourself"))
        elif name in _DEVICES and word.text.count(",") + 1 >= 2 * ranks:
            reason = "ms-swift spreads the model of each rank over several of these devices, and here it takes one"
            lines.append(Line(shown, "changed", reason))
        elif name not in _DEVICES or not spread:
            lines.append(Line(shown, "taken over", "in the command that starts the run"))
    for name, number in (("ranks per machine", launch.ranks_per_node), ("machines", launch.nodes)):
        if number is not None and not spread:
            lines.append(Line(f"{name} {number.text}", "taken over", "in the command that starts the run"))
    return lines
