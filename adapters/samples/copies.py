"""
Copies of data files at places, in a folder of this machine.

A file is copied whole: records are read in shuffled order, by their places in the file, and
training needs no network. The copy stands under the digest of its content, beside a note of the
place, its size and its version. A start asks for these again, and copies a file that has changed.
"""

import contextlib
import glob
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from packplan.adapters import files
from packplan.adapters.samples.places import Patience, RefusedError, Standing, fetch, listed, standing_of
from packplan.core.errors import CorruptArtefactError, DataSetError
from packplan.core.samples import folder_of, scheme_of, without_credentials, without_signature

log = logging.getLogger(__name__)

MOST_BYTES = 2**36
"""Bytes of a data file: 64 GiB."""

_PATIENCE = Patience(all_s=None)

_SCHEMA = "packplan.place/1"

_FOLDER, _NOTE = "place-", "note.json"


def local_files(name: str, cache: Path) -> list[Path]:
    """
    Return copies of the file at a place, or of those of a pattern, made where there are none.

    Args:
        name: Place, or pattern of places where its kind lists files.
        cache: Folder of copies.

    Raises:
        DataSetError: A file is not to be had, or no file matches.
        OutputError: There is no room for a copy.
    """
    return [_local(place, cache) for place in _matching(name)]


def origin_of(path: Path) -> tuple[str, str] | None:
    """
    Return the place that a file is a copy of, without credentials, and its folder; None for other
    files.
    """
    if not path.parent.parent.name.startswith(_FOLDER):
        return None
    note = _note(path.parent.parent / _NOTE)
    return None if note is None else (str(note["place"]), str(note["folder"]))


def _matching(name: str) -> list[str]:
    """Return the place of a name, or those of a pattern; DataSetError if there is none."""
    if scheme_of(name) in {"http", "https"} or not glob.has_magic(name):
        return [name]
    try:
        found = listed(name)
    except RefusedError as error:
        raise _unread(name, error) from None
    if not found:
        message = f"{without_credentials(name)} matches no file: name existing data files"
        raise DataSetError(message)
    return found


def _unread(name: str, error: Exception) -> DataSetError:
    return DataSetError(f"{without_credentials(name)} cannot be read: {error}")


def _local(place: str, cache: Path) -> Path:
    """Return the copy of the file at a place, as it is now."""
    key = hashlib.sha256(without_signature(place).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    folder = cache / f"{_FOLDER}{key}"
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with files.held(folder / "lock", f"for a copy of {without_credentials(place)}"):
        note = _note(folder / _NOTE)
        copy = folder / note["sha256"] / note["name"] if note else folder
        known = Standing(note["size"], note["version"]) if note else Standing(0, "")
        has_copy = copy.is_file() and copy.stat().st_size == known.size
        try:
            standing = standing_of(place, most=MOST_BYTES, patience=_PATIENCE)
        except RefusedError as error:
            if not has_copy:
                raise _unread(place, error) from None
            log.warning("%s cannot be asked: %s; its copy of before is read", without_credentials(place), error)
            return copy
        if has_copy and standing.version and standing == known:
            return copy
        fetched = _fetch_copy(place, folder, standing)
        if has_copy and fetched != copy:
            log.warning("%s is another file than before: it was fetched again", without_credentials(place))
        return fetched


def _fetch_copy(place: str, folder: Path, standing: Standing) -> Path:
    """Return a new copy of the file at a place."""
    target, name, shown = folder / "fetched", _name_of(place), without_credentials(place)
    try:
        sha256 = fetch(place, target, most=MOST_BYTES, patience=_PATIENCE)
        if standing != standing_of(place, most=MOST_BYTES, patience=_PATIENCE):
            raise RefusedError("it changed while it was fetched: start again when it is complete")  # noqa: TRY301
    except RefusedError as error:
        raise _unread(place, error) from None
    copy = folder / sha256 / name
    with files.writing(copy):
        copy.parent.mkdir(exist_ok=True)
        target.replace(copy)
        files.sync_folder(copy.parent)
    note = {"schema": _SCHEMA, "place": shown, "folder": folder_of(place), "sha256": sha256, "name": name}
    files.write_manifest(folder / _NOTE, {**note, "size": copy.stat().st_size, "version": standing.version})
    log.info("%s is copied once: %s", shown, copy)
    return copy


def _name_of(place: str) -> str:
    """Return the name of a copy, whose end says which format it has."""
    last = re.sub(r"[?#].*", "", place).rpartition("/")[2]
    return re.sub(r"[^\w.-]", "_", last)[-100:].lstrip(".") or "data"


def _note(path: Path) -> dict[str, Any] | None:
    """Return the note of a copy; None if there is none, or a damaged one."""
    with contextlib.suppress(CorruptArtefactError), files.writing(path):
        return files.read_manifest(path, _SCHEMA)
    return None
