"""
Files at places of other machines, read by fsspec: http, S3, Google Cloud, hubs, Azure.

Credentials are found as the libraries do, and are in no message.
"""

import errno
import hashlib
import http
import os
import re
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import attrs
from fsspec.callbacks import Callback

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import counted
from packplan.core.samples.urls import PACKAGES, mask_credentials, scheme_of

T = TypeVar("T")

_HTTP = frozenset({"http", "https"})

_MOST_REDIRECTS = 5

_UNQUOTED = "%/:=&?~#+!$,;'@()*[]|"
"""Signs of a URL that stay as they are; blanks and letters beyond ASCII are quoted."""

_RETRIED = (429, 500, 502, 503, 504)
"""Answers of a server that may do better a moment later."""

_VERSIONS = (
    "ETag", "etag", "md5Hash", "generation", "oid", "blob_id", "LastModified", "Last-Modified", "last_modified",
    "created",
)  # fmt: skip
"""Entries of what file systems say of a file, the first of which is its version."""

_DENIED = ("Credential", "Forbidden", "Unauthorized", "AccessDenied", "NoAuth")
"""Parts of the names of errors where credentials are missing, or do not suffice."""

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Errors of this machine's disk, and of no server."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY")
"""Names of environment variables whose values no message may have."""

_file_systems: dict[tuple[object, ...], Any] = {}
"""
Process, scheme and times -> file system, with its connections for all threads. A process that is
forked makes its own, and keeps those of its parent, whose connections it must not close.
"""


@attrs.frozen
class Timeouts:
    """Seconds to wait for a server of http; other file systems have times of their own."""

    total_s: float | None = 60.0
    """For all of an answer; None takes as long as bytes come."""

    read_s: float = 10.0
    """For the next bytes."""

    retry_waits_s: tuple[float, ...] = (0.5, 2.0)
    """Before each further attempt, where another one may do better."""


class FetchError(Exception):
    """A file is not to be had; asking again would not help."""


class FileVersion(NamedTuple):
    """Size and version of a file at a place."""

    size: int | None
    """Bytes; None where a server does not say."""

    version: str
    """Tag of the content, or the time of its last change; empty where the place says neither."""


def read_version(place: str, *, most: int, timeouts: Timeouts) -> FileVersion:
    """
    Return the size and version of a file.

    Args:
        place: Place of the file.
        most: Bytes that it may have.
        timeouts: Times to wait.

    Raises:
        FetchError: There is none, or it is too large.
    """
    about = _call_with_retries(place, timeouts, lambda system, path: system.info(path))
    if about.get("type") == "directory":
        raise FetchError("it is no file, but a folder")
    size = None if about.get("size") is None else int(about["size"])
    _require_size(size or 0, most)
    return FileVersion(size, str(next((about[name] for name in _VERSIONS if about.get(name)), "")))


def fetch(place: str, target: Path, *, most: int, timeouts: Timeouts) -> str:
    """
    Write all of a file at a place to *target*, and return its SHA-256.

    Args:
        place: Place of the file.
        target: File to write; what is there after an error is not whole.
        most: Bytes that the file may have.
        timeouts: Times to wait.

    Raises:
        FetchError: It is not to be had.
        OutputError: There is no room for it.
    """
    bar = progress(desc=f"fetching {mask_credentials(place)}", unit=" bytes", delay=BRIEF_S, leave=False)
    with files.name_write_errors(target), bar:
        target.touch()
        _call_with_retries(
            place, timeouts, lambda system, path: system.get_file(path, str(target), callback=_SizeLimit(most, bar))
        )
        with target.open("rb") as file:
            os.fsync(file.fileno())
            _require_size(os.fstat(file.fileno()).st_size, most)
            return hashlib.file_digest(file, "sha256").hexdigest()


def list_urls(pattern: str) -> list[str]:
    """Return the places of a pattern's files, by name; FetchError if that cannot be asked."""

    def ask(system: Any, path: str) -> list[str]:
        return sorted(system.unstrip_protocol(one) for one in system.glob(path))

    return _call_with_retries(pattern, Timeouts(), ask)


class _SizeLimit(Callback):  # type: ignore[misc]  # fsspec has no types
    """Refuses a file that is too large, before it is written or while it is."""

    def __init__(self, most: int, bar: Any) -> None:
        super().__init__()
        self._most, self._bar, self._done = most, bar, 0

    def set_size(self, size: int | None) -> None:
        self._done, self._bar.total = 0, size
        _require_size(size or 0, self._most)

    def relative_update(self, inc: int = 1) -> None:
        self._done += inc
        _require_size(self._done, self._most)
        self._bar.update(inc)


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise FetchError(f"it has more than {most:,} bytes")


def _call_with_retries(place: str, timeouts: Timeouts, call: Callable[[Any, str], T]) -> T:
    """
    Call a function with a file system and a path there, in a few attempts; FetchError if none
    succeeds.
    """
    for wait in (*timeouts.retry_waits_s, None):
        try:
            return call(*_open_file_system(place, timeouts))
        except (FetchError, MemoryError):
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            reason, may_help = _describe_error(error, timeouts)
            if not may_help:
                raise FetchError(reason) from None
            if wait is None:
                raise FetchError(f"{reason}, in {counted(len(timeouts.retry_waits_s) + 1, 'attempt')}") from None
            time.sleep(wait)
    raise AssertionError  # the last attempt raises, or returns


def _open_file_system(place: str, timeouts: Timeouts) -> tuple[Any, str]:
    """Return the file system of a place, and its path there."""
    import fsspec

    scheme = scheme_of(place)
    assert scheme is not None  # noqa: S101  # it is a place
    key = (os.getpid(), "http", timeouts) if scheme in _HTTP else (os.getpid(), scheme)
    try:
        if (system := _file_systems.get(key)) is None:
            options = _http_options(timeouts) if scheme in _HTTP else {}
            system = _file_systems.setdefault(key, fsspec.filesystem(scheme, use_listings_cache=False, **options))
    except ImportError as error:
        package = PACKAGES[scheme]
        raise FetchError(f"{scheme}:// is read by another package: pip install {package or error.name}") from None
    if scheme not in _HTTP:
        return system, str(system._strip_protocol(place))  # noqa: SLF001  # each file system's public way to take names
    if "@" in place.partition("://")[2].partition("/")[0]:
        raise FetchError("it holds a name or a password, with which no server is asked: leave that out")
    return system, urllib.parse.quote(place, safe=_UNQUOTED)


def _http_options(timeouts: Timeouts) -> dict[str, Any]:
    """Return options of fsspec's file system of http."""
    import aiohttp

    times = aiohttp.ClientTimeout(timeouts.total_s, sock_connect=timeouts.read_s, sock_read=timeouts.read_s)
    client = {
        "headers": {"User-Agent": "packplan", "Accept-Encoding": "identity"},
        "requote_redirect_url": False,  # a signature is of the URL as it is written
        "timeout": times,
        "trust_env": True,
    }
    # An instance of other timeouts has another session.
    return {"client_kwargs": client, "encoded": True, "max_redirects": _MOST_REDIRECTS, "skip_instance_cache": True}


def _describe_error(error: Exception, timeouts: Timeouts) -> tuple[str, bool]:
    """Return why a file system gives nothing, and whether another attempt may do better."""
    import aiohttp

    cause = error.__cause__
    error = cause if isinstance(cause, (aiohttp.ClientError, FetchError, TimeoutError)) else error
    status, text = getattr(error, "status", 0), f"{type(error).__name__}: {mask_secrets(error)}"
    may_help = isinstance(error, aiohttp.ClientError) and not isinstance(error, (ValueError, aiohttp.TooManyRedirects))
    if isinstance(error, FetchError):
        text = str(error)
    elif isinstance(error, FileNotFoundError) or status == http.HTTPStatus.NOT_FOUND:
        text, may_help = "there is no such file", False
    elif isinstance(error, aiohttp.ClientResponseError) and status:
        asks = ": it asks for credentials, or a signature is no longer valid" if status in {401, 403} else ""
        text, may_help = f"the server answers {status} {error.message}{asks}", status in _RETRIED
    elif type(error) is TimeoutError:
        text = f"it took more than {timeouts.total_s:g} s"
    elif isinstance(error, PermissionError) or any(part in text.partition(":")[0] for part in _DENIED):
        text = f"it asks for credentials, or for other ones ({text})"
    return text, may_help


def mask_secrets(error: object) -> str:
    """Return the text of an error in one line, without what may be credentials."""
    text = mask_credentials(" ".join(str(error).split()))
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            text = text.replace(value, "…")
    return text[:300]
