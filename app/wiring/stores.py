"""
The only place that constructs adapters that need neither torch nor ms-swift; `app.wiring.training`
constructs the others.

What looks at plans imports this one alone, and answers at once.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adapters import files
from adapters.config.run import load_config
from adapters.config.trainer_keys import lacking, stored_keys
from adapters.model_folder import config_model_type, model_sizes
from adapters.samples.jsonl import JsonlRecords
from adapters.stores.lengths import DiskLengthStore
from adapters.stores.lock import FolderLock
from adapters.stores.plans import DiskPlanStore
from app.planning.split import Stores
from core.config import RunConfig
from core.equality import NATIVE, SHARED_ROWS, Attention, check_isolation, choose_attention
from core.errors import ConfigError, CorruptArtefactError, OutputError
from core.ports import Origin, StoredLengths, StoredPlan


def read_config(path: str | Path, overrides: Sequence[str] = (), *, rl: bool = False) -> RunConfig:
    """
    Read a run's YAML.

    Args:
        path: The YAML.

        overrides: Values for single keys, as `training.learning_rate=1e-4`, in place of the YAML's.

        rl: Whether the run is one of reinforcement learning.

    Raises:
        ConfigError: All faults of the configuration.
    """
    keys = stored_keys()
    if keys is None:
        # Of another version than the table: its own keys take seconds to import.
        from adapters.trainer.keys import installed_keys

        keys = installed_keys()
    return load_config(path, keys, overrides=overrides, rl=rl)


def require_present(config: RunConfig) -> None:
    """
    Refuse settings of the trainer whose packages or files this machine does not have; ConfigError
    with all of them.
    """
    if found := tuple(lacking(config.training.trainer)):
        raise ConfigError("the configuration", found)


def attention_of(config: RunConfig) -> Attention:
    """
    Return the attention that a run takes.

    Raises:
        AttentionError: It cannot take the one that `model.attn_impl` names.

        ConfigError: The model's folder does not say what it is.
    """
    return choose_attention(
        config.model.attn_impl,
        model_type=config_model_type(config.model),
        context_parallel_size=config.policy.context_parallel_size,
    )


def sizes_of(config: RunConfig) -> Mapping[str, Any]:
    """Return the sizes that a run's model says it has; ConfigError if its folder does not say."""
    return model_sizes(config.model)


def refuse_leaks(config: RunConfig, *, on_cpu: bool | None = None) -> None:
    """
    Refuse an attention under which samples of a pack might see each other, or that does not run
    here.

    Args:
        config: The run.

        on_cpu: Whether it trains on a CPU; None if only its settings are known.

    Raises:
        PackplanError: The attention is refused, and what to do; IsolationError where packed samples
        might see each
            other.
    """
    name = attention_of(config).name
    check_isolation(
        config_model_type(config.model),
        NATIVE if name == SHARED_ROWS else name,
        flash_installed=find_spec("flash_attn") is not None,
        on_cpu=bool(config.training.trainer.get("use_cpu")) if on_cpu is None else on_cpu,
    )


def split_folder(output_dir: str, split: str) -> Path:
    """Return the folder of a split's artefacts."""
    return Path(output_dir) / "static_packing" / split


def open_stores(config: RunConfig, split: str) -> Stores:
    """Return where a split's lengths and plans are kept."""
    folder = split_folder(config.training.output_dir, split)
    other = config.training.packing_lengths_from
    lengths = DiskLengthStore(folder, lengths_from=split_folder(other, split) if other else None)
    return Stores(lengths, DiskPlanStore(folder), FolderLock(folder))


def stored_origin(folder: Path) -> Origin | None:
    """
    Return what the lengths in a split's folder are of, as their manifest says; CorruptArtefactError
    if it is damaged.
    """
    return DiskLengthStore(folder).origin()


def stored_lengths(folder: Path) -> StoredLengths | None:
    """
    Return the lengths in a split's folder, whatever they were measured from; CorruptArtefactError
    if damaged.
    """
    return DiskLengthStore(folder).inspect()


def stored_plan(folder: Path) -> StoredPlan | None:
    """
    Return the plan in a split's folder, whatever it was planned from; CorruptArtefactError if
    damaged.
    """
    return DiskPlanStore(folder).inspect()


def damage(folder: Path) -> Iterator[CorruptArtefactError]:
    """Yield every artefact in a split's folder that is not what was written."""
    yield from DiskLengthStore(folder).damage()
    yield from DiskPlanStore(folder).damage()


def open_records(paths: tuple[str, ...]) -> JsonlRecords:
    """Open data files, to say where records stand; DataSetError if one cannot be read."""
    return JsonlRecords(paths)


def page_target(path: Path) -> Path:
    """
    Return where a page is written, where a link points to if it is one; ConfigError if it replaced
    something else.
    """
    target = path.resolve()
    if target.suffix.lower() not in {".html", ".htm"} or (target.exists() and not target.is_file()):
        raise ConfigError.of("--output", f"is {path}, but has to be a file that ends in .html: name one")
    return target


def write_page(path: Path, page: str) -> None:
    """Publish a page; ConfigError if it cannot be written, or replaced something else."""
    target = page_target(path)
    try:
        files.write_bytes(target, page.encode())
    except OutputError as error:
        raise ConfigError.of("--output", f"{path} cannot be written: {error.reason}") from error


def open_slice(config: RunConfig, split: str, start: int, stop: int) -> tuple[DiskLengthStore, FolderLock]:
    """
    Return where a rank that measures with others keeps its slice, and the lock of that place.

    Args:
        config: The run.

        split: `train` or `eval`.

        start: First sample of the slice.

        stop: The sample behind its last.
    """
    folder = slices_folder(config, split) / f"{start}-{stop}"
    return DiskLengthStore(folder), FolderLock(folder)


def slices_folder(config: RunConfig, split: str) -> Path:
    """Return the folder of all slices, which is of no use once they are put together."""
    return Path(config.training.output_dir) / "static_packing" / "slices" / split


def remove_slices(config: RunConfig, split: str) -> None:
    """Remove the slices of ranks that measured together."""
    folder = slices_folder(config, split)
    with files.writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # the other split's are still there
                folder.parent.rmdir()
