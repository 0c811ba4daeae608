"""
Finds data files by name or pattern, and opens each in its format.

Compressed files and Parquet are recognised by their first bytes, and CSV and TSV by their names.
Arrow is recognised by its first bytes or by the ending `.arrow`. A text that begins with `[{` is a
JSON array, and so is a `.json` file that begins with `[`. Any other text is JSON Lines. Arrow and
uncompressed JSON Lines are read in place. Any other file is read from a converted copy.
"""

import glob
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packplan.adapters.samples.data_set import FileRecords
from packplan.adapters.samples.downloads import remote_origin
from packplan.adapters.samples.formats.arrow_rows import ArrowFile, is_arrow_folder, list_arrow_files
from packplan.adapters.samples.formats.lines import LinesFile
from packplan.adapters.samples.formats.record_file import RecordFile
from packplan.adapters.samples.formats.rewriting import DELIMITERS, PARQUET, copy_fault, make_copy, read_head
from packplan.core.errors import DataSetError
from packplan.core.samples.urls import is_url, mask_credentials, url_fault

_COMPRESSED = {".gz", ".zst", ".zstd"}

_ARROW = b"ARROW1"

_SHARD = re.compile(r"[-_.]?\d+(?:-of-\d+)?$")
"""Pattern of a shard's number at the end of its file name, such as `-00000-of-00008`."""

_SAMPLED = re.compile(r".+#(\d+)")
"""Pattern of ms-swift's notation for a file and a number of its records, such as `a.jsonl#500`."""

_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_ARRAY_OF_OBJECTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")


_MOST_ENTRIES = 10**5
"""Largest number of files and folders in a folder that is searched for data files."""


def open_records(
    paths: tuple[str, ...], *, max_line_bytes: int | None = None, cache: Path | None = None, media: str | None = None
) -> FileRecords:
    """
    Open the data files of a data set; their records are numbered in the order of *paths*.

    Args:
        paths: Names of files, patterns of names (`data/*.parquet`), folders of Parquet or Arrow
            files, or folders written by `datasets.save_to_disk`.
        max_line_bytes: Largest text of a record in bytes; a larger record is refused when it is
            read. None accepts any size.
        cache: Folder for copies of files that cannot be read in random order; None refuses such
            files.
        media: Folder that relative media paths start at; None means the folder of the data file.

    Raises:
        DataSetError: A file cannot be read, or has no records.
        OutputError: A copy cannot be written, for example on a full disk.
    """
    opened = []
    for fault in file_faults(paths):
        raise DataSetError(fault)
    for path in (file for name in paths for file in _match_files(name)):
        file = _open_file(path, max_line_bytes, cache)
        if not len(file):
            raise DataSetError(f"{file.name} holds no record: add records, or remove the file")
        file.folder = media or file.folder
        opened.append(file)
    return FileRecords(opened)


def copy_faults(paths: tuple[str, ...], *, cache: Path | None) -> Iterator[tuple[str, str]]:
    """
    Yield the path of each file that differs from its copy or cached arrays, with a message.

    All files, copies and cached arrays are read in full.

    Args:
        paths: Names and patterns of data files.
        cache: Folder of copies; None refuses files that need a copy.
    """
    for path in (file for name in paths for file in _match_files(name)):
        file = _open_file(path, None, cache)
        if (changed := file.cache_fault()) is not None:
            yield str(path), changed
        elif file.copy and (fault := copy_fault(path, Path(file.copy))) is not None:
            yield str(path), f"{fault}: delete {file.copy}, and build the plan again"


def file_faults(paths: Iterable[str]) -> Iterator[str]:
    """
    Yield a message for each data file that is missing, unreadable or named twice.

    No records are read.
    """
    files: list[Path] = []
    for path in paths:
        try:
            found = _match_files(path)
            for file in found:
                _require_data_path(file)
            files += found
        except DataSetError as error:
            yield str(error)
    yield from _duplicate_faults(files)


def _require_data_path(path: Path) -> None:
    """
    Require that a path is a readable data file, or a folder that `datasets.save_to_disk` wrote.

    Raises:
        DataSetError: The file is missing or cannot be read, or the folder is not a data set.
    """
    try:
        str(path.resolve()).encode()
        if path.is_dir():
            if is_arrow_folder(path):
                return
            raise DataSetError(f"{path} was not written by datasets.save_to_disk: name its files, as {path}/*.jsonl")
        # Opening a pipe would wait for a writer, and a pipe can be read only once.
        if path.exists() and not path.is_file():
            raise DataSetError(f"{path} is a pipe or a device: name a data file")
        with path.open("rb"):
            pass
    except ValueError:
        raise DataSetError(f"{path} has a name or a folder that is not valid UTF-8: rename it") from None
    except (OSError, RuntimeError) as error:  # the latter of a loop of links
        reason = getattr(error, "strerror", None) or error
        raise DataSetError(f"{path} cannot be read ({reason}): name an existing data file") from None


def _match_files(path: str) -> list[Path]:
    """Return the files that a name, folder or pattern matches; DataSetError if none match."""
    if (fault := url_fault(path)) is not None:
        raise DataSetError(f"{mask_credentials(path)} {fault}")
    if is_url(path):
        raise DataSetError(f"{mask_credentials(path)} is a URL: only custom.train_jsonl and val_jsonl may name URLs")
    if (asked := _SAMPLED.fullmatch(path)) and not Path(path).exists():
        mix = f"a mix (custom.fusion_config, count: {asked[1]})"
        remedy = f"name the file, or draw {asked[1]} of its records in each epoch with {mix}"
        raise DataSetError(f"{path} is ms-swift's notation for some records of a file: {remedy}")
    if Path(path).is_dir() and not is_arrow_folder(Path(path)):
        return _find_shards(Path(path))
    if Path(path).exists() or not glob.has_magic(path):
        return [Path(path)]
    found = sorted(map(Path, glob.glob(path, recursive=True)))  # noqa: PTH207  # patterns may be absolute
    if not found:
        raise DataSetError(f"{path} matches no file: name existing data files")
    return found


def _find_shards(folder: Path) -> list[Path]:
    """
    Return the Parquet or Arrow files in a folder, sorted by name; the folder itself if it has none.

    DataSetError is raised if the files belong to several data sets or splits, or the folder has too
    many entries.
    """
    entries = list(itertools.islice(folder.rglob("*"), _MOST_ENTRIES + 1))
    if len(entries) > _MOST_ENTRIES:
        reason = f"has more than {_MOST_ENTRIES:,} files and folders, which are too many to search"
        raise DataSetError(f"{folder} {reason}: name its data files, or a pattern of them")
    found = sorted(path for path in entries if path.suffix in {".parquet", ".arrow"} and path.is_file())
    kinds = {str(path.relative_to(folder).parent / _SHARD.sub("", path.stem)) + f"*{path.suffix}" for path in found}
    if len(kinds) > 1:
        raise DataSetError(f"{folder} has several data sets: name one of {', '.join(sorted(kinds)[:9])}")
    return found or [folder]


def source_names(paths: tuple[str, ...], names: Mapping[str, str]) -> dict[str, str]:
    """
    Map each data file to its source's name, which is given in *names* or else made from its path.

    Args:
        paths: Names and patterns of data files.
        names: Names of sources, by the path or pattern in *paths*.
    """
    unnamed = short_names(paths)
    return {_file_origin(file)[0]: names.get(path, unnamed[path]) for path in paths for file in _match_files(path)}


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Map each path to its last part, or to the whole path if two paths have the same last part."""
    ends = Counter(Path(path).name for path in paths)
    return {path: end if ends[end := Path(path).name] == 1 else path for path in paths}


def _duplicate_faults(files: list[Path]) -> Iterator[str]:
    """Yield a message for each file that is named twice, or together with its compressed form."""
    known: dict[Path, Path] = {}
    for path in files:
        if (twin := known.setdefault(path.resolve(), path)) is not path:
            yield f"{path} is named twice, once as {twin}: its records would be trained twice; remove one"
    for path in files:
        if path.suffix.lower() in _COMPRESSED and (plain := known.get(path.with_suffix("").resolve())):
            yield f"{plain} and {path} are the same data, one of them compressed: name one of them"


def _file_origin(path: Path) -> tuple[str, str]:
    """Return a file's name and the folder of its media paths; both are URLs for a download."""
    return remote_origin(path) or (str(path), str(path.parent))


def _open_file(path: Path, max_bytes: int | None, cache: Path | None) -> RecordFile:
    """Open an existing file or `save_to_disk` folder, or the converted copy of a file."""
    parts, copy, kind = [path], None, "arrow"
    if path.is_dir():
        parts, name, folder = list_arrow_files(path), str(path), str(path)
    else:
        name, folder = _file_origin(path)
        kind, is_compressed = _detect_format(path, name)
        if kind != "arrow" and (kind != "lines" or is_compressed):
            copy = str(make_copy(path, cache, kind=kind, name=name))
            parts = [Path(copy)]
    format_ = ArrowFile if kind in {"arrow", "parquet"} else LinesFile
    file = format_(parts, name=name, folder=folder, copy=copy, max_bytes=max_bytes, cache=cache)
    file.unit = "line" if kind == "lines" else "row"
    return file


def _detect_format(path: Path, name: str) -> tuple[str, bool]:
    """
    Return the format of a file, `arrow` or a kind of `make_copy`, and whether it is compressed.

    DataSetError is raised for a binary file in an unknown format.
    """
    head, is_compressed = read_head(path)
    if not is_compressed and (head.startswith(_ARROW) or path.suffix == ".arrow"):
        return "arrow", False
    if not is_compressed and head.startswith(PARQUET):
        return "parquet", False
    if b"\0" in head:
        message = f"{name} is neither text nor in a supported format: if it is an archive, unpack it and name its files"
        raise DataSetError(message)
    suffix = Path(path.stem if is_compressed else path.name).suffix.lower().removeprefix(".")
    if head and suffix in DELIMITERS:
        return suffix, is_compressed
    is_array = _ARRAY_OF_OBJECTS.match(head) or (suffix == "json" and _ARRAY.match(head))
    return "array" if is_array else "lines", is_compressed
