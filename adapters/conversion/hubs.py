"""Models and data sets of hubs, fetched and read by ms-swift's own code."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swift.dataset import DATASET_MAPPING
from swift.dataset.dataset_syntax import DatasetSyntax
from swift.dataset.loader import DatasetLoader, init_self_cognition_preprocessor
from swift.utils import safe_snapshot_download

from packplan.adapters import files
from packplan.adapters.hub_caches import prefers_hugging_face
from packplan.adapters.samples.files import as_json
from packplan.core.errors import ConfigError, counted
from packplan.core.samples import DataEntry

log = logging.getLogger(__name__)

_ROWS = "rows.jsonl"


def download_model(name: str) -> Path:
    """Return the folder of a model that ms-swift downloads; ConfigError if it cannot."""
    try:
        return Path(safe_snapshot_download(name))
    except Exception as error:  # whatever a hub's library raises
        raise ConfigError.at("model.model", f"{name} cannot be downloaded: {_brief(error)}") from error


def write_data_set(
    entry: DataEntry, folder: Path | None, cache: Path, names: Sequence[Sequence[str]], *, key: str
) -> Path:
    """
    Return the file of a data set's records, as ms-swift's loader makes them; written if it is not
    there.

    Args:
        entry: The data set; its count is not looked at.
        folder: Folder of the data set on this machine; None lets ms-swift download it.
        cache: Folder that the file's folder stands in.
        names: The model's names and its authors' in `swift/self-cognition`.
        key: Key of the YAML, for errors.

    Raises:
        ConfigError: ms-swift cannot load it.
    """
    inputs = {
        "name": entry.name, "subsets": entry.subsets, "hub": entry.hub, "version": version("ms-swift"),
        "files": [] if folder is None else sorted(
            (str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns)
            for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"
        ),
        "names": [list(texts) for texts in names],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    target = cache / f"data-{digest[:32]}" / _ROWS
    with files.writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with files.held(target.with_name("lock"), f"for a copy of {Path(entry.name).name}"):
        if not target.is_file():
            try:
                rows = _load(entry, folder, names)
            except Exception as error:  # whatever ms-swift and the libraries below it raise
                reason = f"has {entry.name}, which ms-swift cannot load: {_brief(error)}"
                raise ConfigError.at(key, reason) from error
            files.write_chunks(target, _lines(rows))
            log.info("%s: %s of %s, as ms-swift reads them", target, counted(len(rows), "record"), entry.name)
    return target


def _load(entry: DataEntry, folder: Path | None, names: Sequence[Sequence[str]]) -> Any:
    """Return a data set as ms-swift's loader makes it, all of its records."""
    init_self_cognition_preprocessor(DATASET_MAPPING.get("self-cognition"), *(list(texts) or None for texts in names))
    of_hf = prefers_hugging_face() if folder is None else "datasets--" in str(folder)
    from_hf = entry.hub == "hf" or (entry.hub is None and of_hf)
    named = DatasetSyntax(entry.name, list(entry.subsets))
    meta = named.get_dataset_meta(from_hf)
    placed = DatasetSyntax(entry.name if folder is None else str(folder), list(entry.subsets))
    loader: Any = meta.loader(strict=True)
    assert isinstance(loader, DatasetLoader)  # noqa: S101  # or a class below it
    return loader.load(placed, meta, use_hf=from_hf)


def _lines(rows: Any) -> Iterator[bytes]:
    for row in rows:
        record = {name: _without_none(as_json(value)) for name, value in row.items() if value is not None}
        yield json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _without_none(value: Any) -> Any:
    """Return a value without the keys that a table's other rows have, and this one does not."""
    if isinstance(value, dict):
        return {name: _without_none(held) for name, held in value.items() if held is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
