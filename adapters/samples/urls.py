"""
Images of URLs, fetched once into a folder where each stands under the digest of its content.

A note beside them says which URL gave which content: whoever asks again, in another process or
years later, gets the same bytes without a network, or is told that they are gone. An image is
bounded in size and time, and kept only where it came whole and its pixels can be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.image_headers import read_size
from packplan.core.errors import CorruptArtefactError, counted

_SCHEMA = "packplan.medium/1"

_MOST_BYTES = 2**26
"""Bytes of an image."""

_CHUNK = 2**16

_AT_ONCE = 16
"""Images that are fetched at the same time."""

_MOST_REDIRECTS = 5

_MEANT = "%/:=&?~#+!$,;'@()*[]|"
"""Signs of a URL that stay as they are; blanks and letters beyond ASCII are quoted."""

_AGAIN = (429, 500, 502, 503, 504)
"""Answers of a server that may do better a moment later."""


@attrs.frozen
class Patience:
    """How long to wait for an image."""

    image_s: float = 60.0
    """For all of it, whatever the server does."""

    silence_s: float = 10.0
    """For the next bytes."""

    waits_s: tuple[float, ...] = (0.5, 2.0)
    """Before each further attempt, where another one may do better."""


class _RefusedError(Exception):
    """An image is not to be had; asking again would not help."""


class _TroubleError(Exception):
    """An image did not come this time."""


class MediaCache:
    """Fetches images, and keeps them."""

    def __init__(self, folder: Path, *, patience: Patience | None = None) -> None:
        """
        Keep images in a folder, which several processes may share.

        Args:
            folder: Made if there is none.
            patience: Times to wait for an image.
        """
        self.folder, self._patience = folder, patience or Patience()
        self._failed: dict[str, str] = {}
        """URL -> why its image is not to be had; asked once in a process."""

    def path(self, url: str) -> str:
        """
        Return the file of an image, fetched if it is not there yet.

        Raises:
            ValueError: It cannot be had, or is no image, and why.
            OutputError: There is no room for it.
        """
        if (found := self._file(url)) is None:
            lock = self._note_file(url).with_name("lock")
            with files.writing(lock):
                lock.parent.mkdir(parents=True, exist_ok=True)
            # One thread of one process fetches; those of other images seldom wait.
            with files.held(lock, "for an image of another process"):
                found = self._file(url) or self._fetched(url)
        return found

    def prefetch(self, urls: Iterable[str]) -> None:
        """Fetch images that are not there yet, several at a time; those that fail say so later."""
        missing = [url for url in dict.fromkeys(urls) if self._file(url) is None]
        if not missing:
            return
        bar = progress(total=len(missing), desc="fetching images", unit=" images", delay=BRIEF_S)
        with bar, ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(self._try, missing):
                bar.update()

    def _try(self, url: str) -> None:
        with contextlib.suppress(ValueError):  # which `path` says again, where its record is known
            self.path(url)

    def _note_file(self, url: str) -> Path:
        key = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return self.folder / "urls" / key[:2] / f"{key}.json"

    def _content(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256

    def _note(self, url: str) -> dict[str, Any] | None:
        """Return the note about a URL's image; None if there is none, or a damaged one."""
        with contextlib.suppress(CorruptArtefactError), files.writing(self.folder):
            return files.read_manifest(self._note_file(url), _SCHEMA)
        return None

    def _file(self, url: str) -> str | None:
        """Return the file of a URL's image; None if it is not there whole."""
        if (note := self._note(url)) is None:
            return None
        path = self._content(note["sha256"])
        return str(path) if path.is_file() and path.stat().st_size == int(note["bytes"]) else None

    def _fetched(self, url: str) -> str:
        """Fetch an image, keep it and return its file; ValueError if it cannot be had."""
        if (reason := self._failed.get(url)) is not None:
            raise ValueError(reason)
        try:
            held = self._ask(url)
            sha256 = _checked(held, self._note(url))
        except _RefusedError as error:
            reason = f"the image {url[:500]} cannot be fetched: {error}"
            self._failed[url] = reason
            raise ValueError(reason) from None
        target = self._content(sha256)
        with files.writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(target, held)
        note = {"schema": _SCHEMA, "url": url, "sha256": sha256, "bytes": len(held)}
        files.write_manifest(self._note_file(url), note)
        return str(target)

    def _ask(self, url: str) -> bytes:
        """Return the bytes of a URL, in a few attempts; _RefusedError if there are none."""
        for wait in (*self._patience.waits_s, None):
            try:
                return _read(url, self._patience)
            except _TroubleError as error:
                if wait is None:
                    attempts = counted(len(self._patience.waits_s) + 1, "attempt")
                    raise _RefusedError(f"{error}, in {attempts}") from None
                time.sleep(wait)
        raise AssertionError  # the last attempt raises, or returns


def _checked(held: bytes, known: dict[str, Any] | None) -> str:
    """
    Return the digest of what came, if it is an image whose pixels can be read, and the one that was
    fetched before, whose file is gone; else _RefusedError.
    """
    try:
        read_size(held, decode=True)
    except ValueError as error:
        why = str(error).split(" in the record ", maxsplit=1)[-1]
        message = f"what came, {counted(len(held), 'byte')}, {why}"
        raise _RefusedError(message) from None
    sha256 = hashlib.sha256(held).hexdigest()
    if known is not None and known["sha256"] != sha256:
        message = "it was fetched before, its file is gone, and the server has another one now"
        raise _RefusedError(message)
    return sha256


def _read(url: str, patience: Patience) -> bytes:
    """Return the bytes of a URL; _TroubleError if another attempt may succeed."""
    deadline = time.monotonic() + patience.image_s
    try:
        request = urllib.request.Request(  # noqa: S310  # it is of http or https
            urllib.parse.quote(url, safe=_MEANT), headers={"User-Agent": "packplan", "Accept": "image/*"}
        )
        with urllib.request.build_opener(_Redirects).open(request, timeout=patience.silence_s) as answer:
            return _whole(answer, deadline, patience)
    except urllib.error.HTTPError as error:
        error.close()
        kind = _TroubleError if error.code in _AGAIN else _RefusedError
        raise kind(f"the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise _TroubleError(f"{type(error).__name__}: {why}") from None
    except ValueError as error:  # it is no URL
        raise _RefusedError(str(error)) from None


def _whole(answer: Any, deadline: float, patience: Patience) -> bytes:
    """Return all that a server sends; _TroubleError if that is less than it says."""
    said = answer.headers.get("Content-Length")
    size = int(said) if said and said.isdigit() else None
    parts, number = [], 0
    while max(number, size or 0) <= _MOST_BYTES and (part := answer.read1(_CHUNK)):
        parts.append(part)
        number += len(part)
        if time.monotonic() > deadline:
            message = f"it took more than {patience.image_s:g} s"
            raise _RefusedError(message)
    if max(number, size or 0) > _MOST_BYTES:
        message = f"it has more than {_MOST_BYTES:,} bytes"
        raise _RefusedError(message)
    if size is not None and number != size:
        message = f"{number:,} of {counted(size, 'byte')} came"
        raise _TroubleError(message)
    return b"".join(parts)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, to http and https alone; never from https to http."""

    max_redirections = _MOST_REDIRECTS
    max_repeats = 1

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        """Return the request that a redirect asks for; see urllib, which refuses other schemes."""
        scheme = urllib.parse.urlsplit(newurl).scheme.lower()
        if scheme not in {"http", "https"} or (req.type == "https" and scheme == "http"):
            message = f"the server sends on to {newurl[:100]!r}, and only http and https are read"
            raise _RefusedError(message)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
