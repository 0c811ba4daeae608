"""
Stores measured lengths in files of fixed-width rows, described by the manifest `lengths.json`.

`lengths.bin` has a row of little-endian int32 for each record, and `images.bin` has a row of int64
for each image and each video. `record_heads.bin` has the start of each record's digest, so that a
changed record can be named. Rows are appended and flushed before the manifest, which has their
number and digest, is written. So all rows that a manifest counts are complete. Resuming removes any
rows that the manifest does not count. The manifest also has a digest of the measured records. If
later records are added or changed, the stored rows stay valid.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters import files
from packplan.core.errors import ConfigError, CorruptArtefactError, StaleError
from packplan.core.fingerprint import Fingerprint
from packplan.core.ports import Origin, StoredLengths, StoredRows
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, BadRecord, DataFile

log = logging.getLogger(__name__)

SCHEMA = "packplan lengths 4"


@contextmanager
def collect_damage(found: list[CorruptArtefactError]) -> Iterator[None]:
    """In this context, catch the error about a damaged file, and append it to *found*."""
    try:
        yield
    except CorruptArtefactError as error:
        found.append(error)


class _RowFile:
    """File of fixed-width rows; a manifest has the number and the digest of its valid rows."""

    def __init__(self, path: Path, columns: tuple[str, ...], dtype: str) -> None:
        self.path, self.columns, self.dtype = path, columns, np.dtype(dtype)
        self.forget_rows()

    def forget_rows(self) -> None:
        """Set the number of rows to 0, in memory; `truncate` then empties the file."""
        self._num, self._hash = 0, hashlib.sha256()

    def resume(self, entry: Mapping[str, Any]) -> NDArray[Any]:
        """
        Return the rows that a manifest's *entry* counts; `append` then continues after them.

        CorruptArtefactError is raised if rows are missing, or if their digest differs from the
        manifest's.
        """
        self._num = entry["rows"]
        flat, self._hash = files.map_array(self.path, self.dtype, self._num * len(self.columns))
        if self._hash.hexdigest() != entry["sha256"]:
            raise CorruptArtefactError(str(self.path), "its content does not match the manifest's digest")
        return flat.reshape(-1, len(self.columns))

    def truncate(self) -> None:
        """Remove bytes after the rows that the manifest counts."""
        with files.wrap_write_errors(self.path):
            if not self._num:
                # A new file: truncating the old one would kill a run that has mapped it.
                self.path.unlink(missing_ok=True)
            self.path.touch()
            os.truncate(self.path, self._num * len(self.columns) * self.dtype.itemsize)

    def append(self, rows: NDArray[Any]) -> None:
        data = np.ascontiguousarray(rows, dtype=self.dtype).reshape(-1).view(np.uint8).data
        files.append_bytes(self.path, data)
        self._hash.update(data)
        self._num += len(rows)

    def manifest_entry(self) -> dict[str, Any]:
        """Return the entry of a manifest that describes the current rows."""
        return {
            "file": self.path.name,
            "columns": list(self.columns),
            "dtype": self.dtype.str,
            "rows": self._num,
            "sha256": self._hash.hexdigest(),
        }


def _origin(manifest: Mapping[str, Any]) -> Origin:
    return Origin(
        Fingerprint(manifest["fingerprint"]),
        manifest["num_records"],
        manifest["samples"]["rows"],
        manifest["data_sha256"],
        tuple(BadRecord(**one) for one in manifest.get("bad_records", ())),
        tuple(DataFile(**one) for one in manifest.get("files", ())),
    )


class DiskLengthStore:
    """
    Stores measurements in a folder, during a run and between runs.

    A store may start with measurements that it copies from the folder of another run.
    """

    def __init__(self, folder: Path, *, lengths_from: Path | None = None) -> None:
        """
        Store lengths in a folder.

        Args:
            folder: Folder for one split of this run, such as the training split.
            lengths_from: Folder of the same split of another run, which is only read.
                `open_for_append` copies the lengths from there if *folder* has none.
        """
        self.folder, self._lengths_from = folder, lengths_from
        self._manifest = folder / "lengths.json"
        self._samples = _RowFile(folder / "lengths.bin", COLUMNS, "<i4")
        self._media = _RowFile(folder / "images.bin", MEDIA_COLUMNS, "<i8")
        self._key: Fingerprint | None = None
        self._num_records = 0

    def bad_records(self) -> tuple[BadRecord, ...]:
        """
        Return the bad records stored in this folder or, if it has no lengths, in *lengths_from*.
        """
        origin = self.origin()
        if origin is None and self._lengths_from is not None:
            return DiskLengthStore(self._lengths_from).bad_records()
        return () if origin is None else origin.bad

    def open_for_append(self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str]) -> StoredRows:
        """
        Return the rows stored under *key*, and prepare to append the records that follow.

        If this folder has no rows, the rows in *lengths_from* are copied into it first.

        Args:
            key: Fingerprint of all inputs of the measurements except the data.
            num_records: Current number of records.
            data_digest: Function that takes a number n, and returns the current digest of the first
                n records. Records that `bad_records` returns are left out.

        Raises:
            StaleError: The stored measurements have another key, or other data.
            CorruptArtefactError: The stored files are damaged.
            ConfigError: The run's folder that contains *lengths_from* does not exist.
        """
        self._key, self._num_records = key, num_records
        stored = self.read(key, num_records, data_digest)
        self._samples.truncate()
        self._media.truncate()
        if self._lengths_from is None:
            return stored
        if not self._lengths_from.parent.is_dir():
            reason = f"is {self._lengths_from.parent}, which does not exist: name the output_dir of a run that measured"
            raise ConfigError.for_key("training.packing_lengths_from", reason)
        if self._manifest.exists():
            return stored
        try:
            taken = DiskLengthStore(self._lengths_from).read(key, num_records, data_digest)
        except StaleError as error:
            raise attrs.evolve(error, kind="borrowed_lengths") from None
        if len(taken.table):
            log.info("the %s lengths are copied from %s", f"{len(taken.table):,}", self._lengths_from)
            self.append(taken, data_digest(len(taken.table)), bad=self.bad_records())
        else:
            log.warning("%s has no lengths, so this run measures all samples", self._lengths_from)
        return taken

    def read(self, key: Fingerprint, num_records: int, data_digest: Callable[[int], str]) -> StoredRows:
        """
        Return the rows stored under *key* in this folder, which may be none; write nothing.

        Args:
            key: Fingerprint of all inputs of the measurements except the data.
            num_records: Current number of records.
            data_digest: Function that takes a number n, and returns the current digest of the first
                n records without bad records.

        Raises:
            StaleError: The stored measurements have another key, or other data.
            CorruptArtefactError: The stored files are damaged.
        """
        manifest = files.read_manifest(self._manifest, SCHEMA)
        if manifest is None:
            self._samples.forget_rows()
            self._media.forget_rows()
            return StoredRows(np.zeros((0, len(COLUMNS)), np.int32), np.zeros((0, len(MEDIA_COLUMNS)), np.int64))
        if differences := _origin(manifest).differences(key, num_records, data_digest):
            raise StaleError.for_lengths(str(self.folder), differences)
        return self._read_rows(manifest)

    def stored(self) -> StoredRows:
        """Return all stored rows, including those appended since `open_for_append`."""
        manifest = files.read_manifest(self._manifest, SCHEMA)
        assert manifest is not None  # noqa: S101  # `append` comes first
        return self._read_rows(manifest)

    def origin(self) -> Origin | None:
        """
        Return the inputs and data of the stored rows from the manifest; None if no rows are stored.
        """
        manifest = files.read_manifest(self._manifest, SCHEMA)
        return None if manifest is None else _origin(manifest)

    def inspect(self) -> StoredLengths | None:
        """
        Verify and return the stored lengths, whatever their key; None if there are none.

        No file is written.
        """
        manifest = files.read_manifest(self._manifest, SCHEMA)
        return None if manifest is None else StoredLengths(_origin(manifest), self._read_rows(manifest), self.digest())

    def damage(self) -> list[CorruptArtefactError]:
        """Return an error for each damaged file."""
        found: list[CorruptArtefactError] = []
        with collect_damage(found):
            manifest = files.read_manifest(self._manifest, SCHEMA) or {}
            for column, name in ((self._samples, "samples"), (self._media, "images")):
                if name in manifest:
                    with collect_damage(found):
                        column.resume(manifest[name])
            if "record_heads" in manifest:
                try:
                    files.read_array(self.folder, manifest["record_heads"])
                except CorruptArtefactError as error:
                    found.append(attrs.evolve(error, remedy="packplan plan build writes this file again"))
        return found

    def append(self, rows: StoredRows, data_digest: str, *, bad: Sequence[BadRecord] = ()) -> None:
        """
        Append the next rows; a reader finds all of them or none.

        Args:
            rows: Measurements of the next records. The fields `in_full` and `repeatability` of
                *rows* describe all rows, including the stored ones.
            data_digest: Digest of all records measured so far, without bad records.
            bad: All bad records so far, including those among the next records.
        """
        assert self._key is not None  # noqa: S101  # `open_for_append` comes first
        self._samples.append(rows.table)
        self._media.append(rows.media)
        files.write_manifest(
            self._manifest,
            {
                "schema": SCHEMA,
                "fingerprint": dict(self._key.inputs),
                "fingerprint_sha256": self._key.digest,
                "num_records": self._num_records,
                "data_sha256": data_digest,
                "samples": self._samples.manifest_entry(),
                "images": self._media.manifest_entry(),
                "measured_in_full": rows.in_full,
                "probe": rows.repeatability,
                **({"bad_records": [attrs.asdict(one) for one in bad]} if bad else {}),
            },
        )

    def save_file_descriptions(self, data_files: Sequence[DataFile]) -> None:
        """Save the descriptions of the measured data files, if they have changed."""
        manifest = files.read_manifest(self._manifest, SCHEMA)
        assert manifest is not None  # noqa: S101  # `append` comes first
        if _origin(manifest).files != tuple(data_files):
            files.write_manifest(self._manifest, {**manifest, "files": [attrs.asdict(one) for one in data_files]})

    def save_record_heads(self, heads: Callable[[], NDArray[np.int64]]) -> None:
        """
        Save the starts of the records' digests, if they are not saved yet or damaged.

        Args:
            heads: Function that returns the first eight bytes of each record's digest; shape
                (num_records,).
        """
        manifest = files.read_manifest(self._manifest, SCHEMA)
        if manifest is not None and not self.record_heads().size:
            entry = files.write_array(self.folder / "record_heads.bin", heads())
            files.write_manifest(self._manifest, {**manifest, "record_heads": entry})

    def record_heads(self) -> NDArray[np.int64]:
        """Return the saved starts of the records' digests; empty if they are missing or damaged."""
        with collect_damage([]):
            if entry := (files.read_manifest(self._manifest, SCHEMA) or {}).get("record_heads"):
                return files.read_array(self.folder, entry)
        return np.zeros(0, np.int64)

    def discard(self) -> None:
        """Discard all rows; delete the manifest first, so that no reader uses the other files."""
        with files.wrap_write_errors(self.folder):
            self._manifest.unlink(missing_ok=True)
            files.sync_folder(self.folder)
        for column in (self._samples, self._media):
            column.forget_rows()
            column.truncate()

    def digest(self) -> str:
        """Return the SHA-256 of the rows of all records, in hex; the media rows are left out."""
        return str(self._samples.manifest_entry()["sha256"])

    def _read_rows(self, manifest: Mapping[str, Any]) -> StoredRows:
        """Read the rows that a manifest counts; CorruptArtefactError if their digest differs."""
        table, media = self._samples.resume(manifest["samples"]), self._media.resume(manifest["images"])
        return StoredRows(table, media, manifest["measured_in_full"], manifest["probe"])
