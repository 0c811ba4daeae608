"""
Reads files on http servers, S3, Google Cloud, Hugging Face and Azure through fsspec.

fsspec's libraries find credentials by their own rules. No message shows credentials.
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

_MAX_REDIRECTS = 5

_UNQUOTED = "%/:=&?~#+!$,;'@()*[]|"
"""Characters of a URL that are not quoted; blanks and non-ASCII letters are quoted."""

_RETRIED = (429, 500, 502, 503, 504)
"""HTTP status codes after which the same request may succeed a moment later."""

_VERSIONS = (
    "ETag", "etag", "md5Hash", "generation", "oid", "blob_id", "LastModified", "Last-Modified", "last_modified",
    "created",
)  # fmt: skip
"""Keys of a file system's `info`; the first key that has a value gives a file's version."""

_DENIED = ("Credential", "Forbidden", "Unauthorized", "AccessDenied", "NoAuth")
"""Parts of class names of errors that mean missing or insufficient credentials."""

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Error numbers that mean a fault of the local disk."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY")
"""Pattern for names of environment variables whose values are masked in messages."""

_file_systems: dict[tuple[object, ...], Any] = {}
"""
File systems by process, scheme and timeouts; all threads share their connections. A forked process
opens new file systems. The process also keeps its parent's file systems, since dropping them would
close the parent's connections.
"""


@attrs.frozen
class Timeouts:
    """Timeouts in seconds for http servers; other file systems use their own timeouts."""

    total_s: float | None = 60.0
    """Seconds for a whole response; None waits as long as more bytes arrive."""

    read_s: float = 10.0
    """Seconds to wait for the next bytes."""

    retry_waits_s: tuple[float, ...] = (0.5, 2.0)
    """Seconds to pause before each retry of a request that may succeed later."""


class FetchError(Exception):
    """A remote file cannot be read, and a retry would not help or has failed too."""


class FileVersion(NamedTuple):
    """Size and version of a remote file."""

    size: int | None
    """Size in bytes; None if the server does not state it."""

    version: str
    """Tag of the content, or time of the last change; empty if the server states neither."""


def read_version(url: str, *, max_bytes: int, timeouts: Timeouts) -> FileVersion:
    """
    Return the size and version of a remote file.

    Args:
        url: URL of the file.
        max_bytes: Largest size in bytes that is accepted.
        timeouts: Timeouts for http servers.

    Raises:
        FetchError: The file does not exist or is too large, or its server does not respond.
    """
    info = _call_with_retries(url, timeouts, lambda system, path: system.info(path))
    if info.get("type") == "directory":
        raise FetchError("it is a folder: name a file")
    size = None if info.get("size") is None else int(info["size"])
    _refuse_oversize(size or 0, max_bytes)
    return FileVersion(size, str(next((info[name] for name in _VERSIONS if info.get(name)), "")))


def fetch(url: str, target: Path, *, max_bytes: int, timeouts: Timeouts) -> str:
    """
    Download a remote file, and return the SHA-256 of its content.

    Args:
        url: URL of the file.
        target: Local file to write; after an error it may have a part of the content.
        max_bytes: Largest size in bytes that is accepted.
        timeouts: Timeouts for http servers.

    Raises:
        FetchError: The file cannot be fetched.
        OutputError: The local file cannot be written, for example on a full disk.
    """
    bar = progress(desc=f"fetching {mask_credentials(url)}", unit=" bytes", delay=BRIEF_S, leave=False)
    limit = _SizeLimit(max_bytes, bar)
    with files.wrap_write_errors(target), bar:
        target.touch()
        _call_with_retries(url, timeouts, lambda system, path: system.get_file(path, str(target), callback=limit))
        with target.open("rb") as file:
            os.fsync(file.fileno())
            _refuse_oversize(os.fstat(file.fileno()).st_size, max_bytes)
            return hashlib.file_digest(file, "sha256").hexdigest()


def list_urls(pattern: str) -> list[str]:
    """Return the URLs that match a pattern, sorted; FetchError if the server cannot list them."""

    def list_matching(system: Any, path: str) -> list[str]:
        return sorted(system.unstrip_protocol(one) for one in system.glob(path))

    return _call_with_retries(pattern, Timeouts(), list_matching)


class _SizeLimit(Callback):  # type: ignore[misc]  # fsspec has no types
    """Progress callback that raises FetchError when a download turns out to be too large."""

    def __init__(self, max_bytes: int, bar: Any) -> None:
        super().__init__()
        self._max_bytes, self._bar, self._done = max_bytes, bar, 0

    def set_size(self, size: int | None) -> None:
        self._done, self._bar.total = 0, size
        _refuse_oversize(size or 0, self._max_bytes)

    def relative_update(self, inc: int = 1) -> None:
        self._done += inc
        _refuse_oversize(self._done, self._max_bytes)
        self._bar.update(inc)


def _refuse_oversize(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise FetchError(f"it has more than {max_bytes:,} bytes")


def _call_with_retries(url: str, timeouts: Timeouts, call: Callable[[Any, str], T]) -> T:
    """
    Return the result of `call(file_system, path)` for a URL, with retries after temporary errors.

    FetchError is raised if the error is not temporary, or if all attempts fail.
    """
    for wait in (*timeouts.retry_waits_s, None):
        try:
            return call(*_open_file_system(url, timeouts))
        except (FetchError, MemoryError):
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            reason, may_succeed = _describe_error(error, timeouts)
            if not may_succeed:
                raise FetchError(reason) from None
            if wait is None:
                raise FetchError(f"{reason}, in {counted(len(timeouts.retry_waits_s) + 1, 'attempt')}") from None
            time.sleep(wait)
    raise AssertionError  # the last attempt raises, or returns


def _open_file_system(url: str, timeouts: Timeouts) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    import fsspec

    scheme = scheme_of(url)
    assert scheme is not None  # noqa: S101  # callers pass URLs
    key = (os.getpid(), "http", timeouts) if scheme in _HTTP else (os.getpid(), scheme)
    try:
        if (system := _file_systems.get(key)) is None:
            options = _http_options(timeouts) if scheme in _HTTP else {}
            system = _file_systems.setdefault(key, fsspec.filesystem(scheme, use_listings_cache=False, **options))
    except ImportError as error:
        package = PACKAGES[scheme]
        raise FetchError(f"{scheme}:// needs another package: pip install {package or error.name}") from None
    if scheme not in _HTTP:
        return system, str(system._strip_protocol(url))  # noqa: SLF001  # each file system's public way to take names
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise FetchError("it has a user name or a password, which is never sent: leave it out")
    return system, urllib.parse.quote(url, safe=_UNQUOTED)


def _http_options(timeouts: Timeouts) -> dict[str, Any]:
    """Return the options of fsspec's http file system."""
    import aiohttp

    client = {
        "headers": {"User-Agent": "packplan", "Accept-Encoding": "identity"},
        "requote_redirect_url": False,  # a signature is valid only for the URL as it is written
        "timeout": aiohttp.ClientTimeout(timeouts.total_s, sock_connect=timeouts.read_s, sock_read=timeouts.read_s),
        "trust_env": True,
    }
    # Without the instance cache, since each set of timeouts needs a session of its own.
    return {"client_kwargs": client, "encoded": True, "max_redirects": _MAX_REDIRECTS, "skip_instance_cache": True}


def _describe_error(error: Exception, timeouts: Timeouts) -> tuple[str, bool]:
    """Return a message for a file system's error, and whether a retry may succeed."""
    import aiohttp

    cause = error.__cause__
    error = cause if isinstance(cause, (aiohttp.ClientError, FetchError, TimeoutError)) else error
    status, text = getattr(error, "status", 0), f"{type(error).__name__}: {mask_secrets(error)}"
    may_succeed = isinstance(error, aiohttp.ClientError) and not isinstance(
        error, (ValueError, aiohttp.TooManyRedirects)
    )
    if isinstance(error, FetchError):
        text = str(error)
    elif isinstance(error, FileNotFoundError) or status == http.HTTPStatus.NOT_FOUND:
        text, may_succeed = "there is no such file", False
    elif isinstance(error, aiohttp.ClientResponseError) and status:
        asks = ": it requires credentials, or a signature is no longer valid" if status in {401, 403} else ""
        text, may_succeed = f"the server answers {status} {error.message}{asks}", status in _RETRIED
    elif type(error) is TimeoutError:
        text = f"it took more than {timeouts.total_s:g} s"
    elif isinstance(error, PermissionError) or any(part in text.partition(":")[0] for part in _DENIED):
        text = f"the server requires credentials, or rejects those that were sent ({text})"
    return text, may_succeed


def mask_secrets(error: object) -> str:
    """Return an error's text without credentials, as one line of at most 300 characters."""
    text = mask_credentials(" ".join(str(error).split()))
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            text = text.replace(value, "…")
    return text[:300]
