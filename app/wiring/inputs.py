"""
A run's model and data as they are named -> folders and files on this machine: ids from the caches
of hubs, and what `#count` and `custom.split_dataset_ratio` draw.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import attrs

from packplan.adapters.config.run import load_mixes
from packplan.adapters.conversion.drawn import draw_files
from packplan.adapters.hub_caches import cached, download_command, is_id
from packplan.adapters.model_folder import model_faults
from packplan.adapters.samples.files import open_records
from packplan.adapters.samples.remote.copies import local_files
from packplan.core.config import CustomConfig, ModelConfig, RunConfig
from packplan.core.errors import ConfigError, DataSetError, Fault
from packplan.core.samples import DataEntry, draw_records, is_place, parse_entry, without_credentials

Run = TypeVar("Run", bound=RunConfig)


def with_inputs(config: Run) -> Run:
    """
    Return a run whose model is a folder, if a cache holds it, and whose data are files.

    Raises:
        ConfigError: Data that are named by id are not on this machine; the model too, if that is
            not there either. Or a mix that is planned cannot be read.
        DataSetError: They are too few to split.
    """
    model = _with_model(config.model)
    custom = config.custom
    if custom.fusion_schedule is not None and custom.fusion_config is not None:
        custom = attrs.evolve(custom, train_jsonl=load_mixes(custom.fusion_config).files)
    custom = _with_copies(custom, records_cache(config))
    if not custom.dataset and not custom.val_dataset:
        return attrs.evolve(config, model=model, custom=custom)
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


def entry_of(name: str) -> DataEntry:
    """Return the data set that an entry names; ValueError if its hub or count is invalid."""
    return parse_entry(name, exists=lambda text: Path(text).exists() or (is_place(text) and "#" not in text))


def is_entry(name: str) -> bool:
    """
    Return whether a name is that of a data set of a hub, or of a place with a count, and no file or
    pattern; ValueError if its count is invalid.
    """
    if is_place(name):
        return "#" in name
    if glob.has_magic(name):
        return False
    return name.lower().startswith(("hf::", "ms::")) or ("::" not in name and is_id(entry_of(name).name))


def _is_data_file(entry: DataEntry) -> bool:
    """Return whether an entry is a file, or a folder that `datasets` saved, to be read as it is."""
    return Path(entry.name).is_file() or (Path(entry.name) / "dataset_info.json").is_file()


def _folder_of(entry: DataEntry) -> Path | None:
    """Return the folder of an entry, or of a cache's copy of it; None if neither is here."""
    return Path(entry.name) if Path(entry.name).is_dir() else cached(entry.name, "dataset", hub=entry.hub)


def _missing(names: Sequence[str], key: str) -> Iterator[Fault]:
    """Yield each entry of `custom.<key>` that is not on this machine, and what to do."""
    for name in names:
        entry = entry_of(name)
        if is_place(entry.name) or _is_data_file(entry) or _folder_of(entry) is not None:
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
        entry = entry_of(name)
        if is_place(entry.name):
            try:
                found.append(_Named(entry, tuple(map(str, local_files(entry.name, cache)))))
            except DataSetError as error:
                raise ConfigError.at(f"custom.{key}", str(error)) from None
            continue
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
