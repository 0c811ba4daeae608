"""Folders, stores and data files of a run on disk, and output files of commands."""

from pathlib import Path
from typing import Any

from packplan.adapters import files
from packplan.adapters.loaders.batches import read_saved_progress
from packplan.adapters.samples.data_files import open_records
from packplan.adapters.samples.data_set import FileRecords
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.lock import FolderLock
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.adapters.trainer_state import STATE, find_other_parts
from packplan.app.planning.schedule import zero_stage
from packplan.app.planning.split import Stores
from packplan.core.config.run import RunConfig
from packplan.core.errors import ArgumentError, ConfigError, CorruptArtefactError, NotBuiltError
from packplan.core.fingerprint import from_plain, unseal
from packplan.core.ports import StoredLengths, StoredPlan
from packplan.core.schedule import DAMAGED_STATE_REMEDY, ResumeState


def artefacts_folder(output_dir: str | Path) -> Path:
    """Return the folder of a run's artefacts: the run's verdicts, and a folder for each split."""
    return Path(output_dir) / "static_packing"


def open_stores(config: RunConfig, split: str) -> Stores:
    """Return the stores of a run's split."""
    training = config.training
    folder, known = artefacts_folder(training.output_dir) / split, training.packing_lengths_from
    source = artefacts_folder(known) / split if known else None
    if split == "eval" and config.custom.val_share:
        source = folder.with_name("train")  # it has measured the same records
    return Stores(DiskLengthStore(folder, lengths_from=source), DiskPlanStore(folder), FolderLock(folder))


def find_stored_plan(folder: Path, split: str) -> tuple[StoredPlan, StoredLengths | None]:
    """
    Return the stored plan of a split, and its lengths if they are in the same folder.

    Args:
        folder: Output folder of a run, or a folder of artefacts.
        split: `train` or `eval`.

    Raises:
        NotBuiltError: The folder has no stored plan.
    """
    for place in (artefacts_folder(folder) / split, folder / split, folder):
        if (plan := DiskPlanStore(place).inspect()) is not None:
            return plan, DiskLengthStore(place).inspect()
    raise NotBuiltError(str(folder), f"holds no {split} plan")


def read_resume_state(folder: Path) -> ResumeState | None:
    """
    Return the resume state in a checkpoint of a static plan; None if there is no trainer state.

    Raises:
        CorruptArtefactError: The trainer's state is damaged.
        ArgumentError: The checkpoint was not trained from a plan.
    """
    if not (folder / STATE).exists():
        return None
    saved = read_saved_progress(folder)
    if "plan" not in saved:
        raise ArgumentError("host", f"{folder} was trained from a stream, which has no plan", {"folder": str(folder)})
    try:
        return from_plain(ResumeState, unseal(saved))
    except ValueError as error:
        raise CorruptArtefactError(str(folder / STATE), str(error), DAMAGED_STATE_REMEDY) from None


def records_cache(config: RunConfig) -> Path:
    """Return the folder of the copies of a run's data files."""
    return Path(config.custom.records_cache or Path(config.training.output_dir) / "records")


def open_split_records(config: RunConfig, split: str) -> FileRecords:
    """
    Open the data files of a split, to count and locate records; DataSetError if a file is
    unreadable.
    """
    paths = config.custom.train_jsonl if split == "train" else config.custom.val_jsonl
    return open_records(paths, cache=records_cache(config))


def require_parent(output: Path) -> None:
    """Refuse the file that --output names if its folder is missing."""
    if not output.parent.is_dir():
        raise ConfigError.for_key("--output", f"is {output}, whose folder does not exist: create it")


def write_new_file(path: Path, text: str, *, replaces: str | None = None) -> None:
    """
    Write the file that --output names; ConfigError if the file exists with other content.

    Args:
        path: File to write.
        text: Content of the file.
        replaces: An existing file is replaced if it begins with this text; None replaces no file.
    """
    require_parent(path)
    held = path.read_bytes() if path.is_file() else b"" if path.exists() else None
    if held not in {None, text.encode()} and (replaces is None or not held.startswith(replaces.encode())):
        raise ConfigError.for_key("--output", f"is {path}, which has other content: name another file, or remove it")
    files.write_bytes(path, text.encode())


def refuse_other_parts(key: str, folder: str, deepspeed: Any, *, num_ranks: int) -> None:
    """
    Refuse a checkpoint whose optimizer is sharded in another way than this run loads it, or which
    lacks files.

    Args:
        key: Key that names the checkpoint.
        folder: Folder of the checkpoint.
        deepspeed: DeepSpeed settings of the run, or their file; None without DeepSpeed.
        num_ranks: Number of ranks of the run.

    Raises:
        ConfigError: The run cannot load the checkpoint's optimizer state.
    """
    stage = zero_stage(deepspeed) if deepspeed else None
    if fact := find_other_parts(Path(folder), stage=stage, num_ranks=num_ranks):
        raise ConfigError.for_key(key, f"is {folder}, but {fact}")
