"""
Constructs most adapters that need neither torch nor ms-swift; `app.wiring.training` constructs the
others.

What looks at plans imports this one alone, and answers at once.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packplan.adapters import files
from packplan.adapters.config.devices import device_faults, surely_without_gpu
from packplan.adapters.config.run import load_config, load_mixes, load_rl_config
from packplan.adapters.config.trainer_keys import GRPO_TABLE, TrainerKey, lacking, stored_keys
from packplan.adapters.model_folder import model_faults
from packplan.adapters.ranks import environment
from packplan.adapters.samples.files import file_faults, open_records
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.lock import FolderLock
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.planning.split import Stores
from packplan.app.wiring.inputs import records_cache, with_inputs
from packplan.core.config import RlConfig, RunConfig
from packplan.core.errors import ConfigError, Fault, OutputError, RunError
from packplan.core.ports import Records


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """
    Read a run's YAML, and make what it names ready: models and data of hubs, data that are drawn.

    Args:
        path: The YAML.
        overrides: Values for single keys, as `training.learning_rate=1e-4`, in place of the YAML's.

    Raises:
        ConfigError: All faults of the configuration.
    """
    return with_inputs(load_config(path, trainer_keys(), overrides=overrides))


def read_rl_config(path: str | Path, overrides: Sequence[str] = ()) -> RlConfig:
    """Read the YAML of a run of reinforcement learning, as `read_config` does."""
    keys = stored_keys(GRPO_TABLE)
    if keys is None:
        from packplan.app.wiring.grpo import installed_keys

        keys = installed_keys()
    return with_inputs(load_rl_config(path, keys, overrides=overrides))


def trainer_keys() -> Mapping[str, TrainerKey]:
    """Return the settings that `training.` passes on to the installed ms-swift."""
    keys = stored_keys()
    if keys is None:
        # Of another version than the table: its own keys take seconds to import.
        from packplan.adapters.trainer.keys import installed_keys

        keys = installed_keys()
    return keys


def require_ranks() -> int:
    """
    Return the number of ranks that torchrun's environment describes, before torch is imported; 1
    where there is none.

    Raises:
        ConfigError: It is incomplete, or contradicts itself.
    """
    return environment.require_ranks()


@contextlib.contextmanager
def ranks_refuse_together() -> Iterator[None]:
    """
    Check torchrun's environment, and let what one rank refuses inside end all: it tells the others
    when they meet, instead of leaving them to wait for it.

    Raises:
        ConfigError: The environment is incomplete, or contradicts itself.
    """
    several = require_ranks() > 1
    try:
        yield
    except Exception as error:
        if several:
            from packplan.adapters.ranks.torch_group import meet  # loads torch

            with contextlib.suppress(RuntimeError, RunError):  # they do not come, or refuse too
                meet(refusal=error)
        raise


def require_inputs(config: RunConfig, *, loads: bool = False, trains: bool = False) -> None:
    """
    Refuse a model or data that are not there, before libraries are imported that take seconds.

    Args:
        config: The run.
        loads: Whether the model is loaded: its weights have to be whole.
        trains: Whether the trainer is built: its packages, files and devices have to be there too.

    Raises:
        ConfigError: All that is not there.
    """
    found = list(model_faults(config.model, loads=loads))
    custom = config.custom
    if custom.fusion_schedule is not None and custom.fusion_config is not None:
        found += _mix_faults(custom.fusion_config)
    else:
        found += [Fault("custom.train_jsonl", reason) for reason in file_faults(custom.train_jsonl)]
    found += [Fault("custom.val_jsonl", reason) for reason in file_faults(custom.val_jsonl)]
    if trains:
        trainer = config.training.trainer
        on_cpu = bool(trainer.get("use_cpu")) or surely_without_gpu()
        found += [*lacking(trainer), *device_faults(trainer, on_cpu=on_cpu)]
    if found:
        raise ConfigError("the configuration", tuple(found))


def _mix_faults(path: str) -> list[Fault]:
    """Return the faults of the files of a mix, each by its place; else of all of them together."""
    key, places = "custom.fusion_config", load_mixes(path).places
    alone = [Fault(f"{key}.{place}", reason) for file, place in places.items() for reason in file_faults((file,))]
    return alone or [Fault(key, reason) for reason in file_faults(places)]


def split_folder(output_dir: str, split: str) -> Path:
    """Return the folder of a split's artefacts."""
    return Path(output_dir) / "static_packing" / split


def open_stores(config: RunConfig, split: str) -> Stores:
    """Return the stores of a run's split."""
    return stores_in(config.training.output_dir, split, lengths_from=config.training.packing_lengths_from)


def stores_in(output_dir: str, split: str, *, lengths_from: str | None = None) -> Stores:
    """
    Return the stores of a split in an output folder.

    Args:
        output_dir: Output folder of a run.
        split: `train` or `eval`.
        lengths_from: Output folder of another run, whose lengths are taken over where this one has
            none.
    """
    folder = split_folder(output_dir, split)
    lengths = DiskLengthStore(folder, lengths_from=split_folder(lengths_from, split) if lengths_from else None)
    return Stores(lengths, DiskPlanStore(folder), FolderLock(folder))


def has_split(output_dir: str, split: str) -> bool:
    """Return whether an output folder has a place for a split's artefacts."""
    return split_folder(output_dir, split).is_dir()


def records_of(config: RunConfig, split: str) -> Records:
    """
    Open the data files of a split, to count its records or say where they stand; DataSetError if
    one cannot be read.
    """
    paths = config.custom.train_jsonl if split == "train" else config.custom.val_jsonl
    return open_records(paths, cache=records_cache(config))


def page_target(path: Path) -> Path:
    """
    Return the file of a page, or the target of a link; ConfigError if the page replaced something
    else.
    """
    target = path.resolve()
    if target.suffix.lower() not in {".html", ".htm"} or (target.exists() and not target.is_file()):
        raise ConfigError.at("--output", f"is {path}, but has to be a file that ends in .html: name one")
    return target


def write_page(path: Path, page: str) -> None:
    """Publish a page; ConfigError if it cannot be written, or replaced something else."""
    target = page_target(path)
    with writing_for("--output", path):
        files.write_bytes(target, page.encode())


@contextlib.contextmanager
def writing_for(option: str, output: Path) -> Iterator[None]:
    """Turn a refusal to write the file of an option into a ConfigError."""
    try:
        with files.writing(output):
            yield
    except OutputError as error:
        raise ConfigError.at(option, f"{output} cannot be written: {error.reason}") from error


def write_new(path: Path, text: str) -> None:
    """
    Write the file of --output; ConfigError if another text is there, or it cannot be written.
    """
    if path.exists() and (not path.is_file() or path.read_text(encoding="utf-8") != text):
        raise ConfigError.at("--output", f"{path} exists and holds something else: name another file, or remove it")
    with writing_for("--output", path):
        files.write_bytes(path, text.encode())


@contextlib.contextmanager
def training_alone(folder: Path, *, key: str = "training.output_dir") -> Iterator[None]:
    """
    Make a folder, which a *key* names, and keep other runs from training into it until the block
    ends.

    Raises:
        ConfigError: Another run does so now, and both would write the same checkpoints.
        OutputError: It cannot be written.
    """

    def refuse() -> str:
        reason = f"is {folder}, which another run trains into: both would write its checkpoints; name another folder"
        raise ConfigError.at(key, reason)

    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with files.held(folder / "train.lock", f"to train into {folder}", wait=refuse):
        yield
