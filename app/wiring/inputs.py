"""
A run's model and data as they are named -> folders and files on this machine: ids from the caches
of hubs, and what `#count` and `custom.split_dataset_ratio` draw.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from packplan.adapters.conversion.drawn import draw_files
from packplan.adapters.hub_caches import cached, download_command, is_id
from packplan.adapters.model_folder import model_faults
from packplan.adapters.samples.files import open_records
from packplan.core.config import CustomConfig, ModelConfig, RunConfig
from packplan.core.errors import ConfigError, DataSetError, Fault
from packplan.core.samples import DataEntry, draw_records, parse_entry


def with_inputs(config: RunConfig) -> RunConfig:
    """
    Return a run whose model is a folder, if a cache holds it, and whose data are files.

    Raises:
        ConfigError: Data that are named by id are not on this machine; the model too, if that is
            not there either.
        DataSetError: They are too few to split.
    """
    model = _with_model(config.model)
    custom = config.custom
    if not custom.dataset and not custom.val_dataset:
        return attrs.evolve(config, model=model)
    if not model.download and (
        found := [*_missing(custom.dataset, "dataset"), *_missing(custom.val_dataset, "val_dataset")]
    ):
        raise ConfigError("the configuration", (*model_faults(model), *found))
    cache = records_cache(config)
    train = _files(custom.dataset, "dataset", custom, cache)
    val = _files(custom.val_dataset, "val_dataset", custom, cache)
    if custom.dataset:
        ratio, shuffle = custom.split_dataset_ratio, custom.dataset_shuffle
        files, split = _drawn(train, "dataset", custom, cache, split_ratio=ratio, shuffle=shuffle)
        custom = attrs.evolve(custom, train_jsonl=files, val_jsonl=split or custom.val_jsonl)
    if custom.val_dataset:
        # Counts are taken from the front, as ms-swift does.
        _, files = _drawn(val, "val_dataset", custom, cache, split_ratio=1, shuffle=False)
        custom = attrs.evolve(custom, val_jsonl=files)
    drawn = attrs.evolve(custom, dataset=(), val_dataset=(), split_dataset_ratio=0.0)
    return attrs.evolve(config, model=model, custom=drawn)


def records_cache(config: RunConfig) -> Path:
    """Return the folder of copies of data files that cannot be read in any order."""
    return Path(config.custom.records_cache or Path(config.training.output_dir) / "records")


def _with_model(model: ModelConfig) -> ModelConfig:
    if not is_id(model.model):
        return model
    folder = cached(model.model, "model")
    if folder is None and model.download:
        from packplan.adapters.conversion.hubs import download_model

        folder = download_model(model.model)
    # What no cache holds is refused where the folder is first needed.
    return model if folder is None else attrs.evolve(model, model=str(folder))


@attrs.frozen
class _Named:
    """A data set that an entry names, and its files."""

    entry: DataEntry
    files: tuple[str, ...]


def _is_data_file(entry: DataEntry) -> bool:
    """Return whether an entry is a file, or a folder that `datasets` saved, to be read as it is."""
    return Path(entry.name).is_file() or (Path(entry.name) / "dataset_info.json").is_file()


def _folder_of(entry: DataEntry) -> Path | None:
    """Return the folder of an entry, or of a cache's copy of it; None if neither is here."""
    return Path(entry.name) if Path(entry.name).is_dir() else cached(entry.name, "dataset", hub=entry.hub)


def _missing(names: Sequence[str], key: str) -> Iterator[Fault]:
    """Yield each entry of `custom.<key>` that is not on this machine, and what to do."""
    for name in names:
        entry = parse_entry(name, exists=os.path.exists)
        if _is_data_file(entry) or _folder_of(entry) is not None:
            continue
        if is_id(entry.name):
            reason = (
                f"has {name}, which is no file here, and no local cache holds it: download it with "
                f"`{download_command(entry.name, 'dataset', hub=entry.hub)}`, or set model.download: true"
            )
        else:
            reason = f"has {name}, which is no file, no folder and no id of a hub"
        yield Fault(f"custom.{key}", reason)


def _files(names: Sequence[str], key: str, custom: CustomConfig, cache: Path) -> list[_Named]:
    """Return the files of each entry."""
    found = []
    for name in names:
        entry = parse_entry(name, exists=os.path.exists)
        if _is_data_file(entry):
            found.append(_Named(entry, (entry.name,)))
            continue
        folder = _folder_of(entry)
        from packplan.adapters.conversion.hubs import write_data_set

        written = write_data_set(entry, folder, cache, (custom.model_name, custom.model_author), key=f"custom.{key}")
        found.append(_Named(entry, (str(written),)))
    return found


def _drawn(
    named: Sequence[_Named], key: str, custom: CustomConfig, cache: Path, *, split_ratio: float, shuffle: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """
    Return the files that are trained, and those of the share *split_ratio*, which are evaluated.
    """
    counts = [one.entry.count for one in named]
    if split_ratio in {0, 1} and not any(counts):
        files = tuple(file for one in named for file in one.files)
        return ((), files) if split_ratio else (files, ())
    records = [open_records(one.files, cache=cache) for one in named]
    try:
        drawn = draw_records(
            [len(one) for one in records], counts, split_ratio=split_ratio, shuffle=shuffle, seed=custom.data_seed
        )
    except ValueError as error:
        raise DataSetError(f"custom.{key} {error}") from None
    train, val = draw_files(records, drawn, cache)
    return (str(train),), () if val is None else (str(val),)
