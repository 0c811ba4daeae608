"""
Data files -> records: the one place that knows which format a file has.

What a file begins with decides, then its name: the first bytes of compressed files, Parquet and
Arrow are their own; CSV is known by its name; of other text, a JSON array begins with `[`, and JSON
Lines are what is left.
"""

from __future__ import annotations

import base64
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packplan.adapters.samples.data_set import FileRecords, RecordFile
from packplan.adapters.samples.formats.arrow_rows import ArrowFile, is_arrow_folder, parts_of_folder
from packplan.adapters.samples.formats.csv_rows import CsvFile, TsvFile
from packplan.adapters.samples.formats.json_array import ArrayFile
from packplan.adapters.samples.formats.jsonl import LinesFile
from packplan.adapters.samples.formats.rewriting import (
    DIGESTS,
    GZIP,
    ROWS,
    TEXT,
    ZSTD,
    copy_of,
    is_of,
    rewrite_parquet,
    rows_fault,
    text_fault,
    unpack,
)
from packplan.adapters.samples.formats.spans import Named, SpanFile
from packplan.core.errors import DataSetError
from packplan.core.ports import Records
from packplan.core.samples import IMAGE_KEYS, VIDEO_KEYS, inline_image

_PACKED = {".gz", ".zst", ".zstd"}

_PARQUET, _ARROW = b"PAR1", b"ARROW1"

_OTHER = {
    b"PK\x03\x04": "is a zip archive, or a table of an office program",
    b"BZh": "is packed by bzip2",
    b"\xfd7zXZ": "is packed by xz",
    b"7z\xbc\xaf": "is a 7z archive",
    b"Rar!": "is a rar archive",
    b"\x89HDF": "is an HDF5 file",
    b"SQLite format 3": "is a database",
}
"""What other files begin with -> what they are."""

_TABLES = {".csv": CsvFile, ".tsv": TsvFile}

_TAR = (257, b"ustar")

_NAMED = {".parquet": "Parquet", ".gz": "a gzip archive", ".zst": "a zstd archive", ".zstd": "a zstd archive"}

_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_ARRAY_OF_OBJECTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")

_HEAD = 4096


def open_records(paths: tuple[str, ...], *, max_line_bytes: int | None = None, cache: Path | None = None) -> Records:
    """
    Open data files, whose records follow each other.

    Args:
        paths: Names of the files, or patterns of names (`data/*.parquet`), or folders of
            `datasets.save_to_disk`.
        max_line_bytes: A record of more text is refused when it is asked for; None reads all.
        cache: Where copies are kept of what cannot be read in any order; None refuses such files.

    Raises:
        DataSetError: A file cannot be read, or holds no record.
        OutputError: There is no room for a copy.
    """
    opened = []
    for path in _expanded(paths):
        require_file(path)
        file = _open(path, max_line_bytes, cache)
        if not len(file):
            message = f"{path} holds no record: the data set is empty"
            raise DataSetError(message)
        opened.append(file)
    return FileRecords(opened)


def copy_faults(paths: tuple[str, ...], *, cache: Path | None) -> Iterator[tuple[str, str]]:
    """
    Yield each file that is not what its copy holds, or what is kept about it, and why; all of both
    is read.

    Args:
        paths: As `open_records` takes them.
        cache: Where the copies are.
    """
    for path in _expanded(paths):
        head = b"" if path.is_dir() else _head(path)
        if head.startswith((GZIP, ZSTD)):
            folder = copy_of(path, cache, unpack)
            fault = text_fault(path, folder) if is_of(path, folder) else _CHANGED
        elif head.startswith(_PARQUET):
            folder = copy_of(path, cache, rewrite_parquet)
            rows = ArrowFile([folder / ROWS], named=Named.from_path(path))
            fault = (
                rows_fault(path, folder, (rows.digests(row, row + 1) for row in range(len(rows))))
                if is_of(path, folder)
                else _CHANGED
            )
        else:
            folder, fault = None, None
        if fault is not None:
            yield str(path), f"{fault}: delete {folder}, and build again"
        elif (changed := _open(path, None, cache).kept_fault()) is not None:
            yield str(path), changed


_CHANGED = "the file is another one than its copy was made of, although its size and times are the same"


def file_faults(paths: Iterable[str]) -> Iterator[str]:
    """
    Yield what is wrong with each name or pattern of data files, or with all of them together,
    before anything reads them.
    """
    files: list[Path] = []
    for path in paths:
        try:
            found = _matching(path)
            for file in found:
                require_file(file)
            files += found
        except DataSetError as error:
            yield str(error)
    try:
        _refuse_twins(files)
    except DataSetError as error:
        yield str(error)


def require_file(path: Path) -> None:
    """
    Refuse a data file that is none.

    Raises:
        DataSetError: There is no file, or it may not be looked at, or its folder is no data set.
    """
    try:
        if path.is_dir():
            if is_arrow_folder(path):
                return
            message = f"{path} is a folder that datasets.save_to_disk did not write: name its files, as {path}/*.jsonl"
            raise DataSetError(message)
        # A pipe would wait for a writer, and could be read once.
        if path.exists() and not path.is_file():
            message = f"{path} is a pipe or a device: name a data file"
            raise DataSetError(message)
        with path.open("rb"):
            pass
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}): name an existing data file"
        raise DataSetError(message) from None


def _expanded(paths: Iterable[str]) -> list[Path]:
    """Return the files that names and patterns stand for, those of a pattern by name."""
    files = [file for path in paths for file in _matching(path)]
    _refuse_twins(files)
    return files


def _matching(path: str) -> list[Path]:
    """Return the file of a name, or those of a pattern; DataSetError if there is none."""
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    found = sorted(map(Path, glob.glob(path, recursive=True)))  # noqa: PTH207  # patterns may be absolute
    if not found:
        message = f"{path} matches no file: name existing data files"
        raise DataSetError(message)
    return found


def sources_of(paths: tuple[str, ...], names: Mapping[str, str]) -> dict[str, str]:
    """
    Return the source of each file: its name, or the last part of the path or pattern that stands
    for it, or all of that where another one ends alike.

    Args:
        paths: As `open_records` takes them.
        names: Some of them -> names of their sources.
    """
    ends = Counter(Path(path).name for path in paths)
    unnamed = {path: end if ends[end := Path(path).name] == 1 else path for path in paths}
    return {str(file): names.get(path, unnamed[path]) for path in paths for file in _matching(path)}


def _refuse_twins(files: list[Path]) -> None:
    """
    Refuse a file that is named twice, and files that are the same but for being packed: their
    records would be there twice.
    """
    known: dict[Path, Path] = {}
    for path in files:
        if (twin := known.setdefault(path.resolve(), path)) is not path:
            message = f"{path} is named twice, once as {twin}: its records would be there twice; remove one"
            raise DataSetError(message)
    for path in files:
        if path.suffix.lower() in _PACKED and (plain := known.get(path.with_suffix("").resolve())):
            message = f"{plain} and {path} are the same data, one of them packed: name one of them"
            raise DataSetError(message)


def _open(path: Path, max_bytes: int | None, cache: Path | None) -> RecordFile:
    """Open a file that is there, by what it is."""
    named = Named.from_path(path)
    if path.is_dir():
        return ArrowFile(parts_of_folder(path), named=Named(str(path), str(path)), max_bytes=max_bytes, cache=cache)
    head = _head(path)
    if head.startswith((GZIP, ZSTD)):
        copy = copy_of(path, cache, unpack)
        text = copy / TEXT
        return _open_text(text, Path(path.name).with_suffix("").suffix, named, max_bytes, cache)
    if head.startswith(_PARQUET):
        copy = copy_of(path, cache, rewrite_parquet)
        return ArrowFile([copy / ROWS], named=named, max_bytes=max_bytes, digests=copy / DIGESTS)
    if head.startswith(_ARROW) or path.suffix == ".arrow":
        return ArrowFile([path], named=named, max_bytes=max_bytes, cache=cache)
    if head and (claimed := _NAMED.get(path.suffix.lower())):
        message = f"{path} is named {path.suffix}, but is not {claimed}: get the whole file again, or rename it"
        raise DataSetError(message)
    return _open_text(path, path.suffix, named, max_bytes, cache)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)


def _open_text(text: Path, suffix: str, named: Named, max_bytes: int | None, cache: Path | None) -> SpanFile:
    """Open a file of text."""
    head = _head(text)
    what = next((what for start, what in _OTHER.items() if head.startswith(start)), None)
    if head[_TAR[0] :].startswith(_TAR[1]):
        what = "is a tar archive"
    if what is None and head.startswith((GZIP, ZSTD, _PARQUET, _ARROW)):
        what = "holds a file that is packed itself"
    if what is not None:
        message = f"{named.name} {what}: unpack it, and name the data files in it"
        raise DataSetError(message)
    kind: type[SpanFile] = LinesFile
    if head and suffix.lower() in _TABLES:
        kind = _TABLES[suffix.lower()]
    elif _ARRAY_OF_OBJECTS.match(head) or (suffix.lower() == ".json" and _ARRAY.match(head)):
        kind = ArrayFile
    return kind(text, named=named, max_bytes=max_bytes, cache=cache)


def rebased(record: Any, folder: Path, onto: Path) -> Any:
    """
    Return a record of a file in *folder* as one in *onto* has to read: with the same
    media.

    Args:
        record: A record's JSON value, or that of a column.
        folder: Where its relative images start.
        onto: Folder of the file that it is written to.
    """
    record = as_json(record)
    if not isinstance(record, dict):
        return record
    moved = {}
    for name in (*IMAGE_KEYS, *VIDEO_KEYS):
        if images := record.get(name):
            listed = images if isinstance(images, list) else [images]
            moved[name] = [_rebased_image(image, folder, onto) for image in listed]
    if isinstance(messages := record.get("messages"), list):
        moved["messages"] = [_rebased_message(message, folder, onto) for message in messages]
    return {**record, **moved}


def _rebased_message(message: Any, folder: Path, onto: Path) -> Any:
    """Return a message whose parts name the same images from another folder."""
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    return {**message, "content": [_rebased_part(part, folder, onto) for part in parts]}


def _rebased_part(part: Any, folder: Path, onto: Path) -> Any:
    if not isinstance(part, dict):
        return part
    media = {name: _rebased_image(part[name], folder, onto) for name in ("image", "video") if part.get(name)}
    return {**part, **media}


def _rebased_image(image: Any, folder: Path, onto: Path) -> Any:
    """Return a path, or paths, from another folder; an image that stands in the record stays."""
    if isinstance(image, list):
        return [_rebased_image(frame, folder, onto) for frame in image]
    if isinstance(image, dict):
        path = image.get("path")
        return image if image.get("bytes") or not path else {**image, "path": os.path.relpath(folder / path, onto)}
    if not isinstance(image, str) or inline_image(image) is not None or "://" in image:
        return image
    return os.path.relpath(folder / image, onto)


def as_json(value: Any) -> Any:
    """Return a value of a column as JSON has it: bytes in base64."""
    if isinstance(value, dict):
        return {name: as_json(held) for name, held in value.items()}
    if isinstance(value, list):
        return [as_json(held) for held in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
