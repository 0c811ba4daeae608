"""Tables of lengths for other tools, and for runs that read a table instead of measuring."""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from packplan.adapters import files
from packplan.adapters.config.run import parse_config
from packplan.adapters.stores.length_table import read_length_table, read_length_table_key, write_length_table
from packplan.app.opening.runs import read_config, resolve_inputs, trainer_keys
from packplan.app.opening.stores import records_cache, require_parent
from packplan.app.planning.split import KnownTable, Split
from packplan.core.config.run import RunConfig
from packplan.core.errors import ArgumentError, ConfigError, StaleError
from packplan.core.ports import LengthSource, StoredRows
from packplan.core.samples.tables import KnownLengths, identity_with_media, num_media

log = logging.getLogger(__name__)


NO_LIMIT = 2**31 - 1
"""
Packing length for measuring without a run. The length is so large that no sample is truncated.
"""


def config_to_measure(
    data: Sequence[str], output: Path, *, model: str | None, path: str | None, overrides: Sequence[str]
) -> RunConfig:
    """
    Return a run that measures data without training. The run stores its artefacts in
    `interim_folder`.

    Args:
        data: Data files; empty if the YAML names them.
        output: Table to write.
        model: Folder or id of the model; None if the YAML names the model.
        path: YAML of a run whose model, template and data are used; None without a YAML.
        overrides: Values for single keys, such as `template.max_pixels=200704`.

    Raises:
        ConfigError: The configuration has faults; the error lists all of them.
    """
    own = {
        "model": {"model": model},
        "custom": {"train_jsonl": list(data)},
        "template": {"max_length": NO_LIMIT},
        "training": {"output_dir": str(interim_folder(output)), "packing": False},
    }
    if path is None:
        config = resolve_inputs(parse_config(own, "packplan measure", trainer_keys(), overrides=overrides))
    else:
        config = read_config(path, overrides)
    custom, training = config.custom, config.training
    custom = attrs.evolve(
        custom, train_jsonl=tuple(dict.fromkeys([*custom.train_jsonl, *custom.val_jsonl])), val_jsonl=(),
        fusion_config=None, fusion_schedule=None, records_cache=str(records_cache(config)),
        media_cache=custom.media_cache or str(interim_folder(output) / "media"),
    )  # fmt: skip
    return attrs.evolve(config, custom=custom, training=attrs.evolve(training, output_dir=str(interim_folder(output))))


def interim_folder(output: Path) -> Path:
    """Return the folder that stores measurements until the table *output* is written."""
    return output.with_name(f"{output.name}.measuring")


def refuse_other_output(output: Path) -> None:
    """
    Refuse *output* if it is another kind of file than a table of lengths, or if its folder is
    missing.
    """
    require_parent(output)
    if output.exists():
        with _wrap_key_errors("--output", "; name another file"):
            read_length_table_key(output)


@contextlib.contextmanager
def wrap_output_errors(output: Path) -> Iterator[None]:
    """Convert a StaleError about the table or its measurements to a ConfigError about --output."""
    try:
        yield
    except StaleError as error:
        if error.kind not in {"stale_lengths", "table_lengths"}:
            raise
        reason = f"cannot be continued: {error.fact}; name another file, or remove it and {interim_folder(output)}"
        raise ConfigError.for_key("--output", reason) from None


def open_known_lengths(path: str | Path, source: LengthSource, *, key: str = "custom.lengths") -> KnownTable:
    """
    Open a table of lengths, which a run uses instead of measuring.

    Args:
        path: Path of the table.
        source: Source of the samples whose lengths are needed.
        key: Key or option that names the table.

    Raises:
        ConfigError: The table cannot be read.
        StaleError: The table was measured from other inputs.
    """
    with _wrap_key_errors(key):
        measured = read_length_table_key(Path(path))
    if differences := measured.differences(source.fingerprint()):
        raise attrs.evolve(StaleError.for_lengths(str(path), differences), kind="table_lengths")

    def read_table() -> KnownLengths:
        with _wrap_key_errors(key):
            return read_length_table(Path(path))

    return KnownTable(str(path), read_table)


@contextlib.contextmanager
def _wrap_key_errors(key: str, remedy: str = "") -> Iterator[None]:
    """
    Convert an ArgumentError in this context to a ConfigError about *key*, which names a table.
    """
    try:
        yield
    except ArgumentError as error:
        raise ConfigError.for_key(key, f"cannot be used, since {error}{remedy}") from None


def publish_table(split: Split, stored: StoredRows, output: Path) -> None:
    """
    Write the table of measured records, and remove their temporary folder.

    Args:
        split: Split whose records are measured.
        stored: Measurements of the split's samples.
        output: Path of the table to write or replace.
    """
    source = split.source
    # One after the other: as texts, two million of them would be 240 MB.
    identities = (
        identity_with_media(*source.digest_and_folder(index)) if has_media else source.digest_and_folder(index)[0]
        for index, has_media in enumerate(num_media(stored.table).astype(bool).tolist())
    )
    write_length_table(stored, identities, output, key=source.fingerprint(), files=split.encoder.data_files())
    folder = interim_folder(output)
    with files.wrap_write_errors(folder):
        shutil.rmtree(folder)
