"""
What cannot be read in any order, and so is rewritten once: compressed text, and Parquet.

The copy stands in a folder named by the content of its file, beside other copies, and is published
by a rename: a reader sees the whole of it or none. A file that was read whole once is known again
by its size, times and inode, as version control does, so that a start need not read it again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packplan.adapters import files
from packplan.adapters.copies import held
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.json_value import without_nulls
from packplan.adapters.samples.formats.kept import SETTLED_NS, standing
from packplan.core.errors import CorruptArtefactError, DataSetError, counted
from packplan.core.samples import digest_of

log = logging.getLogger(__name__)

VERSION = 2
"""Version of the copies; a change of what they hold raises it."""

TEXT, ROWS, DIGESTS = "text", "rows.arrow", "digests.bin"

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""What archives begin with."""

_SOURCE = "packplan.source/1"

_LEAST_LIMIT, _MOST_RATIO = 2**30, 200
"""A copy may always have so many bytes; beyond, so many times those of its file."""

_FEED = 1024
"""Compressed bytes that are unpacked at once: zstd may make 32 MB of them."""

_CHUNK = 2**20

_MOST_BATCH, _MOST_ROWS = 2**29, 1000
"""Bytes and rows of a batch of Parquet."""

_AIM = 2**23


def copy_of(path: Path, cache: Path | None, write: Callable[[Path, Path], None]) -> Path:
    """
    Return the folder of a file's copy, made if there is none.

    Args:
        path: The file.
        cache: Where copies are kept; None refuses to make one.
        write: Writes the copy of a file into a folder.

    Raises:
        DataSetError: The file is damaged, or may not be rewritten.
        OutputError: There is no room for the copy.
    """
    if cache is None:
        message = f"{path} cannot be read in any order as it is: unpack or convert it to JSON Lines first"
        raise DataSetError(message)
    with files.writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with held(cache / f"{_key(path)}.lock", path):
        folder = cache / f"{_content(path, cache)[:32]}-{VERSION}"
        if not folder.is_dir():
            _publish(path, folder, write)
    return folder


def _publish(path: Path, folder: Path, write: Callable[[Path, Path], None]) -> None:
    """Write a copy under another name and rename it; a killed writer's is written over."""
    started = folder.with_name(f".{folder.name}.tmp")
    log.info("%s is rewritten once, to be read in any order: %s", path, folder)
    with files.writing(folder):
        shutil.rmtree(started, ignore_errors=True)
        started.mkdir()
        try:
            write(path, started)
            for part in started.iterdir():
                with part.open("rb") as file:
                    os.fsync(file.fileno())
            files.sync_folder(started)
            started.rename(folder)
        except BaseException:
            shutil.rmtree(started, ignore_errors=True)
            raise
        files.sync_folder(folder.parent)


def _key(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def is_of(path: Path, folder: Path) -> bool:
    """Return whether a copy is of a file as it is now; all of the file is read."""
    return folder.name == f"{_read_whole(path)[:32]}-{VERSION}"


def _content(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, read where it is not known by how it stands on disk."""
    known = cache / f"{_key(path)}.json"
    found = standing(path)
    with contextlib.suppress(CorruptArtefactError):
        manifest = files.read_manifest(known, _SOURCE)
        if manifest is not None and manifest["standing"] == found:
            return str(manifest["sha256"])
    started = time.time_ns()
    sha256 = _read_whole(path)
    if found != standing(path):
        message = f"{path} changed while it was read: start again when it is complete"
        raise DataSetError(message)
    if started - max(found["mtime_ns"], found["ctime_ns"]) > SETTLED_NS:
        manifest = {"schema": _SOURCE, "path": str(path), "standing": found, "sha256": sha256}
        files.write_manifest(known, manifest)
    return sha256


def _read_whole(path: Path) -> str:
    """Return the SHA-256 of a file, all of which is read."""
    digest, size = hashlib.sha256(), path.stat().st_size
    bar = progress(total=size, desc=f"reading {path.name}", unit=" bytes", leave=False, delay=BRIEF_S)
    with path.open("rb") as file, bar:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


class _Bound:
    """Bytes that a copy may have, so that an archive that is an attack ends soon."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, path.stat().st_size
        self._most = max(_LEAST_LIMIT, _MOST_RATIO * self._size)
        self._written = 0

    def add(self, number: int) -> None:
        """Count bytes; DataSetError if they are too many."""
        self._written += number
        if self._written > self._most:
            message = (
                f"{self._path} has {counted(self._size, 'byte')} but unpacks to more than {self._most:,}, which may be "
                "an attack: unpack it yourself, and name what comes out"
            )
            raise DataSetError(message)


def unpack(path: Path, folder: Path) -> None:
    """Write the text of a .gz or .zst into a folder; DataSetError if it is damaged."""
    bound = _Bound(path)
    bar = progress(desc=f"unpacking {path.name}", unit=" bytes", delay=BRIEF_S, leave=False)
    with (folder / TEXT).open("wb") as target, bar:
        try:
            for part in _parts(path):
                bound.add(len(part))
                target.write(part)
                bar.update(len(part))
        except _DamagedError as error:
            target.flush()
            message = f"{path}, line {_lines(folder / TEXT):,}: the archive {error}: get the whole file again"
            raise DataSetError(message) from None


def text_fault(path: Path, folder: Path) -> str | None:
    """Return in what a copy of packed text differs from its file; all of both is read."""
    line = 1
    bar = progress(desc=f"comparing {path.name}", unit=" bytes", delay=BRIEF_S, leave=False)
    with (folder / TEXT).open("rb") as copy, bar:
        try:
            for part in _parts(path):
                held = copy.read(len(part))
                if held != part:
                    same = next((at for at, (a, b) in enumerate(zip(held, part, strict=False)) if a != b), len(held))
                    line += part.count(b"\n", 0, same)
                    return f"line {line:,} of its copy is another one"
                line += part.count(b"\n")
                bar.update(len(part))
        except _DamagedError as error:
            return f"line {line:,}: the archive {error}"
        return f"its copy has more than {line:,} lines" if copy.read(1) else None


def _parts(path: Path) -> Iterator[bytes]:
    """Yield the text of a .gz or .zst; _DamagedError if it is damaged."""
    with path.open("rb") as file:
        unpacked = _gzip_parts if file.read(len(GZIP)) == GZIP else _zstd_parts
    return unpacked(path)


class _DamagedError(Exception):
    """An archive ends before its end, or is not what its check sums say."""


def _lines(path: Path) -> int:
    """Return the number of the line that a text ends in."""
    with path.open("rb") as file:
        return 1 + sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))


def _gzip_parts(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) as file:
            # Unlike `read`, it gives what comes before a fault.
            while part := file.read1(_CHUNK):
                yield part
    except EOFError:
        raise _DamagedError("ends here, before its end") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _DamagedError(f"is damaged here ({error})") from None


def _zstd_parts(path: Path) -> Iterator[bytes]:
    import zstandard

    frame: Any = None
    try:
        with path.open("rb") as file:
            while chunk := file.read(_FEED):
                while chunk:
                    if frame is None:
                        frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
                    yield frame.decompress(chunk)
                    chunk = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise _DamagedError(f"is damaged here ({error})") from None
    if frame is not None:
        raise _DamagedError("ends here, before its end")


def rewrite_parquet(path: Path, folder: Path) -> None:
    """Write a Parquet file's rows as Arrow, and their digests; DataSetError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    bound, done = _Bound(path), 0
    try:
        source = pq.ParquetFile(path, memory_map=False, buffer_size=_CHUNK, pre_buffer=False)
        total = source.metadata.num_rows
        bound.add(32 * total)
        size = sum(source.metadata.row_group(number).total_byte_size for number in range(source.num_row_groups))
        rows = max(1, min(_MOST_ROWS, _AIM * total // max(size, 1)))
        bar = progress(total=total, desc=f"rewriting {path.name}", unit=" rows", delay=BRIEF_S, leave=False)
        with pa.OSFile(str(folder / ROWS), "wb") as sink, (folder / DIGESTS).open("wb") as digests, bar:
            schema = pa.schema([column.with_type(_plain(column.type)) for column in source.schema_arrow])
            with pa.ipc.new_stream(sink, schema) as writer:
                for batch in source.iter_batches(batch_size=rows, use_threads=False):
                    batch.validate(full=True)
                    if (num_bytes := batch.nbytes + sum(map(_unshared, batch.columns))) > _MOST_BATCH:
                        message = f"{path}, row {done + 1}: {counted(batch.num_rows, 'row')} take {num_bytes:,} bytes"
                        raise DataSetError(f"{message}, which may be an attack: split them")
                    bound.add(num_bytes)
                    writer.write_batch(batch.cast(schema))
                    digests.writelines(_digests(batch))
                    done += batch.num_rows
                    bar.update(batch.num_rows)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None):  # the disk's, not the file's
            raise
        message = f"{path}, row {done + 1}: the file is damaged, or no Parquet ({str(error).splitlines()[0][:200]})"
        raise DataSetError(message) from None


def rows_fault(path: Path, folder: Path, copied: Iterator[bytes]) -> str | None:
    """
    Return in what a copy of a Parquet file differs from its file; all of both is read.

    Args:
        path: The file.
        folder: Its copy.
        copied: Digest of each row of the copy, from what stands there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        source = pq.ParquetFile(path, memory_map=False, buffer_size=_CHUNK, pre_buffer=False)
        total = source.metadata.num_rows
        bar = progress(total=total, desc=f"comparing {path.name}", unit=" rows", delay=BRIEF_S, leave=False)
        with (folder / DIGESTS).open("rb") as stored, bar:
            for batch in source.iter_batches(batch_size=_MOST_ROWS // 10, use_threads=False):
                for digest in _digests(batch):
                    row += 1
                    if digest != next(copied, None) or digest != stored.read(len(digest)):
                        return f"row {row:,} of its copy is another one"
                    bar.update()
            return f"its copy has more than {row:,} rows" if stored.read(1) or next(copied, None) else None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        return f"row {row + 1:,}: the file is damaged ({str(error).splitlines()[0][:200]})"


def _plain(kind: Any) -> Any:
    """
    Return a type whose texts stand by themselves, at any depth, instead of as numbers of a
    dictionary.
    """
    import pyarrow as pa

    def plain(field: Any) -> Any:
        return field.with_type(_plain(field.type))

    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([plain(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain(kind.key_field), plain(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(plain(kind.value_field))
    return pa.list_(plain(kind.value_field)) if pa.types.is_list(kind) else kind


def _unshared(column: Any) -> int:
    """
    Return the bytes of the texts that a column has by numbers of a dictionary, at any depth: a
    dictionary has each once, a row each time.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        if column.type.value_type not in {pa.string(), pa.large_string(), pa.binary(), pa.large_binary()}:
            return 0
        lengths = pc.binary_length(column.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(column.indices)).as_py() or 0
    if pa.types.is_struct(column.type):
        return sum(map(_unshared, column.flatten()))
    if pa.types.is_map(column.type):
        first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return sum(_unshared(part.slice(first, end - first)) for part in (column.keys, column.items))
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return _unshared(column.flatten()) if is_list or pa.types.is_fixed_size_list(column.type) else 0


def _digests(batch: Any) -> Iterator[bytes]:
    """Yield the digest of each row of a batch."""
    return (digest_of(without_nulls(batch.slice(row, 1).to_pylist()[0])) for row in range(batch.num_rows))
