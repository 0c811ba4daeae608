"""Folders, stores and data files of a run on disk, and new files that commands write."""

from pathlib import Path

from packplan.adapters import files
from packplan.adapters.samples.data_files import open_records
from packplan.adapters.samples.data_set import FileRecords
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.lock import FolderLock
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.planning.split import Stores
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError


def artefacts_folder(output_dir: str | Path) -> Path:
    """Return the folder of a run's verdicts, with a folder in it for each split's artefacts."""
    return Path(output_dir) / "static_packing"


def open_stores(config: RunConfig, split: str) -> Stores:
    """Return the stores of a run's split."""
    training = config.training
    folder, known = artefacts_folder(training.output_dir) / split, training.packing_lengths_from
    source = artefacts_folder(known) / split if known else None
    if split == "eval" and config.custom.val_share:
        source = folder.with_name("train")  # which has measured the same records
    return Stores(DiskLengthStore(folder, lengths_from=source), DiskPlanStore(folder), FolderLock(folder))


def records_cache(config: RunConfig) -> Path:
    """Return the folder of a run's copies of data files."""
    return Path(config.custom.records_cache or Path(config.training.output_dir) / "records")


def open_split_records(config: RunConfig, split: str) -> FileRecords:
    """
    Open the data files of a split, to count or locate its records; DataSetError if a file cannot be
    read.
    """
    paths = config.custom.train_jsonl if split == "train" else config.custom.val_jsonl
    return open_records(paths, cache=records_cache(config))


def write_new_file(path: Path, text: str) -> None:
    """Write the file of --output; ConfigError if it exists with another content."""
    if path.exists() and (not path.is_file() or path.read_bytes() != text.encode()):
        raise ConfigError.for_key("--output", f"{path} exists and holds something else: name another file or remove it")
    files.write_bytes(path, text.encode())
