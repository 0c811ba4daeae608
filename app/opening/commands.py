"""
A command of ms-swift as a run that is planned and not trained here: `packplan plan build swift sft
--model ...`.

ms-swift itself resolves the words of the command, as the shell passes them on. The options of a
launcher before it are not read.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from packplan.adapters.progress import loading_libraries
from packplan.adapters.ranks.environment import read_world_size
from packplan.app.opening.runs import read_config
from packplan.core.config.run import (
    TUNERS,
    CustomConfig,
    HostCommand,
    ModelConfig,
    RunConfig,
    TemplateConfig,
    TrainingConfig,
)
from packplan.core.config.tuners import decides_weights
from packplan.core.errors import ConfigError, Fault

log = logging.getLogger(__name__)

COMMAND = "the command"

_PROGRAM = re.compile(r"swift|torchrun|accelerate|deepspeed|python[\d.]*")
"""Names of programs that begin a command of ms-swift."""

_ENTRY = re.compile(r"(?:.*[/.])?swift[/.]cli[/.](\w+?)(?:\.py)?")
"""Module or file that trains without the program `swift`, as `swift.cli.sft`."""

_PLANNED = ("sft", "pt", "rlhf")
"""Commands of ms-swift that can be planned."""

_LAUNCHERS = ("accelerate", "deepspeed", "torch.distributed.run", "torchrun")
"""Programs and modules that start ranks."""

_STEP_ARGUMENTS = (
    "bf16", "fp16", "gradient_checkpointing", "vit_gradient_checkpointing", "optim", "use_liger_kernel", "use_cpu",
    "fsdp", "data_seed", "train_dataloader_shuffle",
)  # fmt: skip
"""Arguments of a step's memory and order that `training.` has under the same name."""


def require_traceable(config: RunConfig) -> None:
    """
    Refuse a run that cannot be traced.

    Refused are runs on several ranks of torchrun, and commands that train pairs, split texts, tasks
    other than causal LM, or batches of several packs.
    """
    if (started := read_world_size()) > 1:
        raise ConfigError("torchrun", (Fault("", f"starts {started} ranks: use --world-size instead"),))
    if config.command is None:
        return
    faults = []
    if config.command.sequences_per_row != 1 or config.command.task_type != "causal_lm":
        reason = "trains pairs, another task or split texts, but only plain texts are traced: use a run's YAML"
        faults.append(Fault("swift", reason))
    if config.batch_size > 1:
        reason = f"is {config.batch_size}, but steps of one pack are traced: set it to 1"
        faults.append(Fault("--per_device_train_batch_size", reason))
    if faults:
        raise ConfigError(COMMAND, tuple(faults))


def starts_swift_command(word: str) -> bool:
    """Return whether a word is a program that starts an ms-swift command, and not a YAML."""
    return bool(_PROGRAM.fullmatch(Path(word).name)) and ("/" not in word or Path(word).is_file())


def split_command(given: Sequence[str] | None, *, skip: int = 0) -> tuple[list[str], list[str]]:
    """
    Return the words up to the program that starts an ms-swift command, and the words after it.

    The first part contains the program. Without such a program, it is all words, and the second is
    empty.

    Args:
        given: Words of a command line of this project; None takes the words of this process.
        skip: Number of earlier words to skip that look like such a program, as the first `swift` in
            `plugin swift swift sft`.
    """
    words = sys.argv[1:] if given is None else given
    found = [at for at, word in enumerate(words) if starts_swift_command(word)][skip:]
    end = found[0] + 1 if found else len(words)
    return list(words[:end]), list(words[end:])


def read_run_or_command(path: str, words: Sequence[str] = (), *, world_size: int | None = None) -> RunConfig:
    """
    Read the YAML of a run, or a command of ms-swift.

    Args:
        path: The YAML, or the first word of a command.
        words: Values for single keys of the YAML; or the other words of the command.
        world_size: Ranks of a command; None takes the ranks that it starts.

    Raises:
        ConfigError: All faults of the run.
    """
    if starts_swift_command(path):
        return _resolve_command([path, *words], world_size)
    if Path(path).suffix == ".sh":
        reason = "is a script, which is not read: put packplan before its command, as packplan plan build swift sft ..."
        raise ConfigError(path, (Fault("", reason),))
    return read_config(path, words)


def read_command(
    path: str, words: Sequence[str] = (), *, world_size: int | None = None
) -> tuple[RunConfig, HostCommand]:
    """
    Read a command of ms-swift; return the run that plans it, and the command.

    Args:
        path: See `read_run_or_command`.
        words: See `read_run_or_command`.
        world_size: See `read_run_or_command`.

    Raises:
        ConfigError: The command has faults, or *path* is a YAML.
    """
    config = read_run_or_command(path, words, world_size=world_size)
    if config.command is None:
        raise ConfigError(path, (Fault("", "is a run of packplan sft: name a command of ms-swift"),))
    return config, config.command


def _resolve_command(words: Sequence[str], world_size: int | None) -> RunConfig:
    """Return the run of a command, with its arguments as ms-swift resolves them."""
    if read_world_size() > 1:
        raise ConfigError(COMMAND, (Fault("torchrun", "starts several ranks, but one process plans: leave it out"),))
    launcher, task, arguments = _split_words(words)
    with loading_libraries():
        from packplan.adapters.swift.command import expand_config_file, read_command

    arguments = expand_config_file(arguments)  # the file may set variables that give the ranks
    ranks = world_size or _count_started_ranks(launcher, is_swift=not _ENTRY.fullmatch(words[len(launcher)]))
    resolved, command = read_command(task, arguments, started=ranks, world_size=world_size)
    if not any(word.partition("=")[0] in {"--packing", "--padding_free"} for word in arguments):
        log.warning("the command does not say --packing true, without which ms-swift trains no packs: add it")
    return run_from_command(resolved, command)


def _split_words(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """
    Return the words of the launcher, the name of ms-swift's command, such as `sft`, and its
    arguments; ConfigError if *words* name no command that can be planned.
    """
    for at, (word, following) in enumerate(pairwise([*words, ""])):
        entry = _ENTRY.fullmatch(word)
        if entry is None and Path(word).name != "swift":
            continue
        task = (entry[1] if entry else following).replace("_", "-")
        if task not in _PLANNED:
            raise ConfigError(COMMAND, (Fault(f"swift {task}", f"cannot be planned: only {', '.join(_PLANNED)} can"),))
        return list(words[:at]), task, list(words[at + (1 if entry else 2) :])
    reason = "names no command of ms-swift: write swift sft, or a launcher and .../swift/cli/sft.py"
    raise ConfigError(COMMAND, (Fault(words[0], reason),))


def _count_started_ranks(launcher: Sequence[str], *, is_swift: bool) -> int:
    """
    Return the number of ranks that a command starts; ConfigError if only its launcher knows it.

    Args:
        launcher: Words of the command line before those of ms-swift.
        is_swift: Whether the next word is the program `swift`, which starts the ranks of
            NPROC_PER_NODE and NNODES.
    """
    if starters := {*_LAUNCHERS} & {Path(word).name for word in launcher}:
        reason = "starts ranks: give their number by --world-size, before the command"
        raise ConfigError(COMMAND, (Fault(min(starters), reason),))
    ranks = 1
    for name in ("NPROC_PER_NODE", "NNODES") if is_swift else ():
        value = os.environ.get(name, "1")
        if not value.isdecimal() or not int(value):
            reason = f"is {value}, which is not a number of ranks: give it by --world-size, before the command"
            raise ConfigError(COMMAND, (Fault(name, reason),))
        ranks *= int(value)
    return ranks


def run_from_command(arguments: Any, command: HostCommand) -> RunConfig:
    """Return the run by which a command of ms-swift is planned, from its arguments as resolved."""
    from packplan.adapters.swift.packs import ALGORITHMS  # loads ms-swift

    shared = {field.name for field in attrs.fields(TrainingConfig)} - {"resume_from_checkpoint", "trainer"}
    values = {name: value for name in shared if (value := getattr(arguments, name, None)) is not None}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    passed = {*_STEP_ARGUMENTS, *filter(decides_weights, vars(arguments))} - values.keys()
    trainer = {name: value for name in sorted(passed) if (value := getattr(arguments, name, None)) is not None}
    if not arguments.model_meta.is_multimodal:  # ms-swift sets them, and they name no part
        values |= dict.fromkeys(("freeze_llm", "freeze_vit"), False)
        trainer["freeze_aligner"] = False
    return RunConfig(
        model=ModelConfig(
            model=arguments.model_dir,
            model_type=arguments.model_type,
            torch_dtype=str(arguments.torch_dtype).removeprefix("torch."),  # type: ignore[arg-type]
        ),
        template=TemplateConfig(
            template=arguments.template,
            max_length=arguments.packing_length,
            max_pixels=arguments.max_pixels,
            system=arguments.system,
            agent_template=arguments.agent_template,
            loss_scale=arguments.loss_scale,
        ),
        custom=CustomConfig(
            train_jsonl=(_join_arguments(arguments, "dataset", "cached_dataset"),),
            val_jsonl=tuple(_eval_data_names(arguments)),
            on_bad_record="stop" if arguments.strict else "skip",
            max_bad_share=Decimal(1),
        ),
        training=TrainingConfig(
            **values
            | {
                "packing_algorithm": ALGORITHMS[arguments.packing_strategy],
                "packing_min_fill_ratio": Decimal(0),
                "packing_balance": "none",
                "eval_packing": True,
                "tuner_type": arguments.tuner_type if arguments.tuner_type in TUNERS else "lora",
                "trainer": trainer | {"deepspeed": arguments.deepspeed},
            }
        ),
        command=command,
    )


def _eval_data_names(arguments: Any) -> Iterator[str]:
    """Yield the name of the data of evaluation, if there are any."""
    if arguments.val_dataset or arguments.cached_val_dataset:
        yield _join_arguments(arguments, "val_dataset", "cached_val_dataset")
    elif arguments.dataset and arguments.split_dataset_ratio > 0:
        yield f"--split_dataset_ratio {arguments.split_dataset_ratio}"


def _join_arguments(arguments: Any, *names: str) -> str:
    """Return the named arguments as text of the command line, to name data in messages."""
    said = ((name, getattr(arguments, name)) for name in names)
    return " ".join(f"--{name} {' '.join(values)}" for name, values in said if values)
