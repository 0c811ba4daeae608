"""
Writes files that are either complete or absent, and reads and verifies them.

Writers of the same folder wait for a lock.

A manifest has a digest of its own content, and digests of the files that it lists.
"""

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import ConfigError, CorruptArtefactError, OutputError, PackplanError, counted
from packplan.core.fingerprint import json_digest

T = TypeVar("T")

_DIGEST = "manifest_sha256"

_REFUSED = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container")
"""
Pattern in the texts of write errors from Rust libraries and torch's ZIP writer, which raise no
OSError.
"""

_NO_MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory", re.IGNORECASE)
"""Pattern in texts of out-of-memory errors of the operating system, torch and CUDA."""

_UNPUBLISHED = ".tmp"
"""Suffix of temporary files, which are renamed when they are complete."""

POLL_S = 0.5
"""Seconds that an attempt to take a lock lasts; after each, the progress line is updated."""


MOST_BYTES = 2**22
"""Largest accepted size of a YAML file or another file of settings, in bytes."""


_DEEPEST, _MOST_VALUES = 64, 10**6

_TOO_DEEP = f"is nested more than {_DEEPEST} deep, or has more than {_MOST_VALUES:,} values: shorten it"

_MAX_REASON = 250
"""Largest number of characters of a library's message that an error quotes."""


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """
    Return the text of a file that describes a run or a model.

    Args:
        path: Regular file of UTF-8 text.
        most: Largest size of the file in bytes.

    Raises:
        ValueError: The file cannot be read, is too large, or is not a regular file of UTF-8 text.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("is a folder, a pipe or a device: name a regular file")
        with path.open("rb") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise ValueError(f"has more than {most:,} bytes: name a file of settings")
        return text.decode()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}): name an existing file") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text, so it is neither YAML nor JSON: name a text file of settings") from None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; ValueError if it is invalid, too deep or too large."""
    try:
        return require_shallow(json.loads(text))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def require_shallow(value: T) -> T:
    """Return *value* unchanged; ValueError if it is nested too deeply or has too many values."""
    left: list[tuple[Any, int]] = [(value, 0)]
    number = 0
    while left:
        (held, depth), number = left.pop(), number + 1
        if depth > _DEEPEST or number > _MOST_VALUES:
            raise ValueError(_TOO_DEEP)
        inside = held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()
        left.extend((one, depth + 1) for one in inside)
    return value


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """
    Turn an OSError in this context into an OutputError that names *path*.

    Errors about lack of memory, or too many open files, are not changed.
    """
    try:
        yield
    except OSError as error:
        if _lacks_memory(error) or error.errno in {errno.EMFILE, errno.ENFILE}:
            raise
        raise OutputError(str(path), error.strerror or str(error)) from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless it exists; OutputError if that fails."""
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def wrap_save_errors(folder: Path) -> Iterator[None]:
    """Turn write errors of torch, safetensors or tokenizers in this context into OutputErrors."""
    try:
        with wrap_write_errors(folder):
            yield
    except OutputError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if not _REFUSED.search(text) or _lacks_memory(error):
            raise
        raise OutputError(str(folder), text[:200]) from error


@contextmanager
def wrap_load_errors(key: str, fact: str, remedy: str = "") -> Iterator[None]:
    """
    Turn exceptions in this context into ConfigErrors.

    PackplanErrors and out-of-memory errors are raised unchanged.

    Args:
        key: Configuration key that names what the library loads in this context.
        fact: First part of the message; the library's own message follows.
        remedy: Advice at the end of the message.
    """
    try:
        yield
    except PackplanError:
        raise
    except Exception as error:  # these errors have no common base class
        if _lacks_memory(error):
            raise
        reason = textwrap.shorten(str(error), _MAX_REASON, placeholder=" …") or type(error).__name__
        raise ConfigError.for_key(key, f"{fact}: {reason}{remedy and f'; {remedy}'}") from error


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


@contextmanager
def hold_lock(path: Path, purpose: str, *, wait: Callable[[], str] = str) -> Iterator[None]:
    """
    Wait for a lock and hold it in this context; the kernel releases it if the process dies.

    Args:
        path: Lock file.
        purpose: End of the progress line while waiting, such as `to write runs/first`.
        wait: Function that is called every `POLL_S` seconds while the lock is not free. It
            returns the holder's name for the progress line, or raises an error to stop waiting.
    """
    lock = FileLock(path)
    with progress(desc=f"waiting {purpose}", bar_format="{desc} [{elapsed}]", delay=BRIEF_S, leave=False) as bar:
        while True:
            with wrap_write_errors(path.parent), suppress(Timeout):
                lock.acquire(timeout=POLL_S)
                break
            bar.set_postfix_str(wait(), refresh=False)
            bar.update()
    try:
        yield
    finally:
        lock.release()


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write *data* to *path* atomically; OutputError if that fails."""
    with wrap_write_errors(path), publish_file(path) as file:
        file.write(data)


@contextmanager
def publish_file(path: Path) -> Iterator[BinaryIO]:
    """
    Yield a temporary file that is flushed and renamed to *path* at the end.

    If an error is raised in the context, the temporary file is removed.

    Raises:
        OSError: The file cannot be written, or *path* is a pipe or a device such as /dev/full.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_UNPUBLISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_bytes(path: Path, data: bytes | memoryview) -> None:
    """Append *data* to a file on disk; readers ignore the data until a manifest counts it."""
    with wrap_write_errors(path), path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def hash_file(path: Path, bar: Any) -> str:
    """Return the SHA-256 of a file in hex, and move a progress bar by the bytes that are read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that renames in the folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unpublished(folder: Path) -> None:
    """Remove temporary files of a killed writer; the caller has to hold the folder's lock."""
    for left in folder.glob(f".*{_UNPUBLISHED}"):
        left.unlink()


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write *content* to *path* atomically, as indented JSON with a digest of the content."""
    write_bytes(path, _manifest_bytes(content))


def read_manifest(path: Path, schema: str) -> dict[str, Any] | None:
    """
    Return the content of a manifest; None if the file does not exist.

    CorruptArtefactError is raised if the manifest is damaged or has another schema.
    """
    try:
        text = path.read_bytes()
        content = json.loads(text)
        found = content.pop(_DIGEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptArtefactError(str(path), "it is not a manifest of Packplan") from None
    # Different bytes may parse to the same content, but only one form is ever written.
    if found != json_digest(content) or text != _manifest_bytes(content):
        raise CorruptArtefactError(str(path), "its content does not match its own digest")
    if content.get("schema") != schema:
        reason = f"it has the schema {content.get('schema')!r}, but this version reads {schema!r}"
        raise CorruptArtefactError(str(path), reason)
    return dict(content)


def _manifest_bytes(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps({**content, _DIGEST: json_digest(content)}, indent=2, ensure_ascii=False)}\n".encode()


def write_array(path: Path, array: NDArray[Any]) -> dict[str, Any]:
    """Write *array* atomically as flat little-endian bytes; return the entry for a manifest."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = flat.reshape(-1).view(np.uint8).data
    write_bytes(path, data)
    return {"file": path.name, "dtype": flat.dtype.str, "size": flat.size, "sha256": hashlib.sha256(data).hexdigest()}


def read_array(folder: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    """
    Memory-map the array that a manifest's *entry* describes, and return the array.

    CorruptArtefactError is raised if the array's file is missing or damaged.
    """
    path = folder / Path(entry["file"]).name
    array, digest = map_array(path, np.dtype(entry["dtype"]), int(entry["size"]), is_whole=True)
    if digest.hexdigest() != entry["sha256"]:
        raise CorruptArtefactError(str(path), "its content does not match the manifest's digest")
    return array


def map_array(path: Path, dtype: np.dtype[Any], size: int, *, is_whole: bool = False) -> tuple[NDArray[Any], Any]:
    """
    Memory-map the first *size* elements of a file, and return them with their SHA-256 hash object.

    Args:
        path: Binary file.
        dtype: Type of an element.
        size: Number of elements to read.
        is_whole: Whether the file has to end after these elements.

    Raises:
        CorruptArtefactError: The file is missing or too short, or *is_whole* is true but the file
            is longer.
    """
    if not path.is_file():
        raise CorruptArtefactError(str(path), "it is missing")
    found, expected = path.stat().st_size, size * dtype.itemsize
    if found < expected or (is_whole and found > expected):
        raise CorruptArtefactError(str(path), f"it has {counted(found, 'byte')} instead of {expected:,}")
    array = np.memmap(path, dtype=dtype, mode="r", shape=(size,)) if size else np.zeros(0, dtype=dtype)
    return array, hashlib.sha256(array.data)


def broken_lines(names: Iterable[str]) -> Iterator[str]:
    """
    Yield a message on the first line that is not JSON, for each JSON Lines file with such a line.

    Args:
        names: File names in ms-swift's notation, such as `data.jsonl` or `data.jsonl#500`.
    """
    for path in (Path(name.partition("#")[0]) for name in names):
        if path.suffix != ".jsonl" or not path.is_file():
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    parse_json(line.decode().strip() or "{}")
                except ValueError as error:
                    reason = str(error).partition(":")[0]
                    yield f"names {path}, whose line {number:,} is not JSON ({reason}): correct the line"
                    break
