"""
Reads a run's YAML, and finds its model and data on this machine.

If the model or data is missing, the run is refused before slow libraries are imported.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import attrs

from packplan.adapters.config.layers import read_document
from packplan.adapters.config.run import load_mixes, load_rl_config, parse_config
from packplan.adapters.config.trainer_keys import GRPO_KEYS_FILE, SFT_KEYS_FILE, TrainerKey, read_key_table
from packplan.adapters.model_folder import download_model, find_cached_model, is_hub_id, model_faults
from packplan.adapters.ranks.environment import read_world_size
from packplan.adapters.samples.data_files import file_faults, short_names
from packplan.adapters.samples.downloads import fetch_data_files
from packplan.app.cli.command import print_once
from packplan.app.opening.stores import records_cache
from packplan.core.config.faults import source_name_faults
from packplan.core.config.rl import RlConfig
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig
from packplan.core.errors import ConfigError, DataSetError, Fault, RunError
from packplan.core.samples.urls import is_url, mask_credentials

Run = TypeVar("Run", bound=RunConfig)


_PROGRAM = re.compile(r"swift|torchrun|accelerate|deepspeed|python[\d.]*")
"""Names of programs that start an ms-swift command."""


def starts_swift_command(word: str) -> bool:
    """Return whether a word is a program that starts an ms-swift command, and not a YAML."""
    return bool(_PROGRAM.fullmatch(Path(word).name)) and ("/" not in word or Path(word).is_file())


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """
    Read the YAML of a run, and resolve its model, data and mixes to files on this machine.

    Args:
        path: Path of the YAML. A relative `extends:` is relative to the YAML's folder. All other
            relative paths are relative to the working directory.
        overrides: Values for single keys, such as `training.learning_rate=1e-4`, which replace the
            values in the YAML.

    Raises:
        ConfigError: The configuration has faults; the error lists all of them.
    """
    if starts_swift_command(str(path)):
        reason = "starts an ms-swift command, which plugin, export and plan (but not plan time) take: name a YAML"
        raise ConfigError(str(path), (Fault("", reason),))
    return resolve_inputs(parse_config(read_document(Path(path)), str(path), trainer_keys(), overrides=overrides))


def read_rl_config(path: str | Path, overrides: Sequence[str] = ()) -> RlConfig:
    """Read the YAML of a reinforcement learning run; see `read_config`."""
    keys = read_key_table(GRPO_KEYS_FILE)
    if keys is None:
        from packplan.app.opening.grpo import installed_keys

        keys = installed_keys()
    return resolve_inputs(load_rl_config(path, keys, overrides=overrides))


def trainer_keys(table: Path = SFT_KEYS_FILE) -> Mapping[str, TrainerKey]:
    """Return the keys of `training.` that are passed on to ms-swift."""
    keys = read_key_table(table)
    if keys is None:
        # Of another version than the table: its own keys take seconds to import.
        from packplan.adapters.trainer.arguments import installed_keys

        keys = installed_keys()
    return keys


def resolve_inputs(config: Run) -> Run:
    """
    Return a run with files as data, text as system prompt, and a folder as model.

    If the model is given as an id on a hub, its folder in the cache is used. A model that is not in
    the cache is downloaded, if the run allows downloads. Otherwise the id stays, and is refused
    where the folder is first needed.

    Raises:
        ConfigError: A mix or a system prompt cannot be read, a named file is missing, or data
            cannot be copied.
    """
    model = _resolve_model(config.model)
    custom, system, key = config.custom, config.template.system, "model.new_special_tokens"
    template = attrs.evolve(config.template, system=system and _read_named("template.system", system))
    tokens = ((_read_named(key, one).split() if one.endswith(".txt") else [one]) for one in model.new_special_tokens)
    model = attrs.evolve(model, new_special_tokens=tuple(chain.from_iterable(tokens)))
    if custom.fusion_config is not None:
        custom = attrs.evolve(custom, train_jsonl=load_mixes(custom.fusion_config).files)
        if faults := tuple(source_name_faults(custom)):
            raise ConfigError(config.source, faults)
    custom = _copy_remote_data(custom, records_cache(config), config.source)
    media_dir = custom.media_dir or os.environ.get("ROOT_IMAGE_DIR")
    val = custom.train_jsonl if custom.val_share else custom.val_jsonl
    custom = attrs.evolve(custom, media_dir=media_dir, val_jsonl=val)
    return attrs.evolve(config, model=model, template=template, custom=custom)


def _read_named(key: str, text: str) -> str:
    """Return the text that a key gives directly or as a `.txt` file, read as ms-swift does."""
    if not text.endswith(".txt"):
        return text.replace("\\n", "\n")
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = f"{Path(text).absolute()} cannot be read ({getattr(error, 'strerror', None) or error})"
        reason = f"is {text}, which ends like a file name, but {why}: name an existing file, or change that ending"
        raise ConfigError.for_key(key, reason) from None


def _copy_remote_data(custom: CustomConfig, cache: Path, run: str) -> CustomConfig:
    """Return *custom* with the data at URLs replaced by copies on this machine."""
    copies, faults = {}, []
    for key in ("train_jsonl", "val_jsonl"):
        for name in filter(is_url, getattr(custom, key)):
            try:
                copies[name] = tuple(map(str, fetch_data_files(name, cache)))
            except DataSetError as error:
                faults.append(Fault(f"custom.{key}", f"cannot be used, since {error}"))
    if faults:
        raise ConfigError(run, tuple(faults))
    if not copies:
        return custom
    masked = {name: mask_credentials(name).removesuffix("?…") for name in copies}
    short = short_names([*masked.values()])
    named = {name: short[text] for name, text in masked.items()} | custom.source_names
    sources = {path: named[name] for name, found in copies.items() for path in found}
    train, val = (
        tuple(path for name in names for path in copies.get(name, (name,)))
        for names in (custom.train_jsonl, custom.val_jsonl)
    )
    return attrs.evolve(custom, train_jsonl=train, val_jsonl=val, source_names=custom.source_names | sources)


def _resolve_model(model: ModelConfig) -> ModelConfig:
    if not is_hub_id(model.model):
        return model
    folder = find_cached_model(model.model) or (download_model(model.model) if model.download else None)
    # A model in no cache is refused where its folder is first needed.
    return model if folder is None else attrs.evolve(model, model=str(folder))


@contextlib.contextmanager
def raising_on_all_ranks() -> Iterator[None]:
    """
    Check torchrun's environment; raise any error inside this context on all ranks.

    The other ranks get the error when they connect, instead of waiting for this rank.

    Raises:
        ConfigError: The environment variables of torchrun are incomplete or contradictory.
    """
    several = read_world_size() > 1
    try:
        yield
    except Exception as error:
        if several:
            from packplan.adapters.ranks.torch_group import join_launch  # loads torch

            if os.environ["RANK"] == "0":
                print_once(error)  # before a launcher ends this rank, since another one has ended
            with contextlib.suppress(RuntimeError, RunError):  # they do not come, or refuse too
                join_launch(refusal=error)
        raise


def measured_by_ray(config: RunConfig, address: str | None) -> RunConfig:
    """
    Return a run whose lengths are measured on the Ray cluster of the option `--ray`.

    Args:
        config: The run.
        address: Address of the cluster; None returns the run unchanged.

    Raises:
        ConfigError: The run is an ms-swift command, which Ray cannot measure.
    """
    if address is None:
        return config
    if config.command is not None:
        raise ConfigError.for_key("--ray", "works with a run's YAML, but not with an ms-swift command: leave it out")
    training = attrs.evolve(config.training, packing_length_measured_by="ray", ray_address=address)
    return attrs.evolve(config, training=training)


def require_inputs(config: RunConfig, *, loads: bool = False) -> None:
    """
    Refuse a missing model or missing data before slow libraries are imported.

    The model and data of an ms-swift command are not checked, since ms-swift has found them.

    Args:
        config: The run.
        loads: Whether the model will be loaded, so that none of its weights may be missing.

    Raises:
        ConfigError: The model or data are missing; the error lists everything that is missing.
    """
    if config.command is not None:
        return
    found = list(model_faults(config.model, loads=loads))
    custom = config.custom
    if custom.fusion_config is not None:
        found += _mix_faults(custom.fusion_config)
    else:
        found += _file_faults("custom.train_jsonl", custom.train_jsonl)
    if not custom.val_share:  # which evaluates samples of custom.train_jsonl
        found += _file_faults("custom.val_jsonl", custom.val_jsonl)
    if found:
        raise ConfigError(config.source, tuple(found))


def _mix_faults(path: str) -> list[Fault]:
    """
    Return the faults of each file of a mix, by its key. If there are none, return the faults of all
    files together, such as a file that two patterns match.
    """
    key, keys = "custom.fusion_config", load_mixes(path).file_keys
    alone = [fault for file, own in keys.items() for fault in _file_faults(f"{key}.{own}", (file,))]
    return alone or _file_faults(key, keys)


def _file_faults(key: str, files: Iterable[str]) -> list[Fault]:
    """Return the faults of the data files that a key names."""
    return [Fault(key, f"cannot be used, since {reason}") for reason in file_faults(files)]
