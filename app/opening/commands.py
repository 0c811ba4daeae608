"""
An ms-swift command, converted to a run that Packplan measures and plans, but does not train:
`packplan plan build swift sft --model ...`.

ms-swift's own parser reads the words of the command. Options of a launcher in front of the command
are ignored.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from packplan.adapters.progress import loading_libraries
from packplan.adapters.ranks.environment import read_world_size
from packplan.app.opening.runs import read_config, starts_swift_command
from packplan.core.config.run import COMMAND, HostCommand, RunConfig
from packplan.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from packplan.adapters.swift.command import Degrees

log = logging.getLogger(__name__)

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
"""Suffixes of data files."""

_ENTRY = re.compile(r"(?:.*[/.])?swift[/.]cli[/.](\w+?)(?:\.py)?")
"""Module or file that trains without the program `swift`, such as `swift.cli.sft`."""

_PLANNED = ("sft", "pt", "rlhf")
"""Commands of ms-swift that can be planned."""

_LAUNCHERS = ("accelerate", "deepspeed", "torch.distributed.run", "torchrun")
"""Programs and modules that start ranks."""


def require_traceable(config: RunConfig) -> None:
    """
    Refuse a run whose step cannot be traced.

    Runs on several ranks of torchrun are refused, and so are batches of several packs. Commands
    are also refused if they train pairs, split texts, or tasks other than causal LM.
    """
    if (started := read_world_size()) > 1:
        raise ConfigError("torchrun", (Fault("", f"starts {started} ranks: use --world-size instead"),))
    faults = []
    if config.command and (config.command.sequences_per_row, config.command.task_type) != (1, "causal_lm"):
        reason = "trains pairs, another task or split texts, but only plain texts are traced: use a run's YAML"
        faults.append(Fault("swift", reason))
    if config.batch_size > 1:
        reason = f"is {config.batch_size}, but steps of one pack are traced: set it to 1"
        faults.append(Fault("--per_device_train_batch_size", reason))
    if faults:
        raise ConfigError(COMMAND, tuple(faults))


def split_command(given: Sequence[str] | None, *, skip: int = 0) -> tuple[list[str], list[str]]:
    """
    Return the words up to the program that starts an ms-swift command, and the words after it.

    The first list ends with the program. Without such a program, the first list has all words, and
    the second list is empty.

    Args:
        given: Words of a `packplan` command line; if None, the words of this process.
        skip: Number of words to skip that look like such a program, such as the first `swift` in
            `plugin swift swift sft`.
    """
    words = sys.argv[1:] if given is None else given
    found = [at for at, word in enumerate(words) if starts_swift_command(word)][skip:]
    end = found[0] + 1 if found else len(words)
    return list(words[:end]), list(words[end:])


def read_run_or_command(path: str, words: Sequence[str] = (), *, world_size: int | None = None) -> RunConfig:
    """
    Read a run from its YAML, or from an ms-swift command.

    Args:
        path: Path of the YAML, or the first word of an ms-swift command.
        words: Values for single keys of the YAML, or the other words of the command.
        world_size: Number of ranks of a command; if None, the number that the command starts.

    Raises:
        ConfigError: The run has faults; the error lists all of them.
    """
    if starts_swift_command(path):
        return resolve_command([path, *words], world_size=world_size)
    if Path(path).suffix == ".sh":
        reason = "is a script, which is not read: put packplan before its command, as in packplan plan build swift sft"
        raise ConfigError(path, (Fault("", reason),))
    return read_config(path, words)


def resolve_command(words: Sequence[str], *, world_size: int | None = None, degrees: "Degrees" = 1) -> RunConfig:
    """
    Return a run that plans an ms-swift command, with the arguments as ms-swift resolves them.

    Args:
        words: All words of the command, including those of a launcher.
        world_size: Number of ranks of the command; if None, the number that the command starts.
        degrees: Maximum number of ranks that share a long pack, as in `Plan.schedule`; 1 shares no
            pack.

    Raises:
        ConfigError: The command has faults, or is not an ms-swift command.
    """
    if read_world_size() > 1:
        raise ConfigError(COMMAND, (Fault("torchrun", "starts several ranks, but one process plans: leave it out"),))
    launcher, task, arguments = _split_words(words)
    with loading_libraries():
        from packplan.adapters.swift.command import COMMANDS, DATA_SETS, read_command

    known = [field.name for field in fields(COMMANDS[task][0])]
    if unknown := [*_unknown_flags(arguments, known)]:
        raise ConfigError(COMMAND, tuple(unknown))
    count = partial(_count_started_ranks, launcher)
    plain, run = read_command(task, arguments, world_size=world_size, count_started=count, degrees=degrees)
    flags = ("dataset", "val_dataset", "cached_dataset", "cached_val_dataset")
    named = [(flag, name) for flag in flags for name in getattr(plain, flag) if name not in DATA_SETS]
    if missing := [(flag, name) for flag, name in named if _is_missing_file(name)]:
        reason = "is {}, which does not exist: name an existing file"
        raise ConfigError(COMMAND, tuple(Fault(f"--{flag}", reason.format(name)) for flag, name in missing))
    if run.command and lacks_packing(run.command):
        log.warning("the command lacks --packing true, without which ms-swift trains no packs: add it")
    return run


def lacks_packing(command: HostCommand) -> bool:
    """Return whether an ms-swift command has neither --packing nor --padding_free."""
    return not {word.partition("=")[0] for word in command.words} & {"--packing", "--padding_free"}


def _unknown_flags(words: Sequence[str], known: Sequence[str]) -> Iterator[Fault]:
    """Yield each flag that begins no known name; ms-swift would report a missing flag first."""
    words = [word for word in words if word.startswith("--") and len(word.split()) == 1]  # with a space, it is a value
    for flag in (word.partition("=")[0] for word in words):
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        if not any(one.startswith((name, positive)) for one in (*known, "help")):
            no = name.removesuffix(positive)
            similar = "".join(f"write --{no}{one}, or " for one in get_close_matches(positive, known, 1))
            yield Fault(flag, f"is not an argument of ms-swift: {similar}remove it")


def _is_missing_file(name: str) -> bool:
    """
    Return whether a data set is a missing path; ms-swift splits names into `path:subset#count`, and
    `owner/name` may be an id of a hub.
    """
    whole = name.rpartition("#")[0] or name
    path = whole.partition(":")[0].strip()
    is_path = path.startswith(("/", ".", "~")) or (path.endswith(_DATA_SUFFIXES) and path.count("/") != 1)
    return is_path and "::" not in name and not any(map(os.path.exists, (name, whole, path)))


def _split_words(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """
    Return the launcher's words, the name of ms-swift's command (such as `sft`), and the command's
    arguments. ConfigError if *words* name no command that can be planned.
    """
    for at, word in enumerate(words):
        entry = _ENTRY.fullmatch(word)
        if entry is None and Path(word).name != "swift":
            continue
        task, *arguments = [entry[1], *words[at + 1 :]] if entry else [*words[at + 1 :]] or [""]
        if (task := task.replace("_", "-")) not in _PLANNED:
            raise ConfigError(COMMAND, (Fault(f"swift {task}", f"cannot be planned: only {', '.join(_PLANNED)} can"),))
        return list(words[:at]), task, arguments
    reason = "names no ms-swift command: write swift sft, or a launcher and .../swift/cli/sft.py"
    raise ConfigError(COMMAND, (Fault(words[0], reason),))


def _count_started_ranks(launcher: Sequence[str]) -> int:
    """
    Return the number of ranks that a command starts; ConfigError if only its launcher knows the
    number.

    Args:
        launcher: Words before those of ms-swift, such as `python -m`. Without such words, the
            program `swift` starts NPROC_PER_NODE times NNODES ranks.
    """
    if starters := {*_LAUNCHERS} & {Path(word).name for word in launcher}:
        reason = "starts ranks: set their number with --world-size, before the command"
        raise ConfigError(COMMAND, (Fault(min(starters), reason),))
    ranks = 1
    for name in () if launcher else ("NPROC_PER_NODE", "NNODES"):
        value = os.environ.get(name, "1")
        if not value.isdecimal() or not int(value):
            reason = f"is {value}, which is not a number of ranks: set it with --world-size, before the command"
            raise ConfigError(COMMAND, (Fault(name, reason),))
        ranks *= int(value)
    return ranks
