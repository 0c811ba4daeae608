"""
Images and videos at places of other machines, fetched once into a folder where each stands under
the digest of its content.

A note beside them says which place gave which content: whoever asks again, in another process or
years later, gets the same bytes without a network, or is told that they are gone. A medium is
bounded in size and time, and kept only where it came whole and an image's pixels can be read.

Where samples are only measured, the head of an image and parts of a video are enough: they are
asked for alone, and not kept. Queries and names in URLs may be credentials: no message and no note
has them.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.image_headers import Head, read_size
from packplan.adapters.samples.places import NoPartsError, Patience, RefusedError, Remote, fetch, read_part, standing_of
from packplan.core.errors import CorruptArtefactError, counted
from packplan.core.samples import HEAD_BYTES, without_credentials, without_signature

T = TypeVar("T")

_SCHEMA = "packplan.medium/1"

_MOST_BYTES = 2**26
"""Bytes of an image."""

_MOST_VIDEO_BYTES = 2**33
"""Bytes of a video."""

_AT_ONCE = 16
"""Media that are fetched at the same time."""

_KEPT_HEADS, _KEPT_VIDEOS = 256, 16
"""Heads of images and parts of videos that are kept in memory where others are asked for."""

_MATROSKA = b"\x1a\x45\xdf\xa3"
"""First bytes of mkv and webm, which have no index of their frames: all of one is read."""


class MediaCache:
    """Fetches images and videos, and keeps them."""

    def __init__(self, folder: Path, *, patience: Patience | None = None) -> None:
        """
        Keep media in a folder, which several processes may share.

        Args:
            folder: Made if there is none.
            patience: Times to wait for a medium.
        """
        self.folder, self._patience = folder, patience or Patience()
        self._failed: dict[str, str] = {}
        """Place -> why its medium is not to be had; asked once in a process."""
        self._heads: dict[str, Head] = {}
        """Place -> head of its image."""
        self._parts: dict[str, Remote] = {}
        """Place -> video of which parts were read."""

    def path(self, url: str, *, is_video: bool = False) -> str:
        """
        Return the file of a medium, fetched if it is not there yet.

        Args:
            url: Place of the medium.
            is_video: Whether it is a video, which may be larger.

        Raises:
            ValueError: It cannot be had, or is no image, and why.
            OutputError: There is no room for it.
        """
        if (found := self._file(url)) is None:
            lock = self._note_file(url).with_name("lock")
            with files.writing(lock):
                lock.parent.mkdir(parents=True, exist_ok=True)
            # One thread of one process fetches; those of other media seldom wait.
            with files.held(lock, "for a medium of another process"):
                found = self._file(url) or self._ask_place(
                    url, partial(self._fetch_medium, url, is_video=is_video), is_video=is_video
                )
        return found

    def prefetch(self, images: Iterable[str], videos: Iterable[str] = ()) -> None:
        """
        Fetch media that are not there yet, several at a time; those that fail say so later.

        Args:
            images: Places of images.
            videos: Places of videos.
        """
        wanted = {url: partial(self.path, url) for url in images}
        wanted |= {url: partial(self.path, url, is_video=True) for url in videos}
        missing = [call for url, call in wanted.items() if self._file(url) is None]
        if not missing:
            return
        bar = progress(total=len(missing), desc="fetching media", unit=" media", delay=BRIEF_S)
        with bar, ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(_try, missing):
                bar.update()

    def prefetch_heads(self, images: Iterable[str], videos: Iterable[str] = ()) -> None:
        """
        Ask for heads of media, several at a time, and forget the oldest ones; as `prefetch` does.

        Args:
            images: Places of images.
            videos: Places of videos.
        """
        for kept, number in ((self._heads, _KEPT_HEADS), (self._parts, _KEPT_VIDEOS)):
            for url in [*kept][: max(0, len(kept) - number)]:
                del kept[url]
        calls = {url: partial(self.head, url) for url in images} | {url: partial(self.video, url) for url in videos}
        if missing := [*calls.values()]:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(_try, missing))

    def head(self, url: str) -> Head | str:
        """
        Return the head of an image, or its file: where it was fetched already, or where its head
        does not say its width and height.

        Raises:
            ValueError: It cannot be had, or is no image, and why.
            OutputError: There is no room for it.
        """
        if (found := self._heads.get(url) or self._file(url)) is not None:
            return found
        head = self._ask_place(url, partial(self._head, url))
        try:
            read_size(head or b"")
        except ValueError:
            return self.path(url)
        assert head is not None  # noqa: S101  # nothing has no size
        self._heads[url] = head
        return head

    def video(self, url: str, *, is_frame: bool = False) -> str:
        """
        Return a video of which parts are read, or its file: where it was fetched already, or where
        only all of it says how many frames it has.

        Args:
            url: Place of the video.
            is_frame: Whether it is an image, a frame of a video.

        Raises:
            ValueError: It cannot be had.
            OutputError: There is no room for it.
        """
        if (found := self._file(url)) is not None:
            return found
        if url not in self._parts:
            remote = self._ask_place(url, partial(self._remote, url, is_frame=is_frame), is_video=not is_frame)
            if remote is None:
                return self.path(url, is_video=not is_frame)
            self._parts[url] = remote
        return self._parts[url]

    def _head(self, url: str) -> Head | None:
        """Return the head of an image; None where its server does not say how long it is."""
        size = standing_of(url, most=_MOST_BYTES, patience=self._patience).size
        return Head(read_part(url, 0, min(size, HEAD_BYTES), patience=self._patience), size) if size else None

    def _remote(self, url: str, *, is_frame: bool) -> Remote | None:
        """Return a video of which parts are read; None where it takes all of it."""
        try:
            remote = Remote(url, most=_MOST_BYTES if is_frame else _MOST_VIDEO_BYTES, patience=self._patience)
        except NoPartsError:
            return None
        return None if remote.read_at(0, len(_MATROSKA)) == _MATROSKA else remote

    def _note_file(self, url: str) -> Path:
        key = hashlib.sha256(without_signature(url).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return self.folder / "urls" / key[:2] / f"{key}.json"

    def _content(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256

    def _note(self, url: str) -> dict[str, Any] | None:
        """Return the note about a place's medium; None if there is none, or a damaged one."""
        with contextlib.suppress(CorruptArtefactError), files.writing(self.folder):
            return files.read_manifest(self._note_file(url), _SCHEMA)
        return None

    def _file(self, url: str) -> str | None:
        """Return the file of a place's medium; None if it is not there whole."""
        if (note := self._note(url)) is None:
            return None
        path = self._content(note["sha256"])
        return str(path) if path.is_file() and path.stat().st_size == int(note["bytes"]) else None

    def _fetch_medium(self, url: str, *, is_video: bool) -> str:
        """Fetch a medium, keep it and return its file; RefusedError if it cannot be had."""
        known, note_file = self._note(url), self._note_file(url)
        fetched = note_file.with_suffix(".fetched")
        most = _MOST_VIDEO_BYTES if is_video else _MOST_BYTES
        try:
            sha256 = fetch(url, fetched, most=most, patience=self._patience)
            if not is_video:
                _require_image(fetched)
            if known is not None and known["sha256"] != sha256:
                raise RefusedError("it was fetched before, its file is gone, and the server has another one now")
            target = self._content(sha256)
            with files.writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                fetched.replace(target)
                files.sync_folder(target.parent)
        finally:
            fetched.unlink(missing_ok=True)
        note = {
            "schema": _SCHEMA,
            "url": without_credentials(url)[:500],
            "sha256": sha256,
            "bytes": target.stat().st_size,
        }
        files.write_manifest(note_file, note)
        return str(target)

    def _ask_place(self, url: str, call: Callable[[], T], *, is_video: bool = False) -> T:
        """Return what is taken of a place; ValueError if there is nothing to take."""
        if (reason := self._failed.get(url)) is not None:
            raise ValueError(reason)
        try:
            return call()
        except RefusedError as error:
            reason = (
                f"the {'video' if is_video else 'image'} {without_credentials(url)[:500]} cannot be fetched: {error}"
            )
            self._failed[url] = reason
            raise ValueError(reason) from None


def _try(call: Callable[[], object]) -> None:
    with contextlib.suppress(ValueError):  # which is said again, where the record is known
        call()


def _require_image(fetched: Path) -> None:
    """Refuse what came if it is no image whose pixels can be read."""
    try:
        read_size(held := fetched.read_bytes(), decode=True)
    except ValueError as error:
        why = str(error).split(" in the record ", maxsplit=1)[-1]
        raise RefusedError(f"what came, {counted(len(held), 'byte')}, {why}") from None
