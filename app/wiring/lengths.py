"""Tables of lengths: what writes them for any tool, and runs that take their lengths from one."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from packplan.adapters import files
from packplan.adapters.config.layers import read_document
from packplan.adapters.config.run import parse_config
from packplan.adapters.stores.length_table import read_length_table, read_length_table_key, write_length_table
from packplan.app.planning.split import KnownTable, Split
from packplan.app.wiring.runs import trainer_keys, with_inputs
from packplan.app.wiring.stores import records_cache
from packplan.core.config.run import RunConfig
from packplan.core.errors import ArgumentError, ConfigError, StaleError
from packplan.core.ports import LengthSource, Stored
from packplan.core.samples.tables import KnownLengths, media_identity, num_media

log = logging.getLogger(__name__)


NO_LIMIT = 2**31 - 1
"""Packing length of samples that are measured for no run; an input of lengths only where samples
are truncated."""


def measuring_run(
    data: Sequence[str], output: Path, *, model: str | None, path: str | None, overrides: Sequence[str]
) -> RunConfig:
    """
    Return the run that measures data, and trains nothing; its artefacts are in `store_folder`.

    Args:
        data: Data files; empty takes all of the YAML's.
        output: Table to write.
        model: Model; None takes the YAML's.
        path: YAML of a run with these keys; None has none.
        overrides: Values for single keys.

    Raises:
        ConfigError: All faults of the configuration.
    """
    own = {
        "custom": {"train_jsonl": list(data)},
        "template": {"max_length": NO_LIMIT},
        "training": {"output_dir": str(store_folder(output)), "packing": False},
    }
    document = own if path is None else read_document(Path(path))
    named = [*overrides, *([f"model.model={json.dumps(model)}"] if model else [])]
    config = parse_config(document, path or "packplan measure", trainer_keys(), overrides=named)
    if data:
        names = {name: source for name, source in config.custom.source_names.items() if name in data}
        custom = attrs.evolve(
            config.custom, train_jsonl=tuple(data), val_jsonl=(), fusion_config=None, fusion_schedule=None,
            source_names=names,
        )  # fmt: skip
        config = attrs.evolve(config, custom=custom)
    config = with_inputs(config)
    custom, training = config.custom, config.training
    paths = tuple(dict.fromkeys([*custom.train_jsonl, *custom.val_jsonl]))
    cache = custom.records_cache if path is None else str(records_cache(config))
    custom = attrs.evolve(
        custom, train_jsonl=paths, val_jsonl=(), fusion_config=None, fusion_schedule=None, records_cache=cache
    )
    if custom.media_cache is None:
        custom = attrs.evolve(custom, media_cache=str(store_folder(output) / "media"))
    training = attrs.evolve(training, output_dir=str(store_folder(output)))
    return attrs.evolve(config, custom=custom, training=training)


def store_folder(output: Path) -> Path:
    """Return the folder of what is measured until a table is written."""
    return output.with_name(f"{output.name}.measuring")


def require_table(output: Path) -> None:
    """Refuse an output that is no table of lengths and exists, or has no folder; ConfigError."""
    if not output.parent.is_dir():
        raise ConfigError.at("--output", f"is {output}, whose folder does not exist: make it")
    if output.exists():
        with _named("--output", "; name another file"):
            read_length_table_key(output)


@contextlib.contextmanager
def naming_output(output: Path) -> Iterator[None]:
    """Name the table, where it or what was measured for it is of other inputs."""
    try:
        yield
    except StaleError as error:
        if error.kind not in {"stale_lengths", "table_lengths"}:
            raise
        reason = f"{error}; name another file, or remove it and {store_folder(output)}"
        raise ConfigError.at("--output", reason) from None


def open_known(path: str | Path | None, source: LengthSource, *, key: str = "custom.lengths") -> KnownTable | None:
    """
    Return the table of known lengths that a run names, if it does.

    Args:
        path: The table; None without one.
        source: Samples, whose lengths it has to hold.
        key: Key or option that names it.

    Raises:
        ConfigError: The table cannot be read.
        StaleError: It was measured from other inputs.
    """
    if path is None:
        return None
    with _named(key):
        measured = read_length_table_key(Path(path))
    if differences := measured.differences(source.fingerprint()):
        raise attrs.evolve(StaleError.lengths(str(path), differences), kind="table_lengths")

    def read() -> KnownLengths:
        with _named(key):
            return read_length_table(Path(path))

    return KnownTable(str(path), read)


@contextlib.contextmanager
def _named(key: str, remedy: str = "") -> Iterator[None]:
    """Name the key or the option that names a table which cannot be used."""
    try:
        yield
    except ArgumentError as error:
        raise ConfigError.at(key, f"{error}{remedy}") from None


def publish_table(split: Split, stored: Stored, output: Path) -> None:
    """
    Write the table of measured records, and remove what was kept until then.

    Args:
        split: Records that were measured.
        stored: Their measurements.
        output: Table to write, or to replace.
    """
    source = split.source
    # One after the other: as texts, two million of them would be 240 MB.
    identities = (
        media_identity(*source.identity(index)) if has_media else source.identity(index)[0]
        for index, has_media in enumerate(num_media(stored.table).astype(bool).tolist())
    )
    write_length_table(stored, identities, output, key=source.fingerprint(), files=split.encoder.data_files())
    folder = store_folder(output)
    with files.writing(folder):
        shutil.rmtree(folder)
