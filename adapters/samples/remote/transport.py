"""
Bytes of files at places: parts of a file, or all of it, in a few attempts.

http and https are read by this project, other schemes by fsspec. What is read is counted over all
processes that are forked from this one.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import attrs

from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import counted
from packplan.core.samples import scheme_of, without_credentials

T = TypeVar("T")

PART_BYTES = 2**23
"""Bytes of a large file that are asked for at once."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY")
"""Names of environment variables whose values no message may have."""


@attrs.frozen
class Patience:
    """Seconds to wait for a file, or for a part of a large one."""

    image_s: float = 60.0
    """For all of it, whatever the server does."""

    silence_s: float = 10.0
    """For the next bytes."""

    waits_s: tuple[float, ...] = (0.5, 2.0)
    """Before each further attempt, where another one may do better."""


class RefusedError(Exception):
    """A file is not to be had; asking again would not help."""


class TroubleError(Exception):
    """A file did not come this time."""


class Standing(NamedTuple):
    """Size and version of a file at a place."""

    size: int

    version: str
    """Tag of the content, or the time of its last change; empty where the place says neither."""


class Part(NamedTuple):
    """Part of a file."""

    held: bytes
    standing: Standing

    is_part: bool = True
    """Whether the place sends parts; else only the beginning of a file can be asked for."""


class Transport(Protocol):
    """Reads files at places of one kind; each call is one attempt."""

    def part(self, place: str, start: int, stop: int, *, most: int, patience: Patience) -> Part:
        """
        Return bytes from *start* to before *stop*, or to the end of the file.

        Args:
            place: Place of the file.
            start: First byte.
            stop: End, which may lie behind the file's.
            most: Bytes that the file may have.
            patience: Times to wait.

        Raises:
            RefusedError: They are not to be had.
            TroubleError: Another attempt may succeed.
        """

    def copy(self, place: str, file: BinaryIO, *, most: int, patience: Patience) -> None:
        """
        Write all of a file, as `part` reads a part of it.

        Args:
            place: Place of the file.
            file: Empty file to write to.
            most: Bytes that the file may have.
            patience: Times to wait.
        """

    def listed(self, pattern: str) -> list[str]:
        """Return the places of a pattern's files, by name."""


class Traffic:
    """Requests to places, and bytes that came, over this process and those forked from it."""

    def __init__(self) -> None:
        self._requests, self._bytes = (multiprocessing.Value("q", 0) for _ in range(2))

    def count(self, num_bytes: int) -> None:
        """Count a request, and the bytes that came."""
        for value, number in ((self._requests, 1), (self._bytes, num_bytes)):
            with value.get_lock():
                value.value += number

    def reset(self) -> None:
        """Count from nothing."""
        self._requests.value = self._bytes.value = 0

    def __str__(self) -> str:
        return f"{counted(self._bytes.value, 'byte')} in {counted(self._requests.value, 'request')}"

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self._requests.value)


traffic = Traffic()


def transport_of(place: str) -> Transport:
    """Return the transport that reads a place."""
    if scheme_of(place) in {"http", "https"}:
        from packplan.adapters.samples.remote.http_transport import HttpTransport

        return HttpTransport()
    from packplan.adapters.samples.remote.fsspec_transport import FsspecTransport

    return FsspecTransport()


def in_attempts(call: Callable[[], T], patience: Patience) -> T:
    """Call a function in a few attempts, and return its result; RefusedError if none succeeds."""
    for wait in (*patience.waits_s, None):
        try:
            return call()
        except TroubleError as error:
            if wait is None:
                attempts = counted(len(patience.waits_s) + 1, "attempt")
                raise RefusedError(f"{error}, in {attempts}") from None
            time.sleep(wait)
    raise AssertionError  # the last attempt raises, or returns


def read_part(place: str, start: int, stop: int, *, most: int, patience: Patience) -> Part:
    """
    Return part of a file, in a few attempts; see `Transport.part`.

    Args:
        place: Place of the file.
        start: First byte.
        stop: End, which may lie behind the file's.
        most: Bytes that the file may have.
        patience: Times to wait.

    Raises:
        RefusedError: It is not to be had.
    """
    transport = transport_of(place)
    return in_attempts(lambda: transport.part(place, start, stop, most=most, patience=patience), patience)


def standing_of(place: str, *, most: int, patience: Patience) -> Standing:
    """
    Return the size and version of a file; RefusedError if there is none.

    Args:
        place: Place of the file.
        most: Bytes that it may have.
        patience: Times to wait.
    """
    return read_part(place, 0, 1, most=most, patience=patience).standing


def download(place: str, file: BinaryIO, *, most: int, patience: Patience) -> Standing:
    """
    Write all of a file, part by part, and return its size and version.

    Args:
        place: Place of the file.
        file: Empty file to write to.
        most: Bytes that the file may have.
        patience: Times to wait, for each part.

    Raises:
        RefusedError: It is not to be had, or changes meanwhile.
        OSError: There is no room for it.
    """
    first = read_part(place, 0, PART_BYTES, most=most, patience=patience)
    standing, done = first.standing, len(first.held)
    bar = progress(total=standing.size, desc=f"fetching {without_credentials(place)}", unit=" bytes", delay=BRIEF_S)
    with bar:
        if done < standing.size and not first.is_part:
            transport = transport_of(place)
            in_attempts(lambda: transport.copy(place, file, most=most, patience=patience), patience)
            return standing
        file.write(first.held)
        bar.update(done)
        while done < standing.size:
            part = read_part(place, done, done + PART_BYTES, most=most, patience=patience)
            if part.standing != standing or not part.held:
                raise RefusedError("it changed while it was fetched: start again when it is complete")
            file.write(part.held)
            done += len(part.held)
            bar.update(len(part.held))
    return standing


def without_secrets(error: object) -> str:
    """Return the text of an error in one line, without what may be credentials."""
    text = without_credentials(" ".join(str(error).split()))
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            text = text.replace(value, "…")
    return text[:300]
