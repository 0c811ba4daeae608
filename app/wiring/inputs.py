"""
A run's model and data as they are named -> folders and files on this machine.
"""

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TypeVar

import attrs

from packplan.adapters.config.run import load_mixes
from packplan.adapters.hub_caches import cached, download_model, is_id
from packplan.adapters.samples.copies import local_files
from packplan.core.config import CustomConfig, ModelConfig, RunConfig
from packplan.core.errors import ConfigError, DataSetError, Fault
from packplan.core.samples import is_place, without_credentials

Run = TypeVar("Run", bound=RunConfig)


def with_inputs(config: Run) -> Run:
    """
    Return a run whose model is a folder, if a cache holds it, and whose data are files.

    Raises:
        ConfigError: A mix that is planned cannot be read, or data cannot be copied.
    """
    model = _with_model(config.model)
    custom = config.custom
    if custom.fusion_schedule is not None and custom.fusion_config is not None:
        custom = attrs.evolve(custom, train_jsonl=load_mixes(custom.fusion_config).files)
    custom = _with_copies(custom, records_cache(config))
    return attrs.evolve(config, model=model, custom=custom)


def records_cache(config: RunConfig) -> Path:
    """Return the folder of copies of data files that cannot be read in any order."""
    return Path(config.custom.records_cache or Path(config.training.output_dir) / "records")


def _with_copies(custom: CustomConfig, cache: Path) -> CustomConfig:
    """Return the data of a run, those at places as copies on this machine."""
    copies, faults = {}, []
    for key in ("train_jsonl", "val_jsonl"):
        for name in filter(is_place, getattr(custom, key)):
            try:
                copies[name] = tuple(map(str, local_files(name, cache)))
            except DataSetError as error:
                faults.append(Fault(f"custom.{key}", str(error)))
    if faults:
        raise ConfigError("the configuration", tuple(faults))
    if not copies:
        return custom
    plain = {name: source for name, source in custom.source_names.items() if name not in copies}
    shown = {name: without_credentials(name).removesuffix("?…") for name in copies}
    ends = Counter(PurePosixPath(text).name for text in shown.values())
    unnamed = {name: end if ends[end := PurePosixPath(text).name] == 1 else text for name, text in shown.items()}
    sources = {path: {**unnamed, **custom.source_names}[name] for name, found in copies.items() for path in found}
    train, val = (
        tuple(path for name in names for path in copies.get(name, (name,)))
        for names in (custom.train_jsonl, custom.val_jsonl)
    )
    return attrs.evolve(custom, train_jsonl=train, val_jsonl=val, source_names={**plain, **sources})


def _with_model(model: ModelConfig) -> ModelConfig:
    if not is_id(model.model):
        return model
    folder = cached(model.model) or (download_model(model.model) if model.download else None)
    # What no cache holds is refused where the folder is first needed.
    return model if folder is None else attrs.evolve(model, model=str(folder))
