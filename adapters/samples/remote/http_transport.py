"""Files at http and https URLs; redirects lead to such URLs alone, and never from https to http."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import attrs

from packplan.adapters.samples.remote.transport import (
    Part,
    Patience,
    RefusedError,
    Standing,
    TroubleError,
    traffic,
    without_secrets,
)
from packplan.core.errors import counted
from packplan.core.samples import without_credentials

_CHUNK = 2**16

_UNSIZED = 2**26
"""Bytes that are read of a file whose size the server does not say."""

_MOST_REDIRECTS = 5

_MEANT = "%/:=&?~#+!$,;'@()*[]|"
"""Signs of a URL that stay as they are; blanks and letters beyond ASCII are quoted."""

_AGAIN = (429, 500, 502, 503, 504)
"""Answers of a server that may do better a moment later."""

_EMPTY = 416
"""Answer to a request for the first byte of a file that has none."""


class HttpTransport:
    """A `Transport` of http and https."""

    def part(self, place: str, start: int, stop: int, *, most: int, patience: Patience) -> Part:
        """
        Return bytes of a file; see `Transport`.

        Args:
            place: URL of the file.
            start: First byte.
            stop: End, which may lie behind the file's.
            most: Bytes that the file may have.
            patience: Times to wait.

        Raises:
            RefusedError: The server does not give them.
            TroubleError: Another attempt may succeed.
        """
        with _asked(place, patience, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            is_part = answer.status == http.client.PARTIAL_CONTENT
            if start and not is_part:
                raise RefusedError("the server does not send parts of files")
            if answer.status == _EMPTY:
                return Part(b"", Standing(0, answer.version))
            size = answer.size(ranged=is_part)
            if size is None:
                held = answer.up_to_end(min(most, _UNSIZED))
                return Part(held[:stop], Standing(len(held), answer.version), is_part=len(held) <= stop)
            _require_size(size, most)
            return Part(answer.exactly(min(size, stop) - start), Standing(size, answer.version), is_part)

    def copy(self, place: str, file: BinaryIO, *, most: int, patience: Patience) -> None:
        """
        Write all of a file; see `Transport`.

        Args:
            place: URL of the file.
            file: File to write to; what an earlier attempt wrote is dropped.
            most: Bytes that the file may have.
            patience: Times to wait for the next bytes; all of it may take as long as it does.

        Raises:
            RefusedError: The server does not give it.
            TroubleError: Another attempt may succeed.
        """
        file.seek(0)
        file.truncate()
        with _asked(place, attrs.evolve(patience, image_s=float("inf")), {}) as answer:
            size = answer.size(ranged=False) or 0
            _require_size(size, most)
            while done := answer.next(min(_CHUNK, size - file.tell())):
                file.write(done)
        if file.tell() != size:
            raise TroubleError(f"{file.tell():,} of {counted(size, 'byte')} came")

    def listed(self, pattern: str) -> list[str]:  # noqa: ARG002
        """Refuse a pattern: a server of http lists no files."""
        raise RefusedError("a server of http lists no files: name each, or a place at s3://, gs:// or hf://")


@attrs.define
class _Answer:
    """Answer of a server."""

    opened: Any
    deadline: float
    seconds: float
    num_bytes: int = 0

    @property
    def status(self) -> int:
        return int(self.opened.status)

    @property
    def version(self) -> str:
        """Tag of the content, or the time of its last change."""
        return str(self.opened.headers.get("ETag") or self.opened.headers.get("Last-Modified") or "")

    def size(self, *, ranged: bool) -> int | None:
        """Return the bytes of the whole file; None if the server does not say."""
        headers = self.opened.headers
        text = str(headers.get("Content-Range", "")).rpartition("/")[2] if ranged else headers.get("Content-Length")
        return int(text) if text and text.isdigit() else None

    def next(self, most: int) -> bytes:
        """Return the next bytes; nothing at the end."""
        held: bytes = self.opened.read1(most) if most > 0 else b""
        self.num_bytes += len(held)
        if time.monotonic() > self.deadline:
            raise RefusedError(f"it took more than {self.seconds:g} s")
        return held

    def exactly(self, wanted: int) -> bytes:
        """Return so many bytes; TroubleError if fewer come."""
        parts = []
        while (left := wanted - self.num_bytes) > 0 and (held := self.next(min(left, _CHUNK))):
            parts.append(held)
        if self.num_bytes < wanted:
            raise TroubleError(f"{self.num_bytes:,} of {counted(wanted, 'byte')} came")
        return b"".join(parts)

    def up_to_end(self, most: int) -> bytes:
        """Return all bytes that come; RefusedError if they are more than may be."""
        parts = []
        while held := self.next(_CHUNK):
            parts.append(held)
            _require_size(self.num_bytes, most)
        return b"".join(parts)


def _require_size(size: int, most: int) -> None:
    if size > most:
        raise RefusedError(f"it has more than {most:,} bytes")


@contextmanager
def _asked(url: str, patience: Patience, headers: Mapping[str, str]) -> Iterator[_Answer]:
    """Ask a server; RefusedError or TroubleError say why it gives nothing."""
    parts = urllib.parse.quote(url, safe=_MEANT)
    if "@" in parts.partition("://")[2].partition("/")[0]:
        raise RefusedError("it holds a name or a password, with which no server is asked: leave that out")
    answer = None
    try:
        request = urllib.request.Request(parts, headers={"User-Agent": "packplan", **headers})  # noqa: S310  # it is of http or https
        deadline = time.monotonic() + patience.image_s
        with _open(request, patience) as opened:
            answer = _Answer(opened, deadline, patience.image_s)
            yield answer
    except urllib.error.HTTPError as error:
        raise _refused(error) from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise TroubleError(f"{type(error).__name__}: {without_secrets(why)}") from None
    except ValueError as error:  # it is no URL
        raise RefusedError(without_secrets(error)) from None
    finally:
        traffic.count(answer.num_bytes if answer else 0)


def _open(request: urllib.request.Request, patience: Patience) -> Any:
    """Return the answer to a request, also to one for the beginning of an empty file."""
    try:
        return urllib.request.build_opener(_Redirects).open(request, timeout=patience.silence_s)
    except urllib.error.HTTPError as error:
        if error.code == _EMPTY and str(error.headers.get("Content-Range", "")).endswith("*/0"):
            return error
        raise


def _refused(error: urllib.error.HTTPError) -> Exception:
    """Return the error that says what a server answers."""
    error.close()
    kind = TroubleError if error.code in _AGAIN else RefusedError
    asks = ": it asks for credentials, or a signature is no longer valid" if error.code in {401, 403} else ""
    return kind(f"the server answers {error.code} {error.reason}{asks}")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, to http and https alone; never from https to http."""

    max_redirections = _MOST_REDIRECTS
    max_repeats = 1

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        """Return the request that a redirect asks for; see urllib, which refuses other schemes."""
        scheme = urllib.parse.urlsplit(newurl).scheme.lower()
        if scheme not in {"http", "https"} or (req.type == "https" and scheme == "http"):
            place = without_credentials(newurl)[:100]
            raise RefusedError(f"the server sends on to {place!r}, and only http and https are read")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
