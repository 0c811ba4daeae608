"""
Downloads remote data files and media into folders on this machine.

Training reads records in shuffled order and should not need a network, so whole files are
downloaded. Each download is stored under the digest of its content, with a note of its URL. At each
start, the server is asked whether a data file has changed. A medium is downloaded once: later
processes read the stored bytes without a network. If a stored medium was deleted, and the server
now has different bytes, an error is raised. No message or note has the query or user name of a URL,
since these may be credentials.

There are several reasons not to use fsspec's `filecache`. The cache stores no digest, so it does
not detect another file under the same name, and it has no size limit. The cache's index has whole
URLs, signatures included, in one file that processes write without a lock. The cache also treats a
URL with a new signature as another file.
"""

import contextlib
import glob
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from packplan.adapters import files
from packplan.adapters.samples.media_files import read_image_size
from packplan.adapters.samples.remote_files import FetchError, FileVersion, Timeouts, fetch, list_urls, read_version
from packplan.core.errors import CorruptArtefactError, DataSetError, counted
from packplan.core.samples.media import Image, Video
from packplan.core.samples.urls import is_url, join_url, mask_credentials, scheme_of, strip_signature, url_folder
from packplan.core.samples.values import UnusableRecordError

log = logging.getLogger(__name__)

MAX_BYTES = {"file": 2**36, "video": 2**33, "image": 2**26}
"""Largest size of a download in bytes, by its kind; `file` is a data file."""

_FILE_TIMEOUTS = Timeouts(total_s=None)
"""Timeouts for downloading a data file."""

_SCHEMA, _MEDIUM_SCHEMA = "packplan.place/1", "packplan.medium/1"

_FOLDER, _NOTE = "place-", "note.json"


def _url_key(url: str) -> str:
    """Return the digest that names a URL's files on disk; the URL's signature does not count."""
    return hashlib.sha256(strip_signature(url).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _read_download_note(path: Path, schema: str) -> dict[str, Any] | None:
    """Return a download's note (URL, size and digest), or None if it is missing or damaged."""
    with contextlib.suppress(CorruptArtefactError), files.wrap_write_errors(path):
        return files.read_manifest(path, schema)
    return None


def _move_download(fetched: Path, target: Path) -> None:
    """Move a complete download to *target*, and flush the folder so that it survives a crash."""
    files.make_folder(target.parent)
    with files.wrap_write_errors(target):
        fetched.replace(target)
        files.sync_folder(target.parent)


# Data files.


def fetch_data_files(name: str, cache: Path) -> list[Path]:
    """
    Return local paths of the files at a URL or URL pattern; new and changed files are downloaded.

    Args:
        name: URL, or a pattern of URLs if servers of its scheme can list files.
        cache: Folder of downloads.

    Raises:
        DataSetError: A file cannot be fetched, or no file matches.
        OutputError: A download cannot be written, for example on a full disk.
    """
    if scheme_of(name) in {"http", "https"} or not glob.has_magic(name):
        return [_fetch_data_file(name, cache)]
    try:
        found = list_urls(name)
    except FetchError as error:
        raise _unreadable_error(name, error) from None
    if not found:
        raise DataSetError(f"{mask_credentials(name)} matches no file: name existing data files")
    return [_fetch_data_file(url, cache) for url in found]


def remote_origin(path: Path) -> tuple[str, str] | None:
    """
    Return the URL that a file was downloaded from, without credentials, and the URL's folder.

    If the file was not downloaded, None is returned.
    """
    if not path.parent.parent.name.startswith(_FOLDER):
        return None
    note = _read_download_note(path.parent.parent / _NOTE, _SCHEMA)
    return None if note is None else (str(note["place"]), str(note["folder"]))


def _unreadable_error(name: str, error: Exception) -> DataSetError:
    return DataSetError(f"{mask_credentials(name)} cannot be read: {error}")


def _fetch_data_file(url: str, cache: Path) -> Path:
    """Return the path of a data file's current version, which is downloaded if needed."""
    folder = cache / f"{_FOLDER}{_url_key(url)}"
    files.make_folder(folder)
    with files.hold_lock(folder / "lock", f"for a copy of {mask_credentials(url)}"):
        note = _read_download_note(folder / _NOTE, _SCHEMA)
        copy = folder / note["sha256"] / note["name"] if note else folder
        known = FileVersion(note["size"], note["version"]) if note else FileVersion(0, "")
        has_copy = copy.is_file() and copy.stat().st_size == known.size
        try:
            current = read_version(url, max_bytes=MAX_BYTES["file"], timeouts=_FILE_TIMEOUTS)
        except FetchError as error:
            if not has_copy:
                raise _unreadable_error(url, error) from None
            log.warning("%s cannot be reached: %s; the run reads the earlier download", mask_credentials(url), error)
            return copy
        if has_copy and current.version and current == known:
            return copy
        fetched = _download_version(url, folder, current)
        if has_copy and fetched != copy:
            log.warning("%s has changed on its server, so it was downloaded again", mask_credentials(url))
        return fetched


def _download_version(url: str, folder: Path, version: FileVersion) -> Path:
    """Download a data file; DataSetError if the server's file is not *version* any more."""
    target, shown = folder / "fetched", mask_credentials(url)
    # The name's ending states the format.
    name = re.sub(r"[^\w.-]", "_", re.sub(r"[?#].*", "", url).rpartition("/")[2])[-100:].lstrip(".") or "data"
    try:
        sha256 = fetch(url, target, max_bytes=MAX_BYTES["file"], timeouts=_FILE_TIMEOUTS)
        if version != read_version(url, max_bytes=MAX_BYTES["file"], timeouts=_FILE_TIMEOUTS):
            raise FetchError("it changed while it was downloaded: start again when it is complete")  # noqa: TRY301
    except FetchError as error:
        raise _unreadable_error(url, error) from None
    _move_download(target, copy := folder / sha256 / name)
    note = {"schema": _SCHEMA, "place": shown, "folder": url_folder(url), "sha256": sha256, "name": name}
    files.write_manifest(folder / _NOTE, {**note, "size": copy.stat().st_size, "version": version.version})
    log.info("%s was downloaded to %s", shown, copy)
    return copy


# Media.


def fetch_medium(medium: Image | Video, folder: str, cache: "MediaCache | None", *, is_video: bool = False) -> Any:
    """
    Return the local path of a medium, or of each of its frames; remote media are downloaded first.

    An image inside the record is returned as its bytes.

    Args:
        medium: Path, URL or bytes of an image; path or URL of a video, or of each of its frames.
        folder: Folder or URL that relative media paths of the record start at.
        cache: Store of downloaded media; None refuses remote media.
        is_video: Whether the medium is a video, which may be larger than an image.

    Raises:
        ValueError: The medium is remote, and cannot be fetched.
        OutputError: The download cannot be written, for example on a full disk.
    """
    if isinstance(medium, bytes):
        return medium
    if isinstance(medium, tuple):
        return tuple(fetch_medium(frame, folder, cache) for frame in medium)
    url = medium if is_url(medium) or not is_url(folder) else join_url(folder, medium)
    if not is_url(url):
        return str(Path(folder, url))
    if cache is None:
        reason = f"the record has {medium[:60]!r} at a URL: name a folder for downloads"
        raise UnusableRecordError(reason, "media_cache")
    return cache.path(url, is_video=is_video)


class MediaCache:
    """Folder of downloaded images and videos, each of which is downloaded once."""

    def __init__(self, folder: Path, *, timeouts: Timeouts | None = None) -> None:
        """
        Store media in a folder, which several processes may share.

        Args:
            folder: Folder of downloads; it is created if it does not exist.
            timeouts: Timeouts for downloading a medium; None means `Timeouts()`.
        """
        self.folder, self._timeouts = folder, timeouts or Timeouts()
        self._failed: dict[str, str] = {}
        """
        Reason for each URL that could not be fetched. This process does not try these URLs again.
        """

    def path(self, url: str, *, is_video: bool = False) -> str:
        """
        Return the path of a medium's file; download the file first if it is not in the folder.

        Args:
            url: URL of the medium.
            is_video: Whether the medium is a video, which may be larger than an image.

        Raises:
            ValueError: The medium cannot be fetched, or has to be an image but is not one.
            OutputError: The download cannot be written, for example on a full disk.
        """
        if (found := self._find_file(url)) is not None:
            return found
        kind, lock = "video" if is_video else "image", self._note_file(url).with_name("lock")
        files.make_folder(lock.parent)
        # One thread of one process fetches this medium; fetching of other media seldom waits.
        with files.hold_lock(lock, "for a medium that another process downloads"):
            if (found := self._find_file(url)) is not None:
                return found
            if url not in self._failed:
                try:
                    return self._fetch(url, kind)
                except FetchError as error:
                    self._failed[url] = f"the {kind} {mask_credentials(url)[:500]} cannot be fetched: {error}"
        raise ValueError(self._failed[url])

    def _note_file(self, url: str) -> Path:
        key = _url_key(url)
        return self.folder / "urls" / key[:2] / f"{key}.json"

    def _content_file(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256

    def _find_file(self, url: str) -> str | None:
        """Return the path of a downloaded medium, or None if it is missing or incomplete."""
        if (note := _read_download_note(self._note_file(url), _MEDIUM_SCHEMA)) is None:
            return None
        path = self._content_file(note["sha256"])
        return str(path) if path.is_file() and path.stat().st_size == int(note["bytes"]) else None

    def _fetch(self, url: str, kind: str) -> str:
        """Download a medium and return its path; FetchError on failure or changed content."""
        note_file = self._note_file(url)
        known, fetched = _read_download_note(note_file, _MEDIUM_SCHEMA), note_file.with_suffix(".fetched")
        try:
            sha256 = fetch(url, fetched, max_bytes=MAX_BYTES[kind], timeouts=self._timeouts)
            if kind == "image":
                _require_image(fetched)
            if known is not None and known["sha256"] != sha256:
                raise FetchError("the earlier download was deleted, and the server now has a different file")
            _move_download(fetched, target := self._content_file(sha256))
        finally:
            fetched.unlink(missing_ok=True)
        note = {"schema": _MEDIUM_SCHEMA, "url": mask_credentials(url)[:500], "sha256": sha256}
        files.write_manifest(note_file, {**note, "bytes": target.stat().st_size})
        return str(target)


def _require_image(fetched: Path) -> None:
    """Raise FetchError if a download is not an image, or its pixels cannot be read."""
    try:
        read_image_size(held := fetched.read_bytes(), decode=True)
    except ValueError as error:
        why = str(error).split(" in the record ", maxsplit=1)[-1]
        raise FetchError(f"the download of {counted(len(held), 'byte')} {why}") from None
