"""
Mixes of data sets that a run names; files of the records that `--list-failures` looks at.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from packplan.adapters import files
from packplan.adapters.config.run import load_mixes
from packplan.adapters.samples.files import copied_line, file_faults, open_records
from packplan.app.wiring.inputs import records_cache
from packplan.app.wiring.stores import writing_for
from packplan.core.config import RunConfig
from packplan.core.epochs import EpochRecipe
from packplan.core.errors import ConfigError, DataSetError, Fault, counted
from packplan.core.mixes import Mixes, mixes_faults, stream_faults
from packplan.core.ports import Records


def recipe_of(config: RunConfig, split: str) -> EpochRecipe | None:
    """
    Return the recipe of a split's epochs; None where all have one plan.

    Args:
        config: The run.
        split: `train` or `eval`.

    Raises:
        ConfigError: All faults of the mix.
    """
    custom, training = config.custom, config.training
    if split != "train":
        return None
    if custom.fusion_schedule is None:
        return EpochRecipe() if training.packing_epochs == "replanned" else None
    assert custom.fusion_config is not None  # noqa: S101  # `faults` refuses a schedule of no mix
    return EpochRecipe(mixes=load_mixes(custom.fusion_config), seed=training.seed)


log = logging.getLogger(__name__)


def open_mixes(path: str, *, cache: Path, measured: bool = False) -> tuple[Mixes, list[Records]]:
    """
    Read the mixes of all epochs, and the records of each of their files.

    Args:
        path: The mixes, a YAML.
        cache: Folder of the copies of packed sources.
        measured: Whether samples are measured before they are drawn, as `by: tokens` needs.

    Raises:
        ConfigError: All that is wrong with them.
    """
    mixes = load_mixes(path)
    opened: dict[str, Records] = {}
    reasons: dict[str, str] = {}
    for file in mixes.files:
        try:
            opened[file] = open_records((file,), cache=cache)
        except DataSetError as error:
            reasons[file] = str(error)
    faults = [
        Fault(f"{mixes.place(entry)}sources[{number}].jsonl", reasons[source.jsonl])
        for entry, mix in enumerate(mixes.entries)
        for number, source in enumerate(mix.sources)
        if source.jsonl in reasons
    ]
    faults += () if measured else stream_faults(mixes)
    if not faults:
        faults = list(mixes_faults(mixes, [len(records) for records in opened.values()]))
    if not faults:  # patterns may have files in common
        faults = [Fault("curriculum" if mixes.is_curriculum else "sources", text) for text in file_faults(mixes.files)]
    if faults:
        raise ConfigError(path, tuple(faults))
    return mixes, list(opened.values())


def mixes_of(config: RunConfig) -> tuple[Mixes, list[Records]]:
    """
    Read the mixes of a run, `custom.fusion_config`, and the records of each of their files.

    Raises:
        ConfigError: All that is wrong with them, or `custom.source_names` names another file.
    """
    custom = config.custom
    assert custom.fusion_config is not None  # noqa: S101  # the caller has looked
    measured = custom.fusion_schedule == "planned"
    mixes, records = open_mixes(custom.fusion_config, cache=records_cache(config), measured=measured)
    known = {*mixes.files, *custom.val_jsonl}
    reason = "is no file of the mix, nor of custom.val_jsonl: write it as it is written there"
    faults = [Fault(f"custom.source_names.{name}", reason) for name in custom.source_names if name not in known]
    if faults:
        raise ConfigError("the configuration", tuple(faults))
    return mixes, records


def write_records(
    records: Records, output: Path, sources: Sequence[str], indices: Sequence[int], *, columns: Mapping[str, str]
) -> None:
    """
    Write some records to one JSON Lines file, in the folder of relative media that they name.

    Args:
        records: The data.
        output: The file; readers see it whole or not at all.
        sources: Names of the data files, which are not written over.
        indices: Which records, in this order.
        columns: Names of the records' keys -> names of `core.samples.READ`.

    Raises:
        ConfigError: The file cannot be written, or is one of the sources.
        RecordError: A copy would not be read as the same record.
    """
    _require_other("--write-good", output, sources)
    with writing_for("--write-good", output):
        files.write_chunks(output, (copied_line(records, index, output.parent, columns=columns) for index in indices))
    log.info("%s: %s", output, counted(len(indices), "record"))


@contextmanager
def writing_failures(output: Path, sources: Sequence[str]) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """
    Yield a function that writes one failure as a line of a JSON Lines file, which readers see whole
    at the end, or not at all.

    Args:
        output: The file, or a link to it.
        sources: Names of files that are not written over.

    Raises:
        ConfigError: The file cannot be written, or is one of the sources.
    """
    _require_other("--write-failures", output, sources)
    with ExitStack() as opened:
        with writing_for("--write-failures", output):
            file = opened.enter_context(files.publishing(output.resolve()))

        def write(failure: Mapping[str, str]) -> None:
            with writing_for("--write-failures", output):
                file.write(json.dumps(failure, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")

        yield write
        with writing_for("--write-failures", output):
            opened.pop_all().close()
    log.info("%s: all failures", output)


def _require_other(option: str, output: Path, sources: Sequence[str]) -> None:
    """Refuse to write over a folder or one of the sources."""
    if output.is_dir() or any(output.resolve() == Path(source).resolve() for source in sources):
        reason = "is a folder" if output.is_dir() else "is one of the sources, which would be lost"
        raise ConfigError.at(option, f"{output} {reason}: name another file")
