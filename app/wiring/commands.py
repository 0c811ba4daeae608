"""
A command of ms-swift as a run that is planned and not trained: `packplan plan` takes it where it
takes a YAML.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from packplan.adapters.conversion.source import is_command, read_launch
from packplan.adapters.progress import loading_libraries
from packplan.app.wiring.stores import read_config, require_ranks
from packplan.core.config import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.conversion import ranks_and_nodes
from packplan.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from packplan.adapters.swift.command import SwiftCommand

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class CommandRun(RunConfig):
    """A run that ms-swift trains, by its own command and the plugin."""

    command: SwiftCommand

    @property
    def batch_size(self) -> int:
        """Packs of a rank in one forward pass."""
        return int(self.command.arguments.per_device_train_batch_size)


def read_run(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """
    Read a run's YAML, or a command of ms-swift.

    Args:
        path: The YAML, a script, a YAML for ms-swift, or the first word of a command.
        overrides: Values for single keys of a run; or the other words of the command.

    Raises:
        ConfigError: All faults of the run.
    """
    if not is_command(path):
        return read_config(path, overrides)
    if require_ranks() > 1:
        raise ConfigError(path, (Fault("torchrun", "starts several ranks, but one plans a command: leave it out"),))
    if Path(path).exists() and overrides:
        raise ConfigError(path, (Fault(overrides[0], "is no key of a command: change the command"),))
    name, launch = read_launch([path, *overrides])
    per_node, nodes = ranks_and_nodes(launch, source=name)
    # Read by ms-swift as the command's own would be, some of them when it is imported.
    os.environ.update({name: word.text for name, word in launch.environment.items()})
    with loading_libraries():
        from packplan.adapters.swift.command import read_arguments
    words = [word.text for word in launch.arguments]
    command = read_arguments(launch.task, words, world_size=per_node * nodes, source=name)
    if not command.names_packing:
        log.warning("%s does not say --packing true, without which ms-swift trains no packs: add it", name)
    return _as_run(command)


def ranks_of(config: RunConfig) -> int | None:
    """Return the ranks that train a run, where its command says them; a YAML does not."""
    return config.command.world_size if isinstance(config, CommandRun) else None


def require_command(path: str, overrides: Sequence[str] = ()) -> CommandRun:
    """
    Read a command of ms-swift, as `read_run` does.

    Args:
        path: A script, a YAML for ms-swift, or the first word of a command.
        overrides: The other words of the command.

    Raises:
        ConfigError: It is none, or has faults.
    """
    config = read_run(path, overrides)
    if not isinstance(config, CommandRun):
        raise ConfigError(path, (Fault("", "is a run of packplan sft: name a command of ms-swift"),))
    return config


def _as_run(command: SwiftCommand) -> CommandRun:
    """Return the data, packs and schedule of a command by the keys of a run."""
    arguments = command.arguments
    return CommandRun(
        model=ModelConfig(model=arguments.model_dir, model_type=arguments.model_type),
        template=TemplateConfig(
            template=arguments.template,
            max_length=arguments.packing_length,
            max_pixels=arguments.max_pixels,
            system=arguments.system,
            agent_template=arguments.agent_template,
            loss_scale=arguments.loss_scale,
        ),
        custom=CustomConfig(
            train_jsonl=(_named(arguments, "dataset", "cached_dataset"),),
            val_jsonl=tuple(_eval_names(arguments)),
            on_bad_record="stop" if arguments.strict else "skip",
            max_bad_share=Decimal(1),
        ),
        training=TrainingConfig(
            output_dir=arguments.output_dir,
            packing_algorithm=command.algorithm,
            packing_min_fill_ratio=Decimal(0),
            packing_balance="none",
            eval_packing=True,
            per_device_train_batch_size=arguments.per_device_train_batch_size,
            gradient_accumulation_steps=command.gradient_accumulation_steps,
            dataloader_drop_last=arguments.dataloader_drop_last,
            num_train_epochs=arguments.num_train_epochs,
            max_steps=arguments.max_steps,
            seed=arguments.seed,
            tuner_type="full" if arguments.tuner_type == "full" else "lora",
            freeze_llm=arguments.freeze_llm,
            freeze_vit=arguments.freeze_vit,
            trainer={
                name: value
                for name in ("data_seed", "train_dataloader_shuffle")
                if (value := getattr(arguments, name)) is not None
            },
        ),
        command=command,
    )


def _eval_names(arguments: Any) -> Iterator[str]:
    """Yield the name of the data of evaluation, if there are any."""
    if arguments.val_dataset or arguments.cached_val_dataset:
        yield _named(arguments, "val_dataset", "cached_val_dataset")
    elif arguments.dataset and arguments.split_dataset_ratio > 0:
        yield f"--split_dataset_ratio {arguments.split_dataset_ratio}"


def _named(arguments: Any, *names: str) -> str:
    """Return arguments as the command has them, to name the data in messages."""
    said = ((name, getattr(arguments, name)) for name in names)
    return " ".join(f"--{name} {' '.join(values)}" for name, values in said if values)
