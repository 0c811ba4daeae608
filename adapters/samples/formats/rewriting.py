"""
Copies of files that cannot be read in any order: compressed text, and Parquet.

The copy stands in a folder named by the content of its file, beside other copies, and is published
by a rename: a reader sees the whole of it or none. A file that was read whole once is known again
by its size, times and inode, as version control does, so that a start need not read it again.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.json_value import without_nulls
from packplan.adapters.samples.formats.kept import KeptFacts
from packplan.adapters.samples.formats.record_file import DIGESTS, RecordFile
from packplan.core.errors import DataSetError
from packplan.core.samples import DIGEST_BYTES, digest_of

log = logging.getLogger(__name__)

VERSION = 2
"""Version of the copies; a change of what they hold raises it."""

TEXT, ROWS = "text", "rows.arrow"

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
"""First bytes of what is rewritten."""

_FEED = 1024
"""Compressed bytes that are unpacked at once: zstd may make 32 MB of them."""

_CHUNK = 2**20

_HEAD = 4096

_MOST_ROWS = 1000
"""Rows of a batch of Parquet."""

_AIM = 2**23


def copy_of(path: Path, cache: Path | None) -> Path | None:
    """
    Return the folder of a file's copy, made if there is none; None for a file that needs no copy.

    Args:
        path: The file.
        cache: Folder of copies; None refuses to make one.

    Raises:
        DataSetError: The file is damaged, or may not be rewritten.
        OutputError: There is no room for the copy.
    """
    head = head_of(path)
    if not head.startswith((GZIP, ZSTD, PARQUET)):
        return None
    if cache is None:
        message = f"{path} cannot be read in any order as it is: unpack or convert it to JSON Lines first"
        raise DataSetError(message)
    with files.writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with files.held(cache / f"{_key(path)}.lock", f"for a copy of {path.name}"):
        folder = cache / f"{_content(path, cache)[:32]}-{VERSION}"
        if not folder.is_dir():
            _publish(path, folder, rewrite_parquet if head.startswith(PARQUET) else unpack)
    return folder


def copy_fault(path: Path, folder: Path, rows: RecordFile | None) -> str | None:
    """
    Return the difference between a copy and its file, by reading all of both, or None.

    Args:
        path: The file.
        folder: Folder of its copy.
        rows: Rows of the copy, without digests that are known; None for a copy of text.
    """
    if folder.name != f"{_read_whole(path)[:32]}-{VERSION}":
        return "the file is another one than its copy was made of, although its size and times are the same"
    return _text_fault(path, folder) if rows is None else _rows_fault(path, folder, rows)


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(_HEAD)


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


def _content(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, read where it is not known by how it stands on disk."""
    kept = KeptFacts(cache, [path], kind="source")
    if (found := kept.load()) is not None:
        return str(found[0]["sha256"])
    sha256 = _read_whole(path)
    if kept.changed():
        message = f"{path} changed while it was read: start again when it is complete"
        raise DataSetError(message)
    kept.save({"sha256": sha256}, {})
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


def unpack(path: Path, folder: Path) -> None:
    """Write the text of a .gz or .zst into a folder; DataSetError if it is damaged."""
    bar = progress(desc=f"unpacking {path.name}", unit=" bytes", delay=BRIEF_S, leave=False)
    with (folder / TEXT).open("wb") as target, bar:
        try:
            for part in _parts(path):
                target.write(part)
                bar.update(len(part))
        except _DamagedError as error:
            target.flush()
            message = f"{path}, line {_lines(folder / TEXT):,}: the archive {error}: get the whole file again"
            raise DataSetError(message) from None


def _text_fault(path: Path, folder: Path) -> str | None:
    """Return the difference between packed text and its copy, or None."""
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
    return _gzip_parts(path) if head_of(path).startswith(GZIP) else _zstd_parts(path)


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

    done = 0
    try:
        source = pq.ParquetFile(path, memory_map=False, buffer_size=_CHUNK, pre_buffer=False)
        total = source.metadata.num_rows
        size = sum(source.metadata.row_group(number).total_byte_size for number in range(source.num_row_groups))
        rows = max(1, min(_MOST_ROWS, _AIM * total // max(size, 1)))
        bar = progress(total=total, desc=f"rewriting {path.name}", unit=" rows", delay=BRIEF_S, leave=False)
        with pa.OSFile(str(folder / ROWS), "wb") as sink, (folder / DIGESTS).open("wb") as digests, bar:
            schema = pa.schema([column.with_type(_plain(column.type)) for column in source.schema_arrow])
            with pa.ipc.new_stream(sink, schema) as writer:
                for batch in source.iter_batches(batch_size=rows, use_threads=False):
                    batch.validate(full=True)
                    writer.write_batch(batch.cast(schema))
                    digests.writelines(_digests(batch))
                    done += batch.num_rows
                    bar.update(batch.num_rows)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None):  # the disk's, not the file's
            raise
        message = f"{path}, row {done + 1}: the file is damaged, or no Parquet ({str(error).splitlines()[0][:200]})"
        raise DataSetError(message) from None


def _rows_fault(path: Path, folder: Path, copy: RecordFile) -> str | None:
    """Return the difference between a Parquet file and its copy, or None."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row, stored = 0, (folder / DIGESTS).read_bytes()
    try:
        source = pq.ParquetFile(path, memory_map=False, buffer_size=_CHUNK, pre_buffer=False)
        total = source.metadata.num_rows
        bar = progress(total=total, desc=f"comparing {path.name}", unit=" rows", delay=BRIEF_S, leave=False)
        with bar:
            for batch in source.iter_batches(batch_size=_MOST_ROWS // 10, use_threads=False):
                for digest in _digests(batch):
                    first, row = row, row + 1
                    written = stored[first * DIGEST_BYTES : row * DIGEST_BYTES]
                    if row > len(copy) or not digest == written == copy.digests(first, row):
                        return f"row {row:,} of its copy is another one"
                    bar.update()
            has_more = len(copy) > row or len(stored) > row * DIGEST_BYTES
            return f"its copy has more than {row:,} rows" if has_more else None
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


def _digests(batch: Any) -> Iterator[bytes]:
    """Yield the digest of each row of a batch."""
    return (digest_of(without_nulls(batch.slice(row, 1).to_pylist()[0])) for row in range(batch.num_rows))
