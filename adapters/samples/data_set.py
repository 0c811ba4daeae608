"""Joins the records of several data files, in any formats, into one data set."""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.record_file import RecordFile
from packplan.core.config.run import CustomConfig
from packplan.core.errors import Difference, RecordError, StaleError
from packplan.core.samples.identity import digest_record
from packplan.core.samples.records import MessageOptions
from packplan.core.samples.tables import RecordLocation
from packplan.core.samples.urls import is_url
from packplan.core.samples.values import UnusableRecordError

_SHOWN_DIGITS = 12
"""Number of hexadecimal digits of a digest that a message shows."""


_MAX_RANGE = 10_000
"""Largest number of records in a range of `_split_range`; each range updates the progress bar."""


@cache
def absolute_folder(folder: str) -> str:
    """
    Return the absolute path of a folder; a URL is returned unchanged.

    >>> absolute_folder("s3://bucket/data")
    's3://bucket/data'
    """
    return folder if is_url(folder) else str(Path(folder).resolve())


def message_options(custom: CustomConfig) -> MessageOptions:
    """Return the options that decide how a record is converted into messages."""
    return MessageOptions(
        custom.object_field_order, custom.use_summary, custom.literal_image_tags, urls=custom.media_cache is not None
    )


class FileRecords:
    """Records of several data files, numbered from 0 throughout all files in order."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        self._files = list(files)
        self._ends: list[int] = np.cumsum([len(file) for file in files]).tolist()
        self.first_indices = [0, *self._ends[:-1]]

    def __len__(self) -> int:
        return self._ends[-1]

    def reopen(self) -> None:
        """Open the same files on another machine; DataSetError names a file that differs there."""
        for file in self._files:
            file.reopen()

    def record_digest(self, index: int) -> str:
        """Return the SHA-256 of record *index* as hexadecimal digits."""
        file, row = self._locate(index)
        return file.digests(row, row + 1).tobytes().hex()

    def read_checked(self, index: int) -> Any:
        """
        Return the JSON value of record *index*, checked against its known digest.

        If no digest is known, the digest of this value is stored for later checks.

        Raises:
            RecordError: The record is damaged, or has too much text.
            StaleError: The record differs from its known digest.
        """
        file, row = self._locate(index)
        try:
            value = file[row]
        except (RecordError, OSError) as error:
            if file.changed:
                raise StaleError.for_file(file.name, str(error)) from error
            raise
        digest, known = digest_record(value), file.known_digest(row)
        if not known:
            file.add_digests(row, np.frombuffer(digest, np.uint8)[np.newaxis])
        elif digest != known:
            changed = Difference("content", known.hex()[:_SHOWN_DIGITS], digest.hex()[:_SHOWN_DIGITS])
            stale = StaleError.for_sample(index, str(file.location(row)), (changed,), copy=file.copy)
            raise StaleError.for_file(file.name, str(stale)) if file.changed else stale
        return value

    def known_digests(self, indices: range) -> NDArray[np.uint8]:
        """Return the digests of records, zero where unknown; shape (num_records, DIGEST_BYTES)."""
        parts = self._split_range(indices.start, indices.stop)
        return np.concatenate([file.known_digests(row, row + number) for file, row, _, number in parts])

    def known_heads(self) -> NDArray[np.int64]:
        """Return the first 8 bytes of each record's digest, 0 if unknown; shape (num_records,)."""
        return np.concatenate([file.known_digests(0, len(file)).view("<i8")[:, 0] for file in self._files])

    def add_digests(self, indices: range, digests: NDArray[np.uint8]) -> None:
        """
        Store digests that other processes computed, so that `digest` does not read these records.

        Args:
            indices: Indices of the records.
            digests: Digests of the records, zero where unknown; shape (num_records, DIGEST_BYTES).
        """
        for file, row, index, number in self._split_range(indices.start, indices.stop):
            file.add_digests(row, digests[index - indices.start :][:number])

    @property
    def records_per_file(self) -> list[tuple[str, int]]:
        """Name of each file, and the number of its records."""
        return [(file.name, len(file)) for file in self._files]

    def __getitem__(self, index: int) -> Any:
        """
        Return the JSON value of record *index*; RecordError if it is invalid.

        Unlike `read_checked`, this does not compare the value with a digest.
        """
        file, row = self._locate(index)
        return file[row]

    def location(self, index: int) -> RecordLocation:
        """Return the file of record *index*, and the record's line or row in that file."""
        file, row = self._locate(index)
        return file.location(row)

    @contextmanager
    def wrap_errors(self, index: int, before: str = "") -> Iterator[None]:
        """
        Turn a ValueError in this context into a RecordError with the record's file and line.

        Args:
            index: Index of the record.
            before: Text in front of the error's reason.
        """
        try:
            yield
        except ValueError as error:
            # The key whose change would accept the record.
            key = f" (custom.{error.argument})" if isinstance(error, UnusableRecordError) and error.argument else ""
            raise RecordError(str(self.location(index)), f"{before}{error}{key}") from None

    def media_folder(self, index: int) -> str:
        """Return the folder that relative media paths of record *index* start at."""
        return self._locate(index)[0].folder

    def digest(self, count: int, *, without: Sequence[int] = ()) -> str:
        """
        Return the SHA-256 of the contents and media folders of the first *count* records, in hex.

        The digest does not depend on the format of the files. Digests of single records are stored,
        so that no record is read twice.

        Args:
            count: Number of records.
            without: Indices of bad records, which are left out.
        """
        sha256, folder = hashlib.sha256(), ""
        with progress(total=count, desc="hashing the data", unit=" records", leave=False, delay=BRIEF_S) as bar:
            for file, row, index, number in self._split_range(0, count):
                kept = file.digests(row, row + number)[~np.isin(np.arange(index, index + number), without)]
                if len(kept) and file.folder != folder:
                    folder = file.folder
                    sha256.update(f"{absolute_folder(folder)}\n".encode())
                sha256.update(kept.tobytes())
                bar.update(number)
        if count == len(self):
            for file in self._files:
                file.save_digests()
        return sha256.hexdigest()

    def _split_range(self, start: int, stop: int) -> Iterator[tuple[RecordFile, int, int, int]]:
        """
        Split the indices *start* to *stop* - 1 into ranges that each lie within one file.

        A range has at most `_MAX_RANGE` records. Each range is yielded as its file, first row,
        first index and number of records.
        """
        while start < stop:
            file, row = self._locate(start)
            number = min(len(file) - row, stop - start, _MAX_RANGE)
            yield file, row, start, number
            start += number

    def _locate(self, index: int) -> tuple[RecordFile, int]:
        """Return the file of record *index*, and its row in that file."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        file = bisect.bisect_right(self._ends, index)
        return self._files[file], index - self.first_indices[file]
