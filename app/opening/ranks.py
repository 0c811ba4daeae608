"""Ranks of a run, comparison of their settings, and the lock on the run's output folder."""

import contextlib
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch

from packplan.adapters import files
from packplan.adapters.config.run import load_mixes
from packplan.adapters.config.trainer_keys import SETTINGS_FILES, read_nested_settings
from packplan.adapters.ranks.environment import read_world_size, wrap_rendezvous_errors
from packplan.adapters.ranks.torch_group import OneRank, TorchGroup, weight_digests, wrap_rank_errors
from packplan.adapters.versions import installed_version
from packplan.app.cli.command import print_once
from packplan.app.opening.runs import raising_on_all_ranks
from packplan.core.config.identity import flat_values, rank_differences, shared_values
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, OutputError, RunError, UserError, format_lines
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import RankGroup

_PACKAGES = (
    "packplan", "ms-swift", "transformers", "torch", "numpy", "accelerate", "peft", "flash-attn", "deepspeed"
)  # fmt: skip
"""Packages that must have the same version on all ranks."""


@contextlib.contextmanager
def join_ranks(
    config: RunConfig, *, use_cpu: bool = False, options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[RankGroup]:
    """
    Join torchrun's ranks, if there are several, compare their runs, and leave the process group at
    the end.

    Configurations, options and versions are compared.

    Args:
        config: The run.
        use_cpu: Whether to use a process group on the CPU, even if the run trains on GPUs.
        options: Options of the command line that all ranks need to have in common.

    Raises:
        ConfigError: The environment variables of torchrun are incomplete or contradictory.
        RunError: The ranks cannot connect, or their runs differ; raised on all ranks.
    """
    given = {}
    if read_world_size() > 1:
        with raising_on_all_ranks():
            given = _rank_values(config, options)
    settings = config.training.trainer
    with open_rank_group(settings, use_cpu=use_cpu) as group:
        require_same_run(group, given)
        yield group


@contextlib.contextmanager
def open_rank_group(settings: Mapping[str, Any], *, use_cpu: bool = False) -> Iterator[RankGroup]:
    """
    Join torchrun's ranks, if there are several, and leave the process group at the end.

    Args:
        settings: Settings of the trainer, with `use_cpu` and `ddp_timeout`.
        use_cpu: Whether to use a process group on the CPU, even if the settings use GPUs.

    Raises:
        RunError: The ranks cannot connect.
    """
    group: RankGroup = OneRank()
    if read_world_size() > 1:
        with wrap_rendezvous_errors():
            timeout_s = float(settings.get("ddp_timeout", 1800))
            group = TorchGroup(use_cpu=use_cpu or bool(settings.get("use_cpu")), timeout_s=timeout_s)
    try:
        with wrap_rank_errors(group.rank):
            yield group
            # Not after an error: the other ranks may wait for this one in a collective, and leaving
            # would wait for them.
            if isinstance(group, TorchGroup):
                group.leave()
    except Exception as error:
        if not isinstance(group, TorchGroup):
            raise
        cause = group.find_cause(error)
        group.report_failure(cause, print_once)
        if cause is error:
            raise
        raise cause from error


def _rank_values(config: RunConfig, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings, options and library versions of this rank as text, by key."""
    versions = {"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}}
    ours = {f"version of {name}": version for name, version in versions.items()}
    return shared_values(config, read_settings_files(config)) | flat_values({**options, **ours})


def read_settings_files(config: RunConfig) -> dict[str, Any]:
    """
    Return the content of settings files and mixes that a run names, by key.

    Unreadable settings files are left out, since the trainer refuses them later.
    """
    found: dict[str, Any] = {}
    for key in SETTINGS_FILES:
        file = config.training.trainer.get(key)
        if isinstance(file, str) and (held := read_nested_settings(file)):
            found[f"training.{key}"] = held
    if config.custom.fusion_config is not None:
        mixes = load_mixes(config.custom.fusion_config)

        def replace_file(_: object, field: Any, value: object) -> object:
            """Replace a data file's path with its index in `mixes.files`; keep any other value."""
            return mixes.files.index(str(value)) if field is not None and field.name == "jsonl" else value

        found["custom.fusion_config"] = {
            f"{mixes.key_prefix(entry)}{key}": value
            for entry, mix in enumerate(mixes.entries)
            for key, value in attrs.asdict(mix, value_serializer=replace_file).items()
        }
    return found


def require_same_run(group: RankGroup, values: Mapping[str, str]) -> None:
    """
    Compare values between all ranks. Every rank has to call this function.

    Args:
        group: All ranks.
        values: This rank's values as text, by key.

    Raises:
        RunError: Values differ; raised on all ranks, with the list of differences.
    """
    if len(set(group.gather(Fingerprint(values).digest))) == 1:
        return
    by_rank = group.gather(json.dumps(dict(values)))
    group.wait_for_all()  # all have read it: now a rank may end, and its store with it
    differences = rank_differences([json.loads(one) for one in by_rank])
    fact = format_lines("ranks were given different runs", differences)
    raise RunError("different_runs", fact, {"differences": differences})


def require_same_weights(group: RankGroup, model: torch.nn.Module) -> None:
    """
    Compare all weights of a model between ranks, each of which has the whole model.

    Every rank has to call this function.

    Raises:
        RunError: Weights differ; raised on all ranks.
    """
    if group.world_size == 1:
        return
    digests = weight_digests(model)
    group.wait_for_all()  # some ranks may load longer than `gather` waits
    require_same_run(group, digests)


@contextlib.contextmanager
def hold_output_lock(config: RunConfig, group: RankGroup, *, key: str = "training.output_dir") -> Iterator[None]:
    """
    Create and lock a run's output folder, so that no other run writes into it. Every rank has to
    call this function.

    Args:
        config: The run.
        group: All ranks.
        key: Key that names the folder.

    Raises:
        ConfigError: Another run is writing into the folder.
        OutputError: Rank 0 cannot write the folder; the other ranks raise ConfigError.
    """
    folder = Path(config.training.output_dir)
    failure: UserError | None = None

    def refuse() -> str:
        reason = f"is {folder}, which another run is writing into: wait until it ends, or name another folder"
        raise ConfigError.for_key(key, reason)

    with contextlib.ExitStack() as lock:
        if group.rank == 0:
            try:
                files.make_folder(folder)
                lock.enter_context(files.hold_lock(folder / "train.lock", f"to train into {folder}", wait=refuse))
            except (ConfigError, OutputError) as error:  # raised once the others know
                failure = error
        if group.any(failure is not None):
            raise failure or ConfigError.for_key(key, f"is {folder}, which rank 0 cannot use: see the error of rank 0")
        yield
